"""Plants each bug of `tests/canaries/table.py` in a copy of the engine and runs the swarm there, or
the tests that the table names.

    python tools/canaries.py [--steps 1000000] [--only NAME] [--corpus FILE]

Prints the number of simulated steps after which each bug is found. The exit status is 1 if one is
not found. The smallest case that shows a bug is added to the corpus, if one is given.
"""

from __future__ import annotations

import argparse
import builtins
import json
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "canaries"))

from table import CANARIES, Canary  # noqa: E402

NEEDED = (
    *("engine/__init__.py", "engine/errors.py", "engine/moved.py", "engine/config", "engine/ipc"),
    *(
        "engine/core/__init__.py",
        "engine/core/engine_core.py",
        "engine/core/group.py",
        "engine/messages",
        "engine/kv",
        "engine/kv_transfer",
        "engine/lora",
        "engine/mm",
        "engine/rpc",
        "engine/sched",
        "engine/states",
        "engine/worker/__init__.py",
        "engine/observe/__init__.py",
        "engine/observe/guard.py",
        "engine/worker/known_tokens.py",
        "engine/worker/rank.py",
        "engine/worker/rank_times.py",
        "policylab/__init__.py",
        "policylab/verify",
    ),
)
WORD = re.compile(r"\w+|\"[^\"]*\"|'[^']*'|#.*|[^\w\s]")
FIRST_STEPS = 20_000  # of the swarm, before the trial of starvation
MAX_STEPS = 1_000_000
TIMEOUT = 1200  # seconds; a planted bug may also hang
HUNT = f"""
import json, logging, sys
from itertools import count
logging.disable(logging.CRITICAL)
from engine.sched.policies import POLICIES
from policylab.verify.starvation import wait_in_overload
from policylab.verify.case import to_json
from policylab.verify.swarm import Swarm, smallest

def starved():
    for policy in POLICIES:
        try:
            if policy != "priority" and wait_in_overload(policy, {{}}, 1000).num_steps is None:
                return policy + " starves a request"
        except Exception as error:
            return repr(error)
    return ""

def hunt(max_steps):
    seeds, swarm = count(), Swarm(every=4)
    tally = swarm.run(seeds, min({FIRST_STEPS}, max_steps))
    if not tally.found:
        message = starved()
        if message:
            return tally.num_steps, message, ""
        tally.add(swarm.run(seeds, max_steps - tally.num_steps))
    for found in tally.found:
        return tally.num_steps, found.broken.message, to_json(smallest(found))
    return tally.num_steps, "", ""

print(json.dumps(hunt(int(sys.argv[1]))))
"""


TESTED = ("engine", "kernels", "policylab", "tests", "tools", "pyproject.toml")


class Caught(NamedTuple):
    """The number of steps until the bug was found, and the error; empty if it was not found.

    ``case``: the smallest case that shows the bug as JSON, if there is one.
    """

    num_steps: int
    message: str
    case: str = ""


def hunt(canary: Canary, max_steps: int = MAX_STEPS) -> Caught:
    """Plant the bug in a copy and look for it."""
    with tempfile.TemporaryDirectory() as folder:
        plant(canary, Path(folder), TESTED if canary.tests else NEEDED)
        if canary.tests:
            return tested(canary, Path(folder))
        try:
            done = subprocess.run(
                [sys.executable, "-c", HUNT, str(max_steps)],
                env={**os.environ, "PYTHONPATH": folder},
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return Caught(0, "it hangs")
    if done.returncode:
        raise RuntimeError(f"{canary.name} does not even run:\n{done.stderr}")
    return Caught(*json.loads(done.stdout))


def tested(canary: Canary, folder: Path) -> Caught:
    """Run the tests in the folder that should find the bug."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", canary.tests]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT
        )
    except subprocess.TimeoutExpired:
        return Caught(0, "it hangs")
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if not failed and done.returncode:
        raise RuntimeError(f"{canary.tests} do not even run:\n{done.stdout}{done.stderr}")
    return Caught(0, failed[0].removeprefix("FAILED ") if failed else "")


def plant(canary: Canary, folder: Path, needed: Sequence[str] = NEEDED) -> None:
    """Copy what the simulation needs, or the tests, with the bug, into the folder."""
    for name in needed:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    path = folder / "engine" / canary.file
    path.write_text(planted(canary, path.read_text(encoding="utf-8")), encoding="utf-8")


def planted(canary: Canary, source: str) -> str:
    """The source with the bug in it.

    If ``old`` is not there once as it is written, the place is taken that differs from it in names
    and white space alone, and ``new`` gets the names of that place: a rename breaks no canary.
    Raises ``LookupError`` if no place or several have most names in common with ``old``.
    """
    if source.count(canary.old) == 1:
        return source.replace(canary.old, canary.new)
    wanted, words = list(WORD.finditer(canary.old)), list(WORD.finditer(source))
    found: list[tuple[int, int, dict[str, str]]] = []
    for first in range(len(words) - len(wanted) + 1):
        names = renamed(wanted, words[first : first + len(wanted)])
        if names is not None:
            found.append((sum(old == new for old, new in names.items()), first, names))
    most = max((score for score, _, _ in found), default=0)
    best = [(first, names) for score, first, names in found if score == most]
    if len(best) != 1 or 2 * most < len(best[0][1]):
        raise LookupError(f"{canary.name}: {canary.file} has changed")
    ((first, names),) = best
    begin, end = words[first].start(), words[first + len(wanted) - 1].end()
    new = WORD.sub(lambda word: names.get(word[0], word[0]), canary.new.strip())
    return source[:begin] + new + source[end:]


def renamed(wanted: list[re.Match[str]], words: list[re.Match[str]]) -> dict[str, str] | None:
    """The names at this place by the wanted ones; None if more than names differ."""
    names: dict[str, str] = {}
    for old, new in zip(wanted, words, strict=True):
        if not is_name(old[0]) or not is_name(new[0]):
            if old[0] != new[0]:
                return None
        elif names.setdefault(old[0], new[0]) != new[0]:
            return None
    return names if len({*names.values()}) == len(names) else None


def is_name(word: str) -> bool:
    """Whether a rename may change the word: it is a name, but no keyword or builtin."""
    return word.isidentifier() and not keyword.iskeyword(word) and not hasattr(builtins, word)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=MAX_STEPS, metavar="N")
    parser.add_argument("--only", metavar="NAME", help="part of the names of those to try")
    parser.add_argument("--corpus", type=Path, metavar="FILE")
    parsed = parser.parse_args()
    chosen = [canary for canary in CANARIES if (parsed.only or "") in canary.name]
    num_caught = 0
    for canary in chosen:
        begun = time.monotonic()
        caught = hunt(canary, parsed.steps)
        num_caught += bool(caught.message)
        if parsed.corpus is not None and caught.case:
            note = json.dumps(f"canary: {canary.name}")
            with parsed.corpus.open("a", encoding="utf-8") as lines:
                lines.write(f'{{"note":{note},"case":{caught.case}}}\n')
        seconds = time.monotonic() - begun
        what = caught.message.splitlines()[0][:70] if caught.message else "NOT FOUND"
        print(f"{canary.name:48} {caught.num_steps:>9,} steps {seconds:6.1f} s  {what}", flush=True)
    print(f"{num_caught} of {len(chosen)} found")
    return 0 if num_caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
