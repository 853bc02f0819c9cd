"""Measures how often conversations of 40 turns find their KV when several cores share them.

    python benchmarks/balancing.py [--simulated] [--real] [--seeds 6] [--json FILE]

Compared are one core with the pools of all, cores in turn (round robin), the balancer before the
cores reported their caches, which went by the prompts that it had sent (``sent``), and today's
(``events``); ``two front ends`` are two of today's that share the conversations. --simulated: four
cores on a virtual clock, at two loads. --real: two cores in processes, with a small random Llama on
the CPU. All get the same conversations (common random numbers); intervals are bootstraps over
seeds (95 %) of the mean of paired ratios of hit rates, and of differences of the p99 of the time to
the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from math import log
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from figures import keep, print_table

from engine import AsyncLLMEngine, EngineArgs, SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.wire import CacheNews
from engine.rpc.balance import Balancer
from policylab.sim.balanced import run_balanced
from policylab.sim.run import Engine
from policylab.sim.worker import StepCost
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import pairs, uniform
from policylab.sim.workloads.sessions import Conversations, Turn

NUM_TURNS = 40
NUM_DRAWS = 10_000
BLOCK_SIZE = 16


class InTurn:
    """Each core in turn."""

    def __init__(self, num_cores: int, block_size: int) -> None:
        self.adapters: dict[str, str] = {}
        self.loads = [0] * num_cores
        self._placed: dict[str, int] = {}
        self._num = 0

    def choose(self, request: AddRequest) -> int:
        self._num += 1
        core = self._placed[request.request_id] = self._num % len(self.loads)
        return core

    def core_of(self, request_id: str) -> int | None:
        return self._placed.get(request_id)

    def start(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None:
        self._placed.pop(request_id, None)

    def update(self, core: int, news: CacheNews) -> None: ...


class Sent:
    """The former balancer: a prompt goes to the core that was sent the longest part of it before,
    unless this core has 1.5 times the work of the least loaded one, and 2048 tokens more."""

    def __init__(self, num_cores: int, block_size: int) -> None:
        self.adapters: dict[str, str] = {}
        self.loads = [0] * num_cores
        self._block_size = block_size
        self._seen: dict[int, int] = {}  # hash of a prompt's beginning -> the last core
        self._placed: dict[str, tuple[int, int]] = {}

    def choose(self, request: AddRequest) -> int:
        beginnings = list(self._beginnings(request.prompt_token_ids))
        least = min(self.loads)
        limit = max(1.5 * least, least + 2048)
        known = (self._seen.get(each) for each in reversed(beginnings))
        fit = (core for core in known if core is not None and self.loads[core] <= limit)
        core = next(fit, self.loads.index(least))
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        self.loads[core] += num_tokens
        self._placed[request.request_id] = (core, num_tokens)
        self._seen.update(dict.fromkeys(beginnings, core))
        return core

    def core_of(self, request_id: str) -> int | None:
        placed = self._placed.get(request_id)
        return None if placed is None else placed[0]

    def start(self, request_id: str) -> None: ...

    def end(self, request_id: str) -> None:
        core, num_tokens = self._placed.pop(request_id, (0, 0))
        self.loads[core] -= num_tokens

    def update(self, core: int, news: CacheNews) -> None: ...

    def _beginnings(self, tokens: Sequence[int]) -> Iterator[int]:
        digest = 0
        for end in range(self._block_size, len(tokens) + 1, self._block_size):
            digest = hash((digest, *tokens[end - self._block_size : end]))
            yield digest


MakeRouter = Callable[[int, int], Any]
ROUTERS: dict[str, MakeRouter] = {
    "round robin": InTurn,
    "sent": Sent,
    "events": Balancer,
}


@dataclass(frozen=True, kw_only=True)
class LongTalks(Conversations):
    """Conversations that all have ``NUM_TURNS`` turns."""

    @property
    def mean_turns(self) -> float:  # type: ignore[override]
        return float(NUM_TURNS)

    def sessions(self, dice: RandomDraws) -> Iterator[list[Turn]]:
        lengths, pauses = pairs(self._lengths, dice), uniform(dice.stream("think"))
        while True:
            turns = islice(lengths, NUM_TURNS)
            yield [Turn(-self.think * log(1.0 - next(pauses)), *each) for each in turns]


Figures = dict[str, float]


def figures_of(num_cached: Sequence[int], num_prompt: Sequence[int], ttft: Any) -> Figures:
    p50, p99 = np.percentile(ttft, [50, 99])
    return {
        "hit_rate": sum(num_cached) / sum(num_prompt),
        "ttft_p50": float(p50),
        "ttft_p99": float(p99),
    }


# -- four simulated cores

LOADS = {
    "64 conversations, think 4 s, pools 1.5 k blocks": (64, 4.0, 1500, 20.0),
    "96 conversations, think 2 s, pools 2 k blocks": (96, 2.0, 2000, 60.0),
}
NUM_SIMULATED = 4


def simulated(name: str, seed: int) -> dict[str, Figures]:
    """The figures of each way to choose a core, for one seed."""
    num_talks, think, num_blocks, rate = LOADS[name]
    talks = LongTalks(
        num_requests=num_talks * NUM_TURNS,
        think=think,
        lengths="log-uniform(prompt=(8, 96), output=(8, 96))",
        max_context=NUM_TURNS * 192 + 200,
    )
    core = Engine(num_blocks=num_blocks, max_num_seqs=16)
    cost, n = StepCost(), NUM_SIMULATED
    fast = {
        each: getattr(cost, each) / n
        for each in ("per_seq", "per_token", "per_context", "per_attention")
    }
    one = replace(
        core,
        num_blocks=n * num_blocks,
        max_num_seqs=n * core.max_num_seqs,
        max_num_batched_tokens=n * core.max_num_batched_tokens,
        cost=replace(cost, **fast),
    )

    def run(
        make: Callable[[int, int], Any], engine: Engine, cores: int, front_ends: int
    ) -> Figures:
        made = run_balanced(
            lambda: make(cores, BLOCK_SIZE),
            talks,
            engine,
            num_cores=cores,
            num_front_ends=front_ends,
            seed=seed,
            rate=rate,
        )
        return figures_of(made.num_cached, made.num_prompt, made.ttft)

    found = {"one pool": run(InTurn, one, 1, 1)}
    found |= {each: run(make, core, n, 1) for each, make in ROUTERS.items()}
    return found | {"two front ends": run(Balancer, core, n, 2)}


# -- two real cores

NUM_TALKS, BETWEEN = 24, 1.0  # seconds between the starts of two, mean
NUM_NEW, NUM_OUT = 48, 24  # tokens of a turn
THINK = 0.15  # seconds, mean
POOL = 900  # blocks of a core: a conversation ends with 180 blocks, some sixteen are at once
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def real(model: Path, seed: int) -> dict[str, Figures]:
    """The figures of each way to choose a core, in an order that depends on the seed."""
    ways = ["one pool", *ROUTERS]
    random.Random(seed).shuffle(ways)
    return {way: asyncio.run(served(model, way, seed)) for way in ways}


async def served(model: Path, way: str, seed: int) -> Figures:
    is_one = way == "one pool"
    args = EngineArgs(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        multiprocess=True,
        data_parallel_size=1 if is_one else 2,
        num_kv_blocks=2 * POOL if is_one else POOL,
        num_threads=2,
        max_num_seqs=16,
        max_model_len=4096,
        disable_log_stats=True,
        log_level="error",
    )
    with mock.patch("engine.rpc.many_client.Balancer", ROUTERS.get(way, InTurn)):
        engine = AsyncLLMEngine.from_engine_args(args)
    try:
        return await talked(engine, seed)
    finally:
        await asyncio.to_thread(engine.shutdown)


async def talked(engine: AsyncLLMEngine, seed: int) -> Figures:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUT, ignore_eos=True)
    starts = accumulate(random.Random(seed).expovariate(1.0 / BETWEEN) for _ in range(NUM_TALKS))
    num_cached: list[int] = []
    num_prompt: list[int] = []
    ttft: list[float] = []

    async def talk(number: int, start: float) -> None:
        await asyncio.sleep(start)
        dice = random.Random(1000 * seed + number)
        tokens: list[int] = []
        for turn in range(NUM_TURNS):
            await asyncio.sleep(dice.expovariate(1.0 / THINK))
            tokens += [dice.randrange(3, SHAPE["vocab_size"]) for _ in range(NUM_NEW)]  # type: ignore[call-overload]
            prompt: Any = {"prompt_token_ids": tokens.copy()}
            began, outputs = time.monotonic(), []
            async for output in engine.generate(prompt, params, f"{number}.{turn}"):
                if not outputs:
                    ttft.append(time.monotonic() - began)
                outputs.append(output)
            num_cached.append(outputs[-1].num_cached_tokens or 0)
            num_prompt.append(len(tokens))
            tokens += outputs[-1].outputs[0].token_ids

    await asyncio.gather(*(talk(number, start) for number, start in enumerate(starts)))
    return figures_of(num_cached, num_prompt, ttft)


# -- comparison


def interval(values: Sequence[float]) -> list[float]:
    """The mean of paired values, and its bootstrap interval."""
    data, dice = np.array(values), np.random.default_rng(0)
    means = dice.choice(data, (NUM_DRAWS, len(data))).mean(axis=1)
    return [float(data.mean()), *map(float, np.percentile(means, [2.5, 97.5]))]


def compared(runs: Sequence[dict[str, Figures]]) -> dict[str, Any]:
    """Means of each way; the hit rate of ``events`` as a share of the others', and the difference
    of its p99 of the time to the first token, both with intervals."""
    means = {
        way: {name: float(np.mean([run[way][name] for run in runs])) for name in figures}
        for way, figures in runs[0].items()
    }
    ours = [run["events"] for run in runs]
    ratios, later = {}, {}
    for way in runs[0]:
        theirs = [run[way] for run in runs]
        pairs_of = list(zip(ours, theirs, strict=True))
        ratios[way] = interval([a["hit_rate"] / b["hit_rate"] for a, b in pairs_of])
        later[way] = interval([a["ttft_p99"] - b["ttft_p99"] for a, b in pairs_of])
    return {"means": means, "hit_ratio": ratios, "ttft_p99_difference": later, "runs": runs}


def show(title: str, found: dict[str, Any]) -> None:
    head = ["", "hits", "TTFT p50", "TTFT p99", "hits of events / its", "p99 of events - its"]
    rows = []
    for way, mean in found["means"].items():
        ratio, later = found["hit_ratio"][way], found["ttft_p99_difference"][way]
        rows.append(
            [
                way,
                f"{100 * mean['hit_rate']:.1f} %",
                f"{1e3 * mean['ttft_p50']:.1f} ms",
                f"{1e3 * mean['ttft_p99']:.0f} ms",
                "{:.3f} ({:.3f} to {:.3f})".format(*ratio),
                "{:.0f} ({:.0f} to {:.0f}) ms".format(*(1e3 * each for each in later)),
            ]
        )
    print_table(title, head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    logging.disable(logging.INFO)
    found: dict[str, Any] = {}
    if parsed.simulated or not parsed.real:
        for load in LOADS:
            key = f"four simulated cores, {load}"
            found[key] = compared([simulated(load, seed) for seed in range(parsed.seeds)])
            show(key, found[key])
    if parsed.real or not parsed.simulated:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
            asyncio.run(served(Path(folder), "one pool", 0))  # compiles kernels
            key = f"two real cores, {NUM_TALKS} conversations, one a second"
            found[key] = compared([real(Path(folder), seed) for seed in range(parsed.seeds)])
        show(key, found[key])
    keep(parsed.json, **found)


if __name__ == "__main__":
    main()
