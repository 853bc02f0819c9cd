"""docs/options.md has the options there are, as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).parents[2] / "tools" / "options_page.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("options_page", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert tool.PAGE.read_text("utf-8") == tool.page(), "run: python tools/options_page.py"
