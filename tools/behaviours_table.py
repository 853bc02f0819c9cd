"""Write the table of docs/internals/behaviours.md: which test holds which behaviour.

A test says so by a marker: @pytest.mark.behaviour(26, 33). Run again whenever such a test comes,
goes or is renamed: python tools/behaviours_table.py
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "internals" / "behaviours.md"
MARK = "<!-- below: written by tools/behaviours_table.py -->\n"
LAST = 130
MARKER = "pytest.mark.behaviour"


class Test(NamedTuple):
    """A test that holds numbered cases."""

    numbers: tuple[int, ...]
    title: str
    path: str


def find_tests(root: Path = ROOT) -> list[Test]:
    """All tests of a checkout, by file and place in it.

    Raises ``ValueError`` for a number of no case.
    """
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        where = str(path.relative_to(root))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                numbers = marked(node, f"{where}: {node.name}")
                title = node.name.removeprefix("test_").replace("_", " ")
                found += [Test(numbers, title, where)] if numbers else []
    return found


def marked(test: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> tuple[int, ...]:
    """The numbers in the test's marker, () if it has none."""
    for mark in test.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == MARKER:
            numbers = tuple(ast.literal_eval(number) for number in mark.args)
            wrong = [number for number in numbers if number not in range(1, LAST + 1)]
            if wrong or not numbers:
                raise ValueError(f"{name} names {wrong or 'no case'}, there are 1 to {LAST}")
            return numbers
    return ()


def table(tests: list[Test]) -> str:
    """One row a number; then the numbers that no test names."""
    by_number: defaultdict[int, list[Test]] = defaultdict(list)
    for test in tests:
        for number in test.numbers:
            by_number[number].append(test)
    lines = ["| number | what a test of it says | where |", "|---|---|---|"]
    for number, own in sorted(by_number.items()):
        titles = "; ".join(dict.fromkeys(test.title for test in own))
        paths = dict.fromkeys(test.path for test in own)
        files = ", ".join(f"[{Path(path).stem}](../../{path})" for path in paths)
        lines.append(f"| {number} | {titles} | {files} |")
    missing = ", ".join(str(n) for n in range(1, LAST + 1) if n not in by_number)
    return "\n".join([*lines, "", f"Numbers that no test names: {missing or 'none'}.", ""])


def document() -> str:
    """The document as it should be: its own text, then the table."""
    text, mark, _ = DOCUMENT.read_text(encoding="utf-8").partition(MARK)
    assert mark, f"{DOCUMENT} lacks the line {MARK!r}"
    return f"{text}{MARK}\n{table(find_tests())}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
