"""`metronome serve` beside `vllm serve` as others' load generators see them: vLLM's own
`bench serve`, and guidellm.

    python benchmarks/server_drivers.py MODEL_DIR --base results/server-....json
                                        --vllm-python VENV/bin/python
                                        --guidellm-python VENV/bin/python
                                        [--rounds 2] [--seconds 20] [--shares 0.5,0.8,1.2]

Capacity and promise are those of the peer, from a file that server.py has written on the same
machine. In each round every engine is started afresh, and each driver sends Poisson arrivals of 128
tokens that ask for 64 at each share of the capacity. Goodput is requests a second that were given
the promise: of `bench serve` by the gaps of each request, of guidellm, which keeps no gaps, by
their mean.
"""

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from server import NAME, Running, add_common, engines_of, keep, running, shares_of, show
from server_load import Promise, quantile

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "GUIDELLM__MAX_WORKER_PROCESSES": "1",  # its ten take the cores from the engines
    "PYTHONPATH": "",
}
BENCH_SERVE = (
    "import argparse\n"
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())\n"
)
NUM_PROMPT, NUM_TOKENS = 128, 64
Figures = dict[str, float]


class Task(NamedTuple):
    """One load that a driver is to send."""

    python: str  # the driver's
    model: str
    url: str
    rate: float  # requests a second
    num: int  # requests
    promise: Promise
    seed: int  # another for each load, whose prompts would be cached otherwise
    home: Path  # of files


def by_bench_serve(task: Task) -> Figures:
    command = [
        task.python, "-c", BENCH_SERVE,
        "--backend", "openai", "--base-url", task.url, "--model", NAME,
        "--tokenizer", task.model, "--dataset-name", "random",
        "--random-input-len", str(NUM_PROMPT), "--random-output-len", str(NUM_TOKENS),
        "--num-prompts", str(task.num), "--request-rate", str(task.rate),
        "--seed", str(task.seed), "--ignore-eos", "--save-result", "--save-detailed",
        "--result-dir", str(task.home), "--result-filename", "found.json",
    ]  # fmt: skip
    found = _run(command, task.home, "found.json")
    ttfts, gaps = found["ttfts"], found["itls"]
    kept = sum(
        1
        for ttft, own in zip(ttfts, gaps, strict=True)
        if own and ttft <= task.promise.ttft and quantile(own, 0.99) <= task.promise.itl
    )
    return {
        "requests": found["completed"],
        "goodput_per_s": kept / found["duration"],
        **_percentiles("ttft", ttfts),
        **_percentiles("itl", [gap for own in gaps for gap in own]),
    }


def by_guidellm(task: Task) -> Figures:
    data = f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_TOKENS}"
    command = [
        task.python, "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={task.url},model={NAME},validate_backend=False",
        "--tokenizer", f"kind=hf_auto,model={task.model}",
        "--data", data,
        "--seed", f"kind=static,value={task.seed}",
        "--profile", f"kind=poisson,rate={task.rate}",
        "--constraint", f"kind=max_requests,count={task.num}",
        "--disable-console",
    ]  # fmt: skip
    found = _run(command, task.home, "benchmarks.json")
    (only,) = found["benchmarks"]
    rows = only["requests"]["successful"]
    ttfts = [row["time_to_first_token_ms"] / 1e3 for row in rows]
    means = [row["inter_token_latency_ms"] / 1e3 for row in rows]
    pairs = zip(ttfts, means, strict=True)
    kept = sum(ttft <= task.promise.ttft and mean <= task.promise.itl for ttft, mean in pairs)
    first = min((row["request_start_time"] for row in rows), default=0.0)
    last = max((row["request_end_time"] for row in rows), default=1.0)
    return {
        "requests": len(rows),
        "goodput_per_s": kept / (last - first),
        **_percentiles("ttft", ttfts),
        **_percentiles("itl_mean", means),
    }


DRIVERS: dict[str, Callable[[Task], Figures]] = {
    "bench serve": by_bench_serve,
    "guidellm": by_guidellm,
}


def _run(command: list[str], home: Path, result: str) -> Any:
    """What the driver has written to the file ``result``."""
    done = subprocess.run(
        command,
        cwd=home,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command[:4]} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads((home / result).read_text())


def _percentiles(name: str, seconds: list[float]) -> Figures:
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_ms_{at}": 1e3 * quantile(seconds, share) for at, share in shares.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.set_defaults(rounds=2, seconds=20.0)
    parser.add_argument("--base", type=Path, required=True, help="a result of server.py")
    parser.add_argument("--guidellm-python", help="Python of an environment with guidellm")
    parser.add_argument("--drivers", nargs="+", choices=list(DRIVERS), default=list(DRIVERS))
    return parser.parse_args()


def main() -> None:
    asked = parse()
    told = json.loads(asked.base.read_text())
    engines = engines_of(asked)
    rounds: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        each: dict[str, Any] = {}
        for engine in engines if number % 2 == 0 else engines[::-1]:
            with running(engine, asked.model, asked.port, asked.log) as server:
                each[engine.name] = round_of(asked, server, told)
        rounds.append(each)
        print(json.dumps(each), flush=True)
    show(rounds)
    keep("drivers", asked, {"base": told["base"], "promise": told["promise"], "rounds": rounds})


def round_of(asked: argparse.Namespace, server: Running, told: dict[str, Any]) -> dict[str, Any]:
    """All loads of all drivers at one engine. told: what server.py has written."""
    found: dict[str, Any] = {}
    host, port = server.address
    pythons = {"bench serve": asked.vllm_python, "guidellm": asked.guidellm_python}
    for name in (name for name in asked.drivers if pythons[name]):
        for place, share in enumerate(shares_of(asked)):
            rate = share * told["base"]["capacity"]
            with tempfile.TemporaryDirectory() as home:
                task = Task(
                    python=pythons[name],
                    model=str(Path(asked.model).absolute()),
                    url=f"http://{host}:{port}",
                    rate=rate,
                    num=round(rate * asked.seconds),
                    promise=Promise(**told["promise"]),
                    seed=1 + place,
                    home=Path(home),
                )
                figures = DRIVERS[name](task)
            found[f"{name}, {share:g}"] = {key: round(value, 3) for key, value in figures.items()}
    return found


if __name__ == "__main__":
    main()
