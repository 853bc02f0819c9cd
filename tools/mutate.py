"""Mutation score of the decision packages: how many small changes the fast tests notice.

    python tools/mutate.py [--sample N] [--only PART] [--jobs J] [--ledger FILE]

Each mutant runs a short swarm in a forked process and, if it survives that, the unit tests of
scheduler and KV. Prints the survivors and the score; exit status 1 if it is below 85 %. With a
ledger, what was tried on the same source before is not tried again.
"""

from __future__ import annotations

import argparse
import ast
import glob
import hashlib
import importlib.abc
import importlib.util
import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from random import Random

import numpy  # noqa: F401  loaded once, before all forks
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

from mutants import Mutant, mutants  # noqa: E402

import engine.messages.requests  # noqa: E402
import engine.messages.step  # noqa: E402, F401

PACKAGES = ("engine/kv", "engine/sched")
# Nothing is decided in these: protocols, and tools of verification itself.
LEFT_OUT = ("interface.py", "connector.py", "testing.py", "pytest_plugin.py", "policy.py")
# The unit tests near a module; what is not named here is the mechanism.
MECHANISM = ("scheduler_bugs", "scheduler_behaviours", "overlap_rules", "cache_behaviours", "pause")
STRANGERS = ("strangers", "rubbish", "scheduler_bugs")
NEAR: dict[str, tuple[str, ...]] = {
    "engine/kv/": ("kv", "cache_behaviours"),
    "sched/guard.py": STRANGERS,
    "sched/answers.py": STRANGERS,
    "sched/faults.py": STRANGERS,
    "sched/resources.py": ("resources_core", *STRANGERS),
    "sched/ledger.py": ("ledger",),
    "sched/lengths.py": ("lengths",),
    "sched/cost.py": ("cost",),
    "sched/shape.py": ("cost",),
    "sched/find.py": ("find",),
    "sched/plugin.py": ("find", "policies_shipped"),
    "sched/fitting.py": ("find", "policies_shipped"),
    "sched/waits.py": ("waits", "limit_behaviours"),
    "sched/agenda.py": ("limit_behaviours", "queue_bounds"),
    "sched/intake.py": ("queue_bounds", "limit_behaviours", "scheduler_behaviours"),
    "sched/tally.py": ("limit_behaviours", "queue_bounds", "scheduler_behaviours"),
    "sched/watch.py": ("limit_behaviours", "queue_bounds", "scheduler_behaviours"),
}
SWARM_STEPS = 6000
SECONDS = 120  # of computing: a mutant that takes longer is noticed too
PATIENCE = 1800  # seconds, for one that sleeps
GIGABYTES = 6
TARGET = 0.85
KILLED, SURVIVED = 1, 0


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree."""

    def __init__(self, mutant: Mutant, tree: ast.Module) -> None:
        self.name = mutant.file.removesuffix(".py").replace("/", ".")
        self.path = ROOT / mutant.file
        self.code = compile(ast.fix_missing_locations(tree), str(self.path), "exec")

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        exec(self.code, module.__dict__)


def files(only: str) -> list[str]:
    """Modules to mutate, relative to the root."""
    found = [path for package in PACKAGES for path in sorted(glob.glob(f"{package}/*.py"))]
    return [f for f in found if Path(f).name not in LEFT_OUT and only in f]


def run_forked(planted: Planted | None) -> int:
    """The process that tries a mutant: its exit status is 0 if nothing was noticed."""
    pid = os.fork()
    if pid:
        return pid
    status, near = KILLED, [*MECHANISM]
    try:
        signal.alarm(PATIENCE)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        if planted is not None:
            sys.meta_path.insert(0, planted)
            near = tests_near(planted.path)
        status = SURVIVED if survives(near) else KILLED
    finally:
        os._exit(status)


def tests_near(path: Path) -> list[str]:
    """Parts of the names of the unit tests that a mutant of this module runs."""
    found = [tests for part, tests in NEAR.items() if part in str(path)]
    return [*(found[0] if found else MECHANISM)]


def survives(near: list[str]) -> bool:
    """Does neither swarm nor unit tests notice anything?"""
    from engine.sched.verify.swarm import Swarm, replay_corpus

    logging.disable(logging.CRITICAL)
    swarm = Swarm(every=1)
    if replay_corpus(swarm).found or swarm.run(range(10_000), SWARM_STEPS).found:
        return False
    logging.disable(logging.NOTSET)
    paths = sorted({path for part in near for path in glob.glob(f"tests/unit/test_{part}*.py")})
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    return pytest.main([*options, *paths]) == 0


def key_of(mutant: Mutant) -> str:
    """Stands for a mutant of this very source."""
    source = hashlib.sha256((ROOT / mutant.file).read_bytes()).hexdigest()[:16]
    return f"{mutant.file}:{source}:{mutant.number}"


def read_ledger(path: Path | None) -> dict[str, int]:
    """Outcomes by key of what was tried before."""
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line)[:2] for line in path.read_text().splitlines())


def choose(only: str, sample: int | None) -> list[tuple[Mutant, ast.Module]]:
    """All mutants, or some of them; trees are parsed anew, so that each is a mutant's own."""
    chosen = []
    for file in files(only):
        source = Path(file).read_text(encoding="utf-8")
        for mutant, tree in mutants(file, source):
            chosen.append((mutant, ast.parse(ast.unparse(tree))))
    if sample is not None and sample < len(chosen):
        chosen = Random(0).sample(chosen, sample)
    return chosen


def try_all(
    chosen: list[tuple[Mutant, ast.Module]], jobs: int, ledger: Path | None
) -> dict[Mutant, int]:
    """Outcome of each mutant."""
    known, outcomes, running = read_ledger(ledger), {}, {}
    todo = []
    for mutant, tree in chosen:
        if (key := key_of(mutant)) in known:
            outcomes[mutant] = known[key]
        else:
            todo.append((mutant, tree))
    while todo or running:
        while todo and len(running) < jobs:
            mutant, tree = todo.pop()
            running[run_forked(Planted(mutant, tree))] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        outcomes[mutant] = SURVIVED if status == 0 else KILLED
        if ledger is not None:
            with ledger.open("a") as lines:
                lines.write(json.dumps([key_of(mutant), outcomes[mutant], mutant]) + "\n")
        if status == 0:
            print(f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, metavar="N", help="so many, chosen at random")
    parser.add_argument("--only", default="", metavar="PART", help="of the names of modules")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    parser.add_argument("--ledger", type=Path, metavar="FILE")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    assert not any(name.startswith(("engine.sched", "engine.kv")) for name in sys.modules)
    _, status = os.waitpid(run_forked(None), 0)
    if status:
        print("the source as it is does not pass: nothing can be told of its mutants")
        return 2
    outcomes = try_all(choose(parsed.only, parsed.sample), parsed.jobs, parsed.ledger)
    num_killed = sum(outcomes.values())
    score = num_killed / len(outcomes) if outcomes else 1.0
    print(f"{num_killed} of {len(outcomes)} mutants noticed: {score:.1%}")
    return 0 if score >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
