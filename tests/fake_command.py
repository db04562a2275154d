"""The `batchgen` command with the fake model: python fake_command.py MODEL_FOLDER SECONDS_A_STEP run job.yaml ..."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from fakes import FakeEngine, FakeModel

from batchgen import cli, job


def main() -> None:
    folder, pause = Path(sys.argv[1]), float(sys.argv[2])
    assert job.run.__kwdefaults__ is not None
    job.run.__kwdefaults__["model_opener"] = lambda spec: FakeModel(
        folder, FakeEngine(running=8, pace=5, think=lambda: time.sleep(pause))
    )
    cli.main(sys.argv[3:])


if __name__ == "__main__":
    main()
