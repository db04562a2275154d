"""batchgen: offline batch inference for language models.

`batchgen.run(spec)` runs a job, `batchgen.load(path)` reads a job file, `batchgen.Engine(model)` is an engine for a
notebook. They are imported on first use: `import batchgen` alone loads neither torch nor anything else that is slow.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from batchgen.api import Engine
    from batchgen.job import RunOptions, run
    from batchgen.spec import load

__all__ = ["Engine", "RunOptions", "__version__", "load", "run"]

_HOMES = {"Engine": "batchgen.api", "load": "batchgen.spec", "run": "batchgen.job", "RunOptions": "batchgen.job"}


def share_cores() -> None:
    """Let OpenMP threads sleep soon when they wait for each other; has an effect until torch is imported.

    By default they spin for milliseconds. Beside another busy process each of a step's hundreds of waits then lasts a
    whole time slice of the system's: a workload of seconds was seen to take minutes.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    from importlib import import_module

    share_cores()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
