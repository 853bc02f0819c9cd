"""Plants each bug of `tests/canaries/table.py` in a copy of the engine and runs the swarm on it.

    python tools/canaries.py [--steps 1000000] [--only NAME] [--corpus FILE]

Prints how many simulated steps it took to find each. Exit status 1 if one was not found. With a
corpus, the smallest case that shows each is added to it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "canaries"))

from table import CANARIES, Canary  # noqa: E402

NEEDED = (
    *("engine/__init__.py", "engine/errors.py", "engine/moved.py", "engine/config", "engine/ipc"),
    *("engine/messages", "engine/kv", "engine/sched", "policylab/__init__.py", "policylab/verify"),
)
FIRST_STEPS = 20_000  # of the swarm, before starvation is looked at
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


class Caught(NamedTuple):
    """What found the bug and after how many steps; an empty message: nothing did.

    ``case``: the smallest that shows it, as JSON, if a case does.
    """

    num_steps: int
    message: str
    case: str = ""


def hunt(canary: Canary, max_steps: int = MAX_STEPS) -> Caught:
    """Plant the bug in a copy and look for it."""
    with tempfile.TemporaryDirectory() as folder:
        plant(canary, Path(folder))
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


def plant(canary: Canary, folder: Path) -> None:
    """A copy of what the simulation needs, with the bug in it."""
    for name in NEEDED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    path = folder / "engine" / canary.file
    text = path.read_text(encoding="utf-8")
    assert text.count(canary.old) == 1, f"{canary.name}: {canary.file} has changed"
    path.write_text(text.replace(canary.old, canary.new), encoding="utf-8")


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
