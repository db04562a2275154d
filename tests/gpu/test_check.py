"""The program behind `make gpu-check`, as far as it goes without a GPU: it must not rot until one is there."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", Path(__file__).with_name("check.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_measurement_runs_with_a_tiny_model(check: ModuleType) -> None:
    found = {part.name: check.measure(part, smoke=True) for part in check.SMOKE_PARTS}
    assert found["device"]["torch"] == torch.__version__
    assert found["rates"]["copy_gb_per_s"] > 0
    ours, theirs = found["nano smoke"], found["transformers smoke"]
    assert ours["output_tokens"] == theirs["output_tokens"] == 63 and theirs["finished"]
    names = {part.name for part in check.PARTS}
    assert all(goal.part in names for goal in check.GOALS)
    assert all(part.name.partition(" ")[0] in {name.partition(" ")[0] for name in names} for part in check.SMOKE_PARTS)


def test_a_part_that_fails_leaves_the_others(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "part.py"
    program.write_text(
        "import sys, time\n"
        "part = sys.argv[2]\n"
        "print('about to', part)\n"
        "if part == 'hangs': time.sleep(60)\n"
        "if part == 'fails': sys.exit('no such kernel')\n"
        "print('{\"copy_gb_per_s\": 7.5}')\n"
        "print('goodbye', file=sys.stderr)\n"
    )
    monkeypatch.setattr(check, "__file__", str(program))
    limits = {"device": 60.0, "fails": 60.0, "rates": 60.0, "hangs": 0.5}
    monkeypatch.setattr(check, "PARTS", [check.Part(*part) for part in limits.items()])
    monkeypatch.setattr(sys, "argv", ["check.py", "--json", str(tmp_path / "found.json")])
    assert check.main() == 1
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert {name: part["status"] for name, part in found.items()} == {
        "device": "passed",
        "fails": "failed",
        "rates": "passed",
        "hangs": "too slow",
    }
    assert found["rates"]["copy_gb_per_s"] == 7.5 and found["fails"]["output"][-1] == "no such kernel"
    said = capsys.readouterr().out
    assert "    no such kernel\n" in said and said.endswith("2 of 4 parts passed; not: fails, hangs\n")


def test_nothing_is_tried_without_a_gpu(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "part.py"
    program.write_text("import sys; sys.exit('torch sees no GPU here')")
    monkeypatch.setattr(check, "__file__", str(program))
    shown: list[str] = []
    results = check.run_parts(check.PARTS, False, lambda part, result: shown.append(part.name))
    assert [result["status"] for result in results.values()] == ["failed"] + ["not run"] * (len(check.PARTS) - 1)
    assert shown == [part.name for part in check.PARTS]
