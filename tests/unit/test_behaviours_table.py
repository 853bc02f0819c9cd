"""docs/internals/behaviours.md lists which test holds which case, for the tests there are."""

from __future__ import annotations

import importlib.util
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
