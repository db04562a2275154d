"""The Dockerfile, as far as it goes without Docker: what it says, and that its wheel holds a working batchgen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]


def stages() -> dict[str, list[tuple[str, str]]]:
    """Stage -> its instructions, each a word and the rest."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found: dict[str, list[tuple[str, str]]] = {}
    for line in filter(None, text.splitlines()):
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            current = found.setdefault(rest.split()[-1], [])
        current.append((word, rest))
    return found


def test_both_images_are_pinned_run_as_nobody_and_hand_signals_on() -> None:
    assert [*stages()] == ["wheel", "gpu", "cpu"]
    for name, instructions in stages().items():
        said = dict(instructions)
        assert re.search(r":\d+\.\d+\.\d+-", said["FROM"])
        if name == "wheel":
            continue
        assert said["ENTRYPOINT"] == '["batchgen"]'  # no shell in between that would keep signals to itself
        assert said["USER"].isdigit() and said["USER"] != "0"
        order = [word for word, _ in instructions]
        assert max(i for i, word in enumerate(order) if word == "RUN") < order.index("USER")
        installs = [rest for word, rest in instructions if word == "RUN" and "pip install" in rest]
        assert all("requirements-image.txt" in rest or "--no-deps" in rest for rest in installs)


def test_the_images_hold_what_batchgen_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(one for extra in ("s3", "gcs", "azure", "hub") for one in extras[extra])]
    lines = (ROOT / "requirements-image.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(pinned[requirement.name.replace("_", "-")]), requirement


def test_the_steps_that_make_and_install_the_wheel(tmp_path: Path) -> None:
    """Without a compiler, which would take a minute: `make install` builds the native ops already."""
    source, site = tmp_path / "src", tmp_path / "site"
    source.mkdir()
    skipped = shutil.ignore_patterns("__pycache__", "*.so")
    for word, rest in stages()["wheel"]:
        if word == "COPY":
            *names, target = rest.split()
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / target, ignore=skipped)
                else:
                    shutil.copy(ROOT / name, source / target)
    (step,) = (rest for word, rest in stages()["wheel"] if word == "RUN" and rest.startswith("pip"))
    made = shlex.split(step.replace("/wheels", str(tmp_path / "wheels")))
    pip = [sys.executable, "-m"]  # setuptools is here already
    no_compiler = {**os.environ, "CC": "false", "CXX": "false"}
    subprocess.run(
        [*pip, *made, "--no-build-isolation"], cwd=source, env=no_compiler, check=True, capture_output=True, text=True
    )
    (wheel,) = (tmp_path / "wheels").iterdir()
    subprocess.run(
        [*pip, "pip", "install", "--no-deps", "--no-index", "--target", site, wheel], check=True, capture_output=True
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, str(site / "bin" / "batchgen"), "--help"]
    helped = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "bench" in helped.stdout
