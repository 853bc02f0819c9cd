"""docs/internals/behaviours.md lists which test holds which case, for the tests there are."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "behaviours_table.py"
WANTED = list(range(1, 131))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("behaviours_table", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date(tool: ModuleType) -> None:
    written = tool.DOCUMENT.read_text(encoding="utf-8")
    assert written == tool.document(), "run: python tools/behaviours_table.py"


def test_every_case_of_the_scheduler_has_a_test(tool: ModuleType) -> None:
    held = {number for test in tool.find_tests() for number in test.numbers}
    missing = [number for number in WANTED if number not in held]
    assert not missing, f"no test names {missing}"


def test_no_test_claims_a_case_by_its_name_alone() -> None:
    claims = re.compile(r"def (test_(?:behaviours?_\d|0\d\d_|1[0-2]\d_|130_)\w*)")
    names = {
        f"{path.name}: {name}"
        for path in TOOL.parents[1].joinpath("tests").rglob("test_*.py")
        for name in claims.findall(path.read_text(encoding="utf-8"))
    }
    assert not names, f"use @pytest.mark.behaviour: {names}"
