"""Measures the mutation score of `engine/sched` and `engine/kv`.

    python tools/mutate.py [--sample N] [--seed S] [--only PART] [--jobs J]

Each mutant runs a short swarm in a forked process and, if that passes, the fast tests of scheduler
and KV, beginning with those of its module. Prints the mutants that no test noticed and the share of
the others; the exit status is 1 if that is below 85 %.
"""

from __future__ import annotations

import argparse
import ast
import glob
import importlib
import importlib.abc
import importlib.util
import logging
import os
import resource
import signal
import sys
import tempfile
from itertools import islice
from math import sqrt
from pathlib import Path
from random import Random

import numpy  # noqa: F401  loaded once, before all forks
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

from mutants import Mutant, mutants  # noqa: E402

import engine.messages.requests  # noqa: E402
import engine.messages.step  # noqa: E402, F401

PACKAGES = (
    "engine/kv",
    "engine/sched",
    *(f"engine/sched/{part}" for part in ("policies", "step", "plugins", "predict")),
)
# A protocol.
LEFT_OUT = ("connector.py",)
# Tests that every mutant runs: those of the mechanism that take less than a second a file.
FAST = (
    *("scheduler_bugs", "scheduler_behaviours", "overlap_rules", "cache_behaviours", "pause"),
    *("strange_policies", "strange_resources", "limit_behaviours", "queue_bounds", "waits"),
    *("resources_core", "resources_encoder", "resources_grammar", "resources_lora"),
    *("resources_remote_kv", "ledger", "lengths", "cost", "find"),
    *("kv.", "kv_events", "kv_transfers", "boundaries", "columns", "own_scheduler", "ranks"),
    *("hook_times", "statistics", "view"),
)
COMPILED = ("fast_hash.py",)  # kept under the file's name, which a mutant shares with its original
POLICIES = ("policies_margins", "policies_order", "policies_batching", "policies_sharing")
# Further tests by the module that they are about; these run first.
NEAR: dict[str, tuple[str, ...]] = {
    "engine/kv/": ("kv",),
    "sched/policies/": ("options", "policies_shipped", *POLICIES),
    "sched/policy.py": POLICIES,
    "sched/plugins/checks.py": ("policies_shipped", "options"),
    "sched/plugins/find.py": ("options",),
    "sched/interface.py": ("options", "steplog"),
    "sched/plugins/hooks.py": ("rubbish",),
    "sched/plugins/answers.py": ("rubbish",),
    "sched/plugins/resources.py": ("rubbish",),
    "sched/step/decodes.py": ("scheduler_random",),
    "sched/step/settle.py": ("scheduler_random", "resources_drafts"),
    "sched/step/builder.py": ("resources_drafts",),
}
SWARM_STEPS = 6000
SECONDS = 120  # of processor time: a mutant that takes longer counts as noticed
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
    """Start a process that tries a mutant; its exit status is 0 if the mutant survives.

    Without one it runs all tests that any mutant runs.
    """
    pid = os.fork()
    if pid:
        return pid
    status, parts = KILLED, [*FAST, *(part for near in NEAR.values() for part in near)]
    try:
        signal.alarm(PATIENCE)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nowhere, stream)
        if planted is not None:
            sys.meta_path.insert(0, planted)
            parts = tests_near(planted.path)
        with tempfile.TemporaryDirectory() as scratch:
            if planted is not None:
                if planted.path.name in COMPILED:
                    os.environ["NUMBA_CACHE_DIR"] = scratch
                importlib.import_module(planted.name)  # before pytest does it in its own way
            status = SURVIVED if survives(parts) else KILLED
    finally:
        os._exit(status)


def tests_near(path: Path) -> list[str]:
    """Prefixes of the names of the tests for a mutant of this module, in order."""
    near = [tests for part, tests in NEAR.items() if part in str(path)]
    return [*(near[0] if near else ()), *FAST]


def test_files(parts: list[str]) -> list[str]:
    """Test files whose names begin with one of the parts, each once."""
    kinds = ("unit", "contract", "property")
    patterns = [f"tests/{kind}/test_{part}*py" for part in parts for kind in kinds]
    return [*dict.fromkeys(path for pattern in patterns for path in sorted(glob.glob(pattern)))]


def survives(parts: list[str]) -> bool:
    """Whether the swarm and the tests pass."""
    from policylab.verify.swarm import Swarm, replay_corpus

    logging.disable(logging.CRITICAL)
    swarm = Swarm(every=1)
    if replay_corpus(swarm).found or swarm.run(range(10_000), SWARM_STEPS).found:
        return False
    logging.disable(logging.NOTSET)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # the swarm has run before
    return pytest.main([*options, *test_files(parts)]) == 0


def choose(only: str, sample: int | None, seed: int) -> list[Mutant]:
    """All mutants, or some of them."""
    sources = [(file, Path(file).read_text(encoding="utf-8")) for file in files(only)]
    chosen = [mutant for file, source in sources for mutant, _ in mutants(file, source)]
    if sample is not None and sample < len(chosen):
        chosen = Random(seed).sample(chosen, sample)
    return chosen


def plant(mutant: Mutant) -> Planted:
    """The finder that imports the mutant in place of its module."""
    source = Path(mutant.file).read_text(encoding="utf-8")
    _, tree = next(islice(mutants(mutant.file, source), mutant.number, None))
    return Planted(mutant, tree)


def try_all(chosen: list[Mutant], jobs: int) -> dict[Mutant, int]:
    """Try each mutant and return its outcome."""
    todo, running, outcomes = chosen[:], {}, {}
    while todo or running:
        while todo and len(running) < jobs:
            mutant = todo.pop()
            running[run_forked(plant(mutant))] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        outcomes[mutant] = SURVIVED if status == 0 else KILLED
        if status == 0:
            print(f"{mutant.file}:{mutant.line}: {mutant.before}  ->  {mutant.after}", flush=True)
    return outcomes


def interval(num_killed: int, num_tried: int) -> tuple[float, float]:
    """The 95 % interval of the score of all mutants, if these are a random sample (Wilson)."""
    share, z = num_killed / num_tried, 1.96
    middle = share + z * z / (2 * num_tried)
    half = z * sqrt(share * (1 - share) / num_tried + z * z / (4 * num_tried**2))
    return (middle - half) / (1 + z * z / num_tried), (middle + half) / (1 + z * z / num_tried)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, metavar="N", help="try N of them, chosen at random")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of that choice")
    parser.add_argument("--only", default="", metavar="PART", help="of the names of modules")
    parser.add_argument("--jobs", type=int, default=1, metavar="J")
    parsed = parser.parse_args()
    os.chdir(ROOT)
    assert not any(name.startswith(("engine.sched", "engine.kv")) for name in sys.modules)
    _, status = os.waitpid(run_forked(None), 0)
    if status:
        print("the source as it is does not pass: its mutants show nothing")
        return 2
    chosen = choose(parsed.only, parsed.sample, parsed.seed)
    outcomes = try_all(chosen, parsed.jobs)
    if not outcomes:
        print(f"there is nothing to mutate in modules named {parsed.only!r}")
        return 2
    num_killed = sum(outcomes.values())
    score, (low, high) = num_killed / len(outcomes), interval(num_killed, len(outcomes))
    print(
        f"{num_killed} of {len(outcomes)} mutants noticed: {score:.1%} "
        f"(95 %: {low:.1%} to {high:.1%})"
    )
    return 0 if score >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
