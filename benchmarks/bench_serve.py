"""Compares `metronome bench serve` with `vllm bench serve`: both measure one server of ours.

    python benchmarks/bench_serve.py MODEL_DIR --vllm-python VENV/bin/python [--rounds 5]

In each round both measure the same loads, in turn: all requests at once with --max-concurrency of
them running, and a Poisson process at --share of the throughput that was found. Prompts are text of
equal lengths, and none comes twice, since it would be cached. Printed are the medians over the
rounds, and the ratio of ours to theirs with its 95 % interval; also the processor time of each
client, its start included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import figures
from measure import Usage
from server import HERE, HOST, NAME, OURS, Engine, ratio_of, running

VLLM = "import sys; from vllm.benchmarks.serve import add_cli_args, main; from vllm.utils.argparse_utils import FlexibleArgumentParser as P; p = P(); add_cli_args(p); main(p.parse_args(sys.argv[1:]))"  # noqa: E501
SHOWN = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "median_e2el_ms")
PEER = "vllm bench serve"


def options(args: argparse.Namespace, seed: int, load: list[str], path: Path) -> list[str]:
    """Options that both commands have."""
    return [
        *("--base-url", f"http://{HOST}:{args.port}", "--model", args.model, "--seed", str(seed)),
        *("--dataset-name", "random", "--random-input-len", str(args.prompt)),
        *("--random-output-len", str(args.tokens), "--num-prompts", str(args.requests)),
        *("--ignore-eos", "--temperature", "0", "--num-warmups", "4", "--disable-tqdm"),
        *("--save-result", "--result-dir", str(path.parent), "--result-filename", path.name),
        *("--metric-percentiles", "90,99", *load),
    ]


def measured(name: str, args: argparse.Namespace, seed: int, load: list[str]) -> dict[str, Any]:
    """The result of one run of a client, and the processor seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        given = options(args, seed, load, path)
        variables = dict(os.environ)
        if name == PEER:
            command = [args.vllm_python, "-c", VLLM, *given, "--served-model-name", NAME]
            command += ["--percentile-metrics", "ttft,tpot,itl,e2el"]
        else:
            given[given.index("--model") + 1] = NAME
            own = ("-m", "engine.cli.main", "bench", "serve", "--tokenizer", args.model)
            command = [sys.executable, *own, *given]
            variables["PYTHONPATH"] = str(HERE.parent)
        before = os.times()
        with args.log.open("ab") as log:
            subprocess.run(command, env=variables, stdout=log, stderr=log, check=True)
        after = os.times()
        found: dict[str, Any] = json.loads(path.read_text())
    if found["failed"]:
        raise RuntimeError(f"{name}: {found['failed']} requests failed; see {args.log}")
    cpu = after.children_user + after.children_system
    cpu -= before.children_user + before.children_system
    return {figure: found[figure] for figure in (*SHOWN, "total_input_tokens", "duration")} | {
        "client_cpu_s": round(cpu, 3),
        "client_cpu_us_per_token": found.get("client_cpu_us_per_token"),
    }


def show(title: str, rounds: list[dict[str, dict[str, Any]]]) -> None:
    rows = []
    for figure in (*SHOWN, "client_cpu_s"):
        pairs = [(each[OURS][figure], each[PEER][figure]) for each in rounds]
        ours, theirs = (median(column) for column in zip(*pairs, strict=True))
        rows.append((figure, f"{ours:,.2f}", f"{theirs:,.2f}", ratio_of(pairs).strip()))
    figures.print_table(title, ("", "metronome bench serve", PEER, "ours / theirs"), rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model directory")
    parser.add_argument("--vllm-python", required=True, help="of an environment with vllm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=96, help="of each load")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-concurrency", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--port", type=int, default=8138)
    parser.add_argument("--log", type=Path, default=Path("bench-serve.log"))
    parser.add_argument("--label", default="")
    return parser.parse_args()


def main() -> None:
    args = parse()
    own = (sys.executable, "-m", "engine.cli.main", "serve")
    engine, usage = Engine(OURS, own, {"PYTHONPATH": str(HERE.parent)}), Usage.now()
    closed = ["--max-concurrency", str(args.max_concurrency)]
    rounds: dict[str, list[dict[str, Any]]] = {"closed loop": [], "open loop": []}
    with running(engine, args.model, args.port, args.log):
        first = measured(OURS, args, 1_000, closed)
        rate = args.share * args.requests / first["duration"]
        loads = {"closed loop": closed, "open loop": ["--request-rate", f"{rate:.3f}"]}
        for number in range(args.rounds):
            order = (OURS, PEER) if number % 2 == 0 else (PEER, OURS)
            for place, (title, load) in enumerate(loads.items()):
                seed = 10 * number + 2 * place
                found = {name: measured(name, args, seed, load) for name in order}
                rounds[title].append(found)
                print(title, json.dumps(found), flush=True)
    for title, found_all in rounds.items():
        show(f"{title}: {' '.join(loads[title])}", found_all)
    label = "-".join(part for part in ("bench-serve", Path(args.model).name, args.label) if part)
    path = HERE / "results" / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    # Only the last part of a path: folders of this machine are private.
    given = {name: str(value).rpartition("/")[2] for name, value in vars(args).items()}
    figures.keep(path, options=given, usage=Usage.now().since(usage), rounds=rounds)
    print(path)


if __name__ == "__main__":
    main()
