"""Counts lines of Python by part of the repository, and words of documents.

    python tools/lines.py [CHECKOUT]

Prints each count next to its limit. What grew between two commits may come on top of the limit;
both are read from git and counted in the same way. A file counts for the part in which it stands
today, also where a commit has it elsewhere. Exit status 1 if anything is above its limit.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GROWTH_FROM, GROWTH_TO = "97046b3", "7283dad"
"""Growth between these two commits is allowed on top of the limits."""

LIMITS = {
    "engine + kernels": 57_000,
    "policylab": 14_000,
    "tests": 49_000,
    "tools + benchmarks": 9_500,
    "words of documents": 25_000,
}
GENERATED = "words of generated tables"
CORPORA = "corpora of tests"
"""Collected cases, without the code that reads them; they are counted apart."""
CORPUS_FILES = re.compile(
    r"tests/(canaries/table|speech/corpus"
    r"|structured/(bombs|corpus|expressions|grammars|pydantic_models|schemas))\.py$"
)

# Where files stood before `policylab` was a package.
LAB_COMMANDS = (
    *("calibrate", "capacity", "compare", "lab", "policies", "seeing", "simulate"),
    *("verify", "workload", "worst"),
)
MOVED = (
    (re.compile(r"engine/(sim|verify)/"), r"policylab/\1/"),
    (re.compile(r"engine/core/simulated\.py$"), r"policylab/simulated.py"),
    (re.compile(rf"engine/cli/({'|'.join(LAB_COMMANDS)})\.py$"), r"policylab/cli/\1.py"),
)
WRITTEN_BY_TOOLS = ("options.md", "policies.md")  # whole pages
MARKED = re.compile(r"<!-- (\w+)(?:: [\w-]+)? -->.*?<!-- \1 end -->", re.DOTALL)
BELOW = re.compile(r"<!-- below: written by .*", re.DOTALL)


def home(path: str) -> str:
    """The present path of a file that has moved, except the alias in ``engine/verify``."""
    for before, now in MOVED:
        if before.match(path):
            return before.sub(now, path)
    return path


def files_of(checkout: Path) -> Iterator[tuple[str, str]]:
    """Path and text of each Python file and document that git has or would add."""
    listed = git(checkout, "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    for path in sorted(set(listed.split("\0"))):
        if path.endswith((".py", ".md")) and (checkout / path).is_file():
            yield path, (checkout / path).read_text(encoding="utf-8")


def files_at(commit: str) -> Iterator[tuple[str, str]]:
    """Path and text of each Python file and document in a commit of this repository."""
    listed = git(ROOT, "ls-tree", "-r", "-z", "--name-only", commit).split("\0")
    paths = [path for path in listed if path.endswith((".py", ".md"))]
    names = "".join(f"{commit}:{path}\n" for path in paths).encode()
    command = ["git", "-C", str(ROOT), "cat-file", "--batch"]
    found = subprocess.run(command, input=names, capture_output=True, check=True).stdout
    begin = 0
    for path in paths:
        head, _, _ = found[begin:].partition(b"\n")
        begin += len(head) + 1
        end = begin + int(head.split()[-1])
        yield path, found[begin:end].decode()
        begin = end + 1


def git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def count(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """Lines, or words of documents, by part."""
    counts: Counter[str] = Counter()
    for path, text in files:
        if path.endswith(".md"):
            if path.startswith("docs/") or "/" not in path:
                written = "" if Path(path).name in WRITTEN_BY_TOOLS else by_hand(text)
                counts["words of documents"] += len(written.split())
                counts[GENERATED] += len(text.split()) - len(written.split())
        elif part := part_of(path):
            counts[part] += len(text.splitlines())
    return counts


def by_hand(text: str) -> str:
    """A document without what a tool writes into it."""
    return BELOW.sub("", MARKED.sub("", text))


def part_of(path: str) -> str:
    """The part that a Python file belongs to; empty for examples, which do not count."""
    if CORPUS_FILES.match(path):
        return CORPORA
    top = home(path).split("/", 1)[0]
    return {
        **dict.fromkeys(("engine", "kernels"), "engine + kernels"),
        **dict.fromkeys(("tools", "benchmarks"), "tools + benchmarks"),
        "policylab": "policylab",
        "tests": "tests",
    }.get(top, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", nargs="?", type=Path, default=ROOT, metavar="CHECKOUT")
    now = count(files_of(parser.parse_args().checkout))
    first, last = count(files_at(GROWTH_FROM)), count(files_at(GROWTH_TO))
    columns = (GROWTH_FROM, GROWTH_TO, "now", "limit", "growth", "allowed", "above")
    print(f"{'':26}" + "".join(f"{name:>9}" for name in columns))
    any_above = False
    for part, limit in LIMITS.items():
        growth = last[part] - first[part]
        above = now[part] - limit - growth
        any_above |= above > 0
        figures = (first[part], last[part], now[part], limit, growth, limit + growth, max(above, 0))
        print(f"{part:26}" + "".join(f"{figure:>9,}" for figure in figures))
    for part in (CORPORA, GENERATED):
        apart = (first[part], last[part], now[part])
        print(f"{part:26}" + "".join(f"{figure:>9,}" for figure in apart))
    return 1 if any_above else 0


if __name__ == "__main__":
    sys.exit(main())
