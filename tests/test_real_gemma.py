"""Gemma 3 270M itself, in float32: its greedy tokens are the reference implementation's."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType
from models_at_hand import GEMMA3
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel

from batchgen.api import Engine
from batchgen.weights.gguf_metadata import read_header

pytestmark = pytest.mark.skipif(GEMMA3 is None, reason="the model is not installed")

TOKENS = 48
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Die Hauptstadt von Deutschland ist",
    "Water boils at",
    "List of planets:\n1. Mercury\n2.",
    "The history of the steam engine began",
    "Q: What is 2+2?\nA:",
    "人工智能是",
    "La recette de la tarte aux pommes",
    "SELECT name FROM users WHERE",
    "The quick brown fox",
    "In 1969, Neil Armstrong",
    "Photosynthesis is the process",
    "Dear Sir or Madam,\n\n",
    "import numpy as np\n",
    "Roses are red,",
    "The three laws of thermodynamics",
    "My favourite food is",
    "Sliding windows are shorter than this. " * 90,  # 512 tokens
]
PLACES = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    """With the published model's settings, and the file's tensors as the gguf package dequantises them."""
    assert GEMMA3 is not None
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        max_position_embeddings=32768,
    )
    state = {}
    for info in read_header(GEMMA3).tensors:  # the package's own reader takes half a minute
        with open(GEMMA3, "rb") as file:
            file.seek(info.offset)
            kind = GGMLQuantizationType(info.ggml_type)
            block, size = gguf.GGML_QUANT_SIZES[kind]
            elements = 1
            for length in info.shape:
                elements *= length
            stored = torch.frombuffer(bytearray(file.read(elements // block * size)), dtype=torch.uint8).numpy()
        array = torch.from_numpy(gguf.dequantize(stored.reshape(*info.shape[:-1], -1), kind)).reshape(info.shape)
        *front, stem, _ = info.name.split(".")
        name = f"model.layers.{front[1]}.{PLACES[stem]}" if front else {"token_embd": "model.embed_tokens"}.get(stem)
        state[f"{name or 'model.norm'}.weight"] = array - 1 if stem.endswith("norm") else array
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    return model


def test_greedy_tokens_equal_the_reference(reference: PreTrainedModel) -> None:
    engine = Engine(str(GEMMA3), dtype="float32", kv_memory=1 << 30)
    requests = [engine.request(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in PROMPTS]
    assert max(len(request.prompt_token_ids) for request in requests) > 512
    got = {done.key.row: done.token_ids.tolist() for done in engine.generate(requests)}
    wrong = []
    for row, request in enumerate(requests):
        prompt = request.prompt_token_ids.tolist()
        # greedy tokens are their own continuation: one pass over prompt and answer shows every choice
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + got[row]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.argmax(-1).tolist()
        if got[row] != expected:
            at = next(n for n in range(TOKENS) if got[row][n] != expected[n])
            wrong.append((PROMPTS[row][:40], at, got[row][at], expected[at], logits[at].topk(2).values.tolist()))
    assert not wrong, wrong
