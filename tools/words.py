"""Counts words in code and comments that this project no longer uses.

    python tools/words.py [CHECKOUT] [--only PREFIX] [--list]

Counted are the words of ``WORDS`` in docstrings, comments, strings and names (``_told`` counts as
``told``), and docstrings that begin with one of ``BEGINNINGS``. The limit is a tenth of what the
packages had at the commit ``BEFORE``. ``--list`` prints file, line and text of each, ``--only
engine/sched`` leaves out all others. Exit status 1 if there are more than the limit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.lines import ROOT, files_at, files_of, home

BEFORE = "97046b3"
PACKAGES = ("engine", "kernels", "policylab")
WORDS = ("asked", "told", "said", "behind", "beside")
PHRASES = {"so many": ("so", "many"), "hangs on": ("hangs?", "on")}
BEGINNINGS = ("Of", "As", "Those", "That", "The same")

BREAK = r"(?:\s+|\s*\n\s*#\s*)"  # between two words, also where a comment goes on in the next line
ANY_WORD = re.compile(
    "|".join(
        (
            # No letter before or after, but for the hump of a name in CamelCase.
            *(
                rf"(?P<{word}>(?<![A-Za-z]){word}(?![a-z])"
                rf"|{word.capitalize()}(?![a-z])|(?<![A-Z]){word.upper()}(?![A-Za-z]))"
                for word in WORDS
            ),
            *(
                rf"(?P<{name.replace(' ', '_')}>\b[{first[0]}{first[0].upper()}]{first[1:]}"
                rf"{BREAK}{second}\b)"
                for name, (first, second) in PHRASES.items()
            ),
        )
    )
)
BEGINNING = re.compile(rf"\s*({'|'.join(BEGINNINGS)})\b")


class Found(NamedTuple):
    """A word of the list: the package (two levels of folders), what it is, file, line, text."""

    package: str
    word: str
    path: str
    line: int
    text: str


def search(files: Iterable[tuple[str, str]], only: str = "") -> Iterator[Found]:
    for path, text in files:
        where = home(path)
        if not path.endswith(".py") or where.split("/")[0] not in PACKAGES:
            continue
        if where.startswith(only):
            yield from search_file(path, package_of(where), text)


def package_of(where: str) -> str:
    """The package of a file: ``engine/sched`` for all files below it, ``engine`` for its own."""
    return "/".join(where.split("/")[:-1][:2])


def search_file(path: str, package: str, text: str) -> Iterator[Found]:
    lines = text.splitlines()
    for match in ANY_WORD.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        word = (match.lastgroup or "").replace("_", " ")
        yield Found(package, word, path, line, lines[line - 1].strip())
    for docstring in docstrings(ast.parse(text)):
        if match := BEGINNING.match(docstring.value):
            word = f"{match[1]} ..."
            yield Found(package, word, path, docstring.lineno, lines[docstring.lineno - 1].strip())


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """All strings that stand as a statement: docstrings, and those below a constant or field."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str()) as docstring):
                yield docstring


def table(now: list[Found], before: list[Found]) -> Iterator[str]:
    names = (*WORDS, *PHRASES, *(f"{word} ..." for word in BEGINNINGS))
    yield f"{'':22}" + "".join(f"{name:>13}" for name in (*names, "all", BEFORE, "a tenth"))
    counts = Counter((found.package, found.word) for found in now)
    counts_before = Counter(found.package for found in before)
    packages = sorted({*counts_before, *(found.package for found in now)})
    for package in packages:
        row = [counts[package, name] for name in names]
        yield line(package, [*row, sum(row), counts_before[package]])
    row = [sum(counts[package, name] for package in packages) for name in names]
    yield line("all", [*row, sum(row), len(before), len(before) // 10])


def line(name: str, figures: list[int]) -> str:
    return f"{name:22}" + "".join(f"{figure:>13,}" for figure in figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, metavar="CHECKOUT")
    parser.add_argument("--only", default="", metavar="PREFIX", help="files below this path")
    parser.add_argument("--list", action="store_true", help="print file, line and text of each")
    options = parser.parse_args()
    now = list(search(files_of(options.checkout), options.only))
    before = list(search(files_at(BEFORE), options.only))
    if options.list:
        for found in now:
            print(f"{found.path}:{found.line}: [{found.word}] {found.text}")
    print("\n".join(table(now, before)))
    return 1 if len(now) > len(before) // 10 else 0


if __name__ == "__main__":
    sys.exit(main())
