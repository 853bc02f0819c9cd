"""Measures this checkout against another one, step by step in turn.

    python benchmarks/against.py OTHER_CHECKOUT [--model DIRECTORY [--workloads W1,W2,W3]]
                                 [--trips in-process,process] [--loads decode_256,pressure]
                                 [--rounds 12] [--turns 40] [--json FILE]

A shared machine changes its speed by a fifth within minutes, which hides a difference of a few
percent between two runs. Here a process of each checkout waits while the other one runs a step, and
the first one alternates, so that changes of the machine affect both alike. Figures are ratios,
above 1 where this checkout is faster, with 95 % intervals (bootstrap, Efron 1979).

    workloads   engine steps of `workloads.py` with this model; the ratio of the sums of a round,
                its median over the rounds
    trips       round trips of a request of one token without a model, 40 a turn: the ratio of the
                medians of a turn, its median over all turns
    loads       steps of the scheduler alone, of `scheduler_loads.py`: the same with the lower
                quartile of a turn; of loads that run to their end, the sum over the steps, each
                the lower quartile of all turns

Each round starts new processes. The other checkout needs only the adapters of its load:
`benchmarks/peers`, `wire_cores.py` and `scheduler_loads.py`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from figures import keep, print_table
from measure import Usage
from pairs import Pair, estimate_for, in_order, interval

ROOT = Path(__file__).resolve().parents[1]
CHILD = ROOT / "benchmarks" / "peers" / "turns.py"
OURS, OTHER = "this", "other"
TRIPS = ("in-process", "process")
NUM_SKIPPED = {"trips": 4, "loads": 1}  # first turns of a process, in which it warms up


@dataclass
class Row:
    """All measurements of one load."""

    kind: str
    name: str
    pairs: list[Pair] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=lambda: {OTHER: 0.0, OURS: 0.0})

    def figures(self) -> dict[str, Any]:
        estimate = estimate_for(self.kind, self.name)
        least, most = interval(self.pairs, estimate)
        return {
            "kind": self.kind,
            "name": self.name,
            "ratio": round(estimate(self.pairs), 4),
            "interval": [round(least, 4), round(most, 4)],
            "pairs": len(self.pairs),
            "ms": {
                side: round(1e3 * statistics.median(sum(p[i]) for p in self.pairs), 4)
                for i, side in enumerate((OTHER, OURS))
            },
            "cpu_s": {side: round(seconds, 3) for side, seconds in self.cpu.items()},
            "ratios": [round(estimate([pair]), 4) for pair in self.pairs],
        }


class Turn(NamedTuple):
    """What a child reports of one turn."""

    name: str
    seconds: list[float]
    cpu: float


class Child:
    """A fresh process of one checkout, ready for its first turn."""

    def __init__(self, checkout: Path, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        paths = (checkout, checkout / "benchmarks")
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), *command],
            cwd=checkout / "benchmarks",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def turn(self) -> Turn | None:
        """Run one turn of the child; ``None`` when its load has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._read()
        return None if found is None else Turn(*found)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self._errors.seek(0)
        raise SystemExit(f"{self._process.args} ended:\n{self._errors.read()[-4000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


Children = dict[str, Child]


@contextmanager
def both(other: Path, number: int, *command: str) -> Iterator[Children]:
    """Starts a fresh process of each checkout. Which is first, here and in turns, alternates."""
    places = in_order({OTHER: other, OURS: ROOT}, number)
    with ExitStack() as stack:
        started: Children = {}
        for side, checkout in places.items():
            started[side] = Child(checkout, [*command, str(number)])
            stack.callback(started[side].close)
        yield started


def run_workloads(other: Path, names: list[str], model: str, rounds: int) -> Iterator[Row]:
    rows = {name: Row("workloads", name) for name in names}
    for number in range(rounds):
        with both(other, number, "workloads", ",".join(names), model) as children:
            seconds = step_in_turn(children, rows)
        for name, row in rows.items():
            row.pairs.append(Pair(seconds[OTHER][name], seconds[OURS][name]))
        tell_progress("workloads", number, rounds, rows.values())
    yield from rows.values()


def step_in_turn(children: Children, rows: dict[str, Row]) -> dict[str, dict[str, list[float]]]:
    """Run all workloads; return the seconds of each step by checkout and workload."""
    seconds: dict[str, dict[str, list[float]]] = {side: {} for side in children}
    unfinished, turn = dict(children), 0
    while unfinished:
        for side, child in in_order(unfinished, turn).items():
            found = child.turn()
            if found is None:
                unfinished = {name: each for name, each in unfinished.items() if name != side}
                continue
            seconds[side].setdefault(found.name, []).extend(found.seconds)
            rows[found.name].cpu[side] += found.cpu
        turn += 1
    return seconds


def run_turns(other: Path, kind: str, name: str, rounds: int, turns: int) -> Row:
    """Measure trips or a load with this many turns in each round."""
    row = Row(kind, name)
    for number in range(rounds):
        with both(other, number, kind, name, "") as children:
            for turn in range(NUM_SKIPPED[kind] + turns):
                found = {side: child.turn() for side, child in in_order(children, turn).items()}
                if turn < NUM_SKIPPED[kind]:
                    continue
                row.pairs.append(Pair(found[OTHER].seconds, found[OURS].seconds))
                for side, each in found.items():
                    row.cpu[side] += each.cpu
        tell_progress(kind, number, rounds, [row])
    return row


def tell_progress(kind: str, number: int, rounds: int, rows: Iterable[Row]) -> None:
    ratios = ", ".join(f"{r.name} {estimate_for(r.kind, r.name)(r.pairs):.3f}" for r in rows)
    print(f"{kind}, round {number + 1} of {rounds}: {ratios}", file=sys.stderr, flush=True)


def show(figures: list[dict[str, Any]], other: str) -> None:
    head = ("", "ratio", "95 %", "pairs", "other ms", "this ms", "other CPU s", "this CPU s")
    rows = [
        (
            each["name"],
            f"{each['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*each["interval"]),
            str(each["pairs"]),
            *(f"{each['ms'][side]:.2f}" for side in (OTHER, OURS)),
            *(f"{each['cpu_s'][side]:.1f}" for side in (OTHER, OURS)),
        )
        for each in figures
    ]
    print_table(f"this checkout against {other}: above 1, this one is faster", head, rows)


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=7"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


def names_in(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--model", type=Path, help="of the workloads, which need one")
    parser.add_argument("--workloads", type=names_in, default="W1,W2,W3")
    parser.add_argument("--trips", type=names_in, default="", help=f"of {', '.join(TRIPS)}")
    parser.add_argument("--loads", type=names_in, default="", help="of scheduler_loads.py")
    parser.add_argument("--rounds", type=int, default=12, help="fresh processes of each")
    parser.add_argument("--turns", type=int, default=40, help="in each round, of trips and loads")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    if unknown := set(args.trips) - set(TRIPS):
        parser.error(f"--trips {', '.join(unknown)}: there are {', '.join(TRIPS)}")
    if not (args.model or args.trips or args.loads):
        parser.error("nothing to measure: give --model, --trips or --loads")
    other, before = args.other.resolve(), Usage.now()
    rows: list[Row] = []
    if args.model:
        rows += run_workloads(other, args.workloads, str(args.model.resolve()), args.rounds)
    for kind in ("trips", "loads"):
        for name in getattr(args, kind):
            rows.append(run_turns(other, kind, name, args.rounds, args.turns))
    figures = [row.figures() for row in rows]
    show(figures, commit_of(other))
    keep(
        args.json,
        commits={OTHER: commit_of(other), OURS: commit_of(ROOT)},
        model=args.model and args.model.name,
        usage=Usage.now().since(before),
        figures=figures,
    )


if __name__ == "__main__":
    main()
