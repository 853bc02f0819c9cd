"""How far the simulator is from the engine: the same jobs in real time and on a virtual clock.

    python benchmarks/lab_error.py run --out DIR [--model DIR] [--requests 300] [--repeats 4]
    python benchmarks/lab_error.py judge DIR [--json FILE]

``run`` serves the jobs with seven policies, each several times in processes of its own that take
turns, as a backlog at four times the capacity and at a load of 0.7, and keeps run files and step
logs. ``judge`` fits a profile to the even windows of the logs, judges it by the odd ones, simulates
each run with several seeds of noise and prints the errors beside what real runs differ by.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

from policylab.sim.calibrate import Sample, fit, halves, judge, samples_of
from policylab.sim.real import run_real
from policylab.sim.recorded import engine_of, read_log
from policylab.sim.run import Engine, Run, run
from policylab.sim.workloads import find_workload

POLICIES = ("fcfs", "residual-sjf", "vtc", "lpm", "least-computed", "sarathi", "fastserve")
TIME_DRIVEN = ("fastserve",)  # its levels hang on the clock: chaotic, so its p99 has no bar
WORKLOAD = (
    "log-uniform(num_requests={requests},prompt_tokens=(8,256),output_tokens=(8,128),"
    "shared_prefix=64)"
)
ENGINE = Engine(max_num_seqs=32, max_num_batched_tokens=256, num_blocks=420, block_size=16)
NOISE_SEEDS = 8
SEED = 1
ABOUT = "about.json"
LOADS = {"backlog": 4.0, "load 0.7": 0.7}


Rows = dict[tuple[str, str], tuple[list[dict[str, float]], list[dict[str, float]]]]
"""By load and policy: figures of the real runs, and of the simulated ones."""


def figures(run: Run) -> dict[str, float]:
    """Mean and 99th percentile of TTFT, TPOT and E2E, in seconds."""
    requests, done = run.requests, run.requests.done
    arrival = requests.times("arrival")[done]
    first, last = requests.times("first")[done], requests.times("last")[done]
    gaps = np.maximum(1, requests.counts("num_output")[done] - 1)
    columns = {"TTFT": first - arrival, "TPOT": (last - first) / gaps, "E2E": last - arrival}
    columns["TPOT"] = columns["TPOT"][requests.counts("num_output")[done] > 1]
    found = {}
    for name, values in columns.items():
        found[f"{name} mean"] = float(values.mean())
        found[f"{name} p99"] = float(np.quantile(values, 0.99, method="inverted_cdf"))
    return found


def one(parsed: argparse.Namespace) -> None:
    """A single real run, in this process."""
    workload = find_workload(WORKLOAD.format(requests=parsed.requests))
    options = {"model": parsed.model} if parsed.model else {}
    done = run_real(
        parsed.policy,
        workload,
        ENGINE,
        seed=SEED,
        rate=parsed.rate,
        step_log=f"{parsed.out}.log",
        **options,
    )
    done.write(f"{parsed.out}.jsonl")


def measure(parsed: argparse.Namespace) -> None:
    """All real runs, taking turns."""
    out = Path(parsed.out)
    out.mkdir(parents=True, exist_ok=True)

    def serve(policy: str, rate: float, name: str) -> Run:
        subprocess.run(
            [
                *(sys.executable, __file__, "one", "--policy", policy, "--rate", str(rate)),
                *("--out", str(out / name), "--requests", str(parsed.requests)),
                *(("--model", parsed.model) if parsed.model else ()),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
        return Run.read(out / f"{name}.jsonl")

    at_once = serve("fcfs", 1e6, "capacity")
    ends = np.sort(at_once.requests.times("last"))
    capacity = 0.6 * len(ends) / (ends[int(0.8 * len(ends))] - ends[int(0.2 * len(ends))])
    about = {"model": Path(parsed.model or "metronome-3m").name, "requests": parsed.requests}
    about |= {"repeats": parsed.repeats, "capacity": capacity, "machine": describe()}
    (out / ABOUT).write_text(json.dumps(about))
    print(f"capacity {capacity:.2f} requests a second")
    for repeat in range(parsed.repeats):
        for load, factor in LOADS.items():
            for policy in POLICIES:
                began = time.perf_counter()
                done = serve(policy, factor * capacity, f"{load}@{policy}@{repeat}")
                told = " ".join(f"{n} {v:.4f}" for n, v in figures(done).items())
                print(f"{time.perf_counter() - began:5.1f} s  {load} {policy} {repeat}: {told}")


def compare(parsed: argparse.Namespace) -> None:
    """The table of errors."""
    out = Path(parsed.out)
    logs = {path.stem: path for path in sorted(out.glob("*@*.log"))}
    samples = {name: samples_of(path) for name, path in logs.items()}
    even = [sample for each in samples.values() for sample in halves(each)[0]]
    odd = [sample for each in samples.values() for sample in halves(each)[1]]
    judged = judge(fit(even, out.name), odd).items()
    said = [f"steps not fitted, {regime}: {each}" for regime, each in judged]
    rows: Rows = {}
    for load in LOADS:
        for policy in POLICIES:
            names = [name for name in logs if name.startswith(f"{load}@{policy}@")]
            real = [figures(Run.read(out / f"{name}.jsonl")) for name in names]
            rows[load, policy] = (real, _simulated(names, logs, samples, policy))
    cells, told = _cells(rows)
    said += [told, *_signs(rows)]
    print("\n".join(said))
    if parsed.json:
        about = json.loads((out / ABOUT).read_text())
        whole = {**about, "said": said, "cells": cells}
        parsed.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def _simulated(
    names: list[str], logs: dict[str, Path], samples: dict[str, list[Sample]], policy: str
) -> list[dict[str, float]]:
    """The same jobs with a profile of the even windows of their logs: what a policy's hooks take
    is a part of its steps."""
    profile = fit([s for name in names for s in halves(samples[name])[0]], names[0])
    log = read_log(logs[names[0]])
    head = Run.read(logs[names[0]].with_suffix(".jsonl")).head
    engine = engine_of(log.header, profile)
    workload = find_workload(head["workload"])
    found = []
    for seed in range(NOISE_SEEDS):
        noisy = replace(engine, noise_seed=seed)
        simulated = run(policy, workload, noisy, seed=SEED, rate=head["rate"])
        found.append(figures(simulated))
    return found


def _cells(rows: Rows) -> tuple[list[dict[str, Any]], str]:
    """Each figure's error beside its bar, printed as it is found, and what that comes to."""
    cells: list[dict[str, Any]] = []
    for (load, policy), (real, simulated) in rows.items():
        for figure in real[0]:
            values = [each[figure] for each in real]
            spread = max(values) / min(values) - 1.0
            mean = float(np.mean(values))
            error = float(np.mean([each[figure] for each in simulated])) / mean - 1.0
            is_tail = figure.endswith("p99")
            bar = max(0.08, spread) if is_tail else max(0.03, spread / 2)
            has_bar = not (is_tail and policy in TIME_DRIVEN)
            verdict = "" if not has_bar else "ok" if abs(error) <= bar else "OFF"
            cells.append(
                {
                    "load": load,
                    "policy": policy,
                    "figure": figure,
                    "real": mean,
                    "error": error,
                    "real_against_real": spread,
                    "bar": bar,
                    "verdict": verdict,
                }
            )
            print(
                f"{load:9} {policy:15} {figure:10} real {mean:9.4f} simulated {100 * error:+6.1f} %"
                f"  real against real {100 * spread:5.1f} %  bar {100 * bar:5.1f} %  {verdict}"
            )
    barred = [cell for cell in cells if cell["verdict"]]
    num_good = sum(cell["verdict"] == "ok" for cell in barred)
    worst = max(abs(cell["error"]) / cell["bar"] for cell in barred)
    return cells, (
        f"{num_good} of {len(barred)} cells within their bars; the farthest at {worst:.2f} of its"
    )


