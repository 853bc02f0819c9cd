"""The table of shipped policies in the documentation says what their docstrings say."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_policies_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("table", ROOT / "tools" / "policies_table.py")
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    written = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert written == tool.table(), "run: python tools/policies_table.py"
