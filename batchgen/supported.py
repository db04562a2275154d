"""What models run here: families, formats, and how large a model this machine holds. For `batchgen models`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

FORMATS = {
    "safetensors": "a folder with config.json; one file or shards; float32, bfloat16 or float16",
    "quantised safetensors": "FP8, compressed-tensors, GPTQ, AWQ, bitsandbytes, MXFP4, dequantised while loading",
    "gguf": "one file or all parts of a split one; F32, F16, BF16 and the quantisations that the gguf package reads "
    "(Q8_0, Q4_K ...), dequantised while loading",
}
PATHS = (
    "./folder",
    "file.gguf",
    "org/name",
    "hf://org/name@revision",
    "hf://org/name/file.gguf",
    "s3://bucket/folder",
    "package:some_package/file.gguf",
)
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0}  # of one parameter, in about
FOR_WEIGHTS = 0.8  # of the free memory; the rest is for the KV cache, and a step


def describe() -> dict[str, Any]:
    from batchgen.models.families import FAMILIES
    from batchgen.weights.gguf_architectures import ARCHITECTURES

    return {
        "families": {name: family.known_for for name, family in FAMILIES.items()},
        "formats": FORMATS,
        "gguf_architectures": list(ARCHITECTURES),
        "paths": list(PATHS),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """The device that `engine.device: auto` takes, and the parameters of the largest model that it holds, by dtype."""
    from batchgen_kernels import cpu

    from batchgen.device import Cpu
    from batchgen.loader import open_device, resolve_dtype

    device = open_device("auto")
    on_gpu = not isinstance(device, Cpu)
    kernels = None if on_gpu else cpu.load()
    stored = ("float32", "bfloat16", "float16") if on_gpu else ("float32", "bfloat16")
    free = device.free_bytes()
    return {
        "device": str(device.torch_device),
        "name": device.name,
        "cpu_kernels": None if on_gpu else (kernels.isa if kernels else "none: plain torch"),
        "free_bytes": free,
        "fast_dtypes": [dtype for dtype in stored if resolve_dtype("auto", dtype, on_gpu=on_gpu) == dtype],
        "largest_parameters": {
            dtype: int(FOR_WEIGHTS * free / BYTES[dtype]) for dtype in (*stored, *(() if on_gpu else ("int8",)))
        },
    }


def lines(found: dict[str, Any]) -> Iterator[str]:
    yield "Families (architectures in config.json):"
    width = max(len(name) for name in found["families"])
    for name, known_for in found["families"].items():
        yield f"  {name:<{width}}  {known_for}"
    yield "Formats:"
    for name, text in found["formats"].items():
        yield f"  {name:<{width}}  {text}"
    yield "GGUF architectures: " + ", ".join(found["gguf_architectures"])
    yield "Paths: " + ", ".join(found["paths"])
    here = found["machine"]
    kernels = f", CPU kernels: {here['cpu_kernels']}" if here["device"] == "cpu" else ""
    yield f"This machine: {here['name']}{kernels}; {here['free_bytes'] / 2**30:.1f} GiB free"
    for dtype, parameters in here["largest_parameters"].items():
        slow = "" if dtype in (*here["fast_dtypes"], "int8") else " (no instructions for it: slow)"
        yield f"  {dtype:<9} up to about {parameters / 1e9:.1f} billion parameters{slow}"