def _signs(rows: Rows) -> list[str]:
    """Pairs of policies that really differ: does the simulator say so?"""
    wrong: list[str] = []
    num_pairs = 0
    of: Callable[[list[dict[str, float]], str], float]
    of = lambda runs, figure: float(np.mean([each[figure] for each in runs]))  # noqa: E731
    for load in LOADS:
        for one_policy, other in combinations(POLICIES, 2):
            (real, simulated), (reals, simulateds) = rows[load, one_policy], rows[load, other]
            for figure in ("TTFT mean", "TPOT mean", "E2E mean"):
                spread = max(
                    max(each[figure] for each in runs) - min(each[figure] for each in runs)
                    for runs in (real, reals)
                )
                gap = of(real, figure) - of(reals, figure)
                if abs(gap) <= 2 * spread:
                    continue
                num_pairs += 1
                if gap * (of(simulated, figure) - of(simulateds, figure)) <= 0:
                    wrong.append(f"wrong sign: {load} {one_policy} against {other}, {figure}")
    num_right = num_pairs - len(wrong)
    return [*wrong, f"{num_right} of {num_pairs} pairs that differ have the right sign"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "one"):
        command = commands.add_parser(name)
        command.add_argument("--out", required=True)
        command.add_argument("--model")
        command.add_argument("--requests", type=int, default=300)
        command.add_argument("--repeats", type=int, default=4)
        command.add_argument("--policy", default="fcfs")
        command.add_argument("--rate", type=float, default=1.0)
    judged = commands.add_parser("judge")
    judged.add_argument("out")
    judged.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    {"run": measure, "one": one, "judge": compare}[parsed.command](parsed)


if __name__ == "__main__":
    main()
