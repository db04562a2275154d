"""`batchgen models`, and the page about models that has to say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

from click.testing import CliRunner

from batchgen.cli import cli
from batchgen.models.families import FAMILIES
from batchgen.supported import FORMATS

PAGE = Path(__file__).parents[1] / "docs" / "models.md"


def test_the_page_has_every_family_and_no_other() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)) == set(FAMILIES)


def test_people_and_programs_get_the_same() -> None:
    result = CliRunner().invoke(cli, ["models", "--json"], obj={})
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["families"]) == set(FAMILIES) and set(found["formats"]) == set(FORMATS)
    here = found["machine"]
    assert here["free_bytes"] > 0
    largest = here["largest_parameters"]
    assert largest["bfloat16"] in range(2 * largest["float32"] - 1, 2 * largest["float32"] + 2)
    text = CliRunner().invoke(cli, ["models"], obj={}).stdout
    for name in (*FAMILIES, *largest, here["name"]):
        assert name in text
