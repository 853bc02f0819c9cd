"""Kills, stops and feeds garbage to each process of an engine in each phase; checks the others.

What becomes of texts whose tokenizer or detokenizer dies is in
`tests/contract/test_text_pool_faults.py`.

    python tools/kill_matrix.py [--restarts 100] [--patience 1] [--only TARGET/FAULT/PHASE]

Prints a line for each cell: the seconds until the other processes noticed, and the failures. The
exit status is 1 if there is a failure.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

from support import kill_ranks  # noqa: E402
from support.kill_cells import TREE_SECONDS, Cell, Outcome, Scene, run_cell  # noqa: E402
from support.live_core import own_directory, wait_until  # noqa: E402
from support.processes import tree_of  # noqa: E402

PHASES = ("handshake", "idle", "prefill", "decode", "draining")
FAULTS = {
    "core": ("SIGKILL", "SIGSTOP", "SIGTERM", "raise", "hang", "garbage"),
    "client": ("SIGKILL", "SIGSTOP", "SIGTERM", "raise", "garbage"),
    "parent": ("SIGKILL", "SIGSTOP", "SIGTERM", "raise"),
    "server": ("SIGKILL", "SIGSTOP", "SIGTERM"),
    "served_core": ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV"),
    "restarted_core": ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV"),
}
NEVER = {  # impossible cells: no step runs, or no message has been sent
    *(("core", fault, phase) for fault in ("raise", "hang") for phase in ("handshake", "idle")),
    *(
        (target, fault, "handshake")  # there is no stream yet; see tests/e2e/test_server_load.py
        for target in ("server", "served_core", "restarted_core")
        for fault in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV")
    ),
    ("core", "garbage", "handshake"),
    ("client", "garbage", "handshake"),
}
ONLY = (Cell("core", "hang", "add"),)  # outside a step: while a policy takes a request in


def cells() -> Iterator[Cell]:
    """All cells that can happen."""
    yield from ONLY
    yield from kill_ranks.cells()
    for target, faults in FAULTS.items():
        for fault in faults:
            for phase in PHASES:
                if (target, fault, phase) not in NEVER:
                    yield Cell(target, fault, phase)


def restarts(num: int, seed: int) -> Outcome:
    """Kill parent and core together this many times; what they leave must not stop the next."""
    outcome = Outcome(Cell("parent and core", "SIGKILL", f"{num} times"))
    rng = random.Random(seed)
    with own_directory() as directory:
        for _ in range(num):
            _start_and_kill(Scene(directory, "decode"), rng.random() * 0.2, outcome)
        last = Scene(directory, "idle")
        outcome.check(last.spawn("parent", str(last.trigger)).wait() == 0, "the last start failed")
        outcome.check(not last.sockets(), f"left: {last.sockets()}")
    return outcome


def _start_and_kill(scene: Scene, seconds: float, outcome: Outcome) -> None:
    parent = scene.spawn("parent", str(scene.trigger))
    tree = tree_of(parent.pid)
    time.sleep(seconds)
    for pid in tree:
        scene.kill(pid, signal.SIGKILL)
    parent.wait()
    gone = wait_until(lambda: not scene.alive(tree), TREE_SECONDS)
    outcome.within(gone, TREE_SECONDS, "the end of the tree")
    outcome.check(len(scene.sockets()) <= 1, f"not cleaned up: {scene.sockets()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--restarts", type=int, default=100)
    parser.add_argument("--only", default="", help="target/fault/phase, or the beginning of one")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument(
        "--patience", type=float, default=1.0, help="by which limits are longer, if it is busy"
    )
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    num_wrong = num_all = 0
    for cell in cells():
        if str(cell).startswith(args.only):
            outcome = run_cell(cell, args.patience)
            print(outcome, flush=True)
            num_all += 1
            num_wrong += bool(outcome.failures)
    if not args.only:
        outcome = restarts(args.restarts, args.seed)
        print(outcome)
        num_wrong += bool(outcome.failures)
    print(json.dumps({"cells": num_all, "wrong": num_wrong, "restarts": args.restarts}))
    return bool(num_wrong)


if __name__ == "__main__":
    sys.exit(main())
