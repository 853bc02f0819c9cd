"""README and docs/performance.md hold the figures of `benchmarks/results`, and no others."""

from __future__ import annotations

import pytest

from tools import performance_tables


@pytest.mark.parametrize("path", performance_tables.PAGES, ids=lambda path: path.name)
def test_figures_are_those_that_are_kept(path):
    text = path.read_text(encoding="utf-8")
    assert text == performance_tables.page(text), "run: python tools/performance_tables.py"


def test_each_group_of_figures_stands_in_one_page():
    texts = [path.read_text(encoding="utf-8") for path in performance_tables.PAGES]
    for name in performance_tables.WRITERS:
        assert sum(text.count(f"<!-- {name} -->") for text in texts) == 1, name
