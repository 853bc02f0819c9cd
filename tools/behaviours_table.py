"""Write the table of docs/behaviours.md: which test holds which behaviour.

A test says so in its name: test_behaviour_26_33_the_youngest_makes_room, test_052_....
Run again whenever a test with a number comes, goes or is renamed: python tools/behaviours_table.py
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "behaviours.md"
MARK = "<!-- below: written by tools/behaviours_table.py -->\n"
LAST = 130
NAME = re.compile(r"test_(?:behaviours?_)?((?:\d{1,3}_)+)(\w+)")


class Test(NamedTuple):
    """A test with numbers in its name."""

    numbers: tuple[int, ...]
    title: str
    path: str


def find_tests() -> list[Test]:
    """All of them, by file and place in it."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                match = NAME.fullmatch(node.name)
                numbers = [int(n) for n in match[1].strip("_").split("_")] if match else []
                if match and all(1 <= n <= LAST for n in numbers):
                    where = str(path.relative_to(ROOT))
                    found.append(Test(tuple(numbers), match[2].replace("_", " "), where))
    return found


def table(tests: list[Test]) -> str:
    """One row a number; then the numbers that no test names."""
    by_number: defaultdict[int, list[Test]] = defaultdict(list)
    for test in tests:
        for number in test.numbers:
            by_number[number].append(test)
    lines = ["| number | what a test of it says | where |", "|---|---|---|"]
    for number, own in sorted(by_number.items()):
        titles = "; ".join(dict.fromkeys(test.title for test in own))
        files = ", ".join(
            f"[{Path(path).stem}](../{path})" for path in dict.fromkeys(test.path for test in own)
        )
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
