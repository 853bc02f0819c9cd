"""The table of shipped policies in the documentation says what their docstrings say."""

from tools import policies_table


def test_the_table_of_policies_is_up_to_date() -> None:
    written = policies_table.TARGET.read_text(encoding="utf-8")
    assert written == policies_table.table(), "run: python tools/policies_table.py"
