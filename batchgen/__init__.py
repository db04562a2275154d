"""batchgen: offline batch inference for language models.

`batchgen.run(spec)` runs a job, `batchgen.load(path)` reads a job file, `batchgen.Engine(model)` is an engine for a
notebook. They are imported on first use: `import batchgen` alone loads neither torch nor anything else that is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from batchgen.api import Engine
    from batchgen.job import run
    from batchgen.spec import load

__all__ = ["Engine", "__version__", "load", "run"]

_HOMES = {"Engine": "batchgen.api", "load": "batchgen.spec", "run": "batchgen.job"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
