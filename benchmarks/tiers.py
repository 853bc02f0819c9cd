"""Measures KV blocks outside the pool: what they save, and what they cost where nothing is reused.

    python benchmarks/tiers.py MODEL_DIR [--parts restart,cores,nothing] [--rounds 5] [--json FILE]

    restart  milliseconds to the first token of a conversation of --tokens tokens, the first request
             of a new process: with a directory that an earlier process has filled, and without
    cores    the same with --shared tokens in one core of two, which the other one has computed,
             next to computing them; both have an arena in shared memory
    nothing  seconds for prompts that have nothing in common, with decodes, in a pool that evicts:
             with a directory, with memory of the host, and without either; ratios above 1 where
             nothing is faster than without

Each figure is from a process of its own; kinds alternate within a round, and the first one
changes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
from figures import keep, print_table
from measure import median_interval

from engine import LLM, SamplingParams

FIRST, LAST = 100, 2000  # token ids of prompts
PROMPT, OUTPUT, NUM_PROMPTS = 512, 24, 72  # of ``nothing``
PARTS = ("restart", "cores", "nothing")
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)


def conversation(num_tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST, LAST), k=num_tokens)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and how many tokens of the prompt were not computed."""
    began = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], GREEDY, use_tqdm=False)
    return 1e3 * (time.perf_counter() - began), output.num_cached_tokens or 0


def restart(model: str, options: dict[str, Any], num_tokens: int) -> dict[str, float]:
    """One process: the first request after the start."""
    with engine(model, max_model_len=num_tokens + 64, **options) as llm:
        took, cached = first_token(llm, conversation(num_tokens, 1))
    return {"ms": took, "cached": cached}


def cores(model: str, options: dict[str, Any], num_tokens: int) -> dict[str, float]:
    """Two cores: the first computes a prompt, the second loads it, and then computes another."""
    limits = {"max_model_len": num_tokens + 64, "num_threads": 1}
    limits |= {"data_parallel_size": 2, "multiprocess": True}
    with engine(model, **limits, **options) as llm:
        many: Any = llm.llm_engine.session.client
        balancer, found = many._balancer, {}
        for name, core, seed in (("computed", 0, 1), ("loaded", 1, 1), ("again", 1, 2)):
            balancer._here = [core]  # the only one that it chooses
            found[name], cached = first_token(llm, conversation(num_tokens, seed))
            found[f"{name}_cached"] = cached
            time.sleep(0.5)  # until the last blocks are stored
    return {"ms": found["loaded"], "computed_ms": found["again"], "cached": found["loaded_cached"]}


def nothing(model: str, options: dict[str, Any], num_tokens: int) -> dict[str, float]:
    """One process: prompts that share no block, in a pool of about four of them."""
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    blocks = 4 * (PROMPT + OUTPUT) // 16
    limits = {"num_kv_blocks": blocks, "max_model_len": PROMPT + OUTPUT, "max_num_seqs": 4}
    with engine(model, **limits, **options) as llm:
        llm.generate([{"prompt_token_ids": conversation(PROMPT, 0)}], params, use_tqdm=False)
        prompts = [{"prompt_token_ids": conversation(PROMPT, 9 + n)} for n in range(NUM_PROMPTS)]
        began, before = time.perf_counter(), os.times()
        llm.generate(prompts, params, use_tqdm=False)
        took, after = time.perf_counter() - began, os.times()
    return {"s": took, "cpu_s": after.user + after.system - before.user - before.system}


@contextmanager
def engine(model: str, **options: Any) -> Iterator[LLM]:
    with LLM(model, skip_tokenizer_init=True, log_level="error", **options) as llm:
        yield llm


def child(part: str, model: str, options: dict[str, Any], num_tokens: int) -> dict[str, float]:
    """Measure in a new process."""
    order = json.dumps([part, model, options, num_tokens])
    done = subprocess.run(
        [sys.executable, __file__, "--child", order], stdout=subprocess.PIPE, check=True, text=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def kinds_of(part: str, root: Path) -> dict[str, dict[str, Any]]:
    """The options of each kind of process."""
    if part == "restart":
        return {"without": {}, "disk": {"kv_offload_dir": str(root / "restart")}}
    if part == "cores":
        return {"arena": {"kv_offloading_size": 2.0}}
    return {
        "without": {},
        "host": {"kv_offloading_size": 1.0},
        "disk": {"kv_offload_dir": str(root / "nothing"), "kv_offload_dir_gib": 4.0},
    }


def measured(part: str, model: str, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians by kind, and the ratios of the first kind's time to each other kind's."""
    key = "s" if part == "nothing" else "ms"
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as root:
        kinds = kinds_of(part, Path(root))
        if part == "restart":
            child(part, model, kinds["disk"], num_tokens)  # fills the directory
        for nth in range(rounds):
            if part == "nothing":  # each round has a directory of its own
                kinds = kinds_of(part, Path(root) / str(nth))
            order = list(kinds.items())
            for name, options in order if nth % 2 else order[::-1]:
                found.setdefault(name, []).append(child(part, model, options, num_tokens))
    result: dict[str, Any] = {
        name: {each: statistics.median(one[each] for one in runs) for each in runs[0]}
        for name, runs in found.items()
    }
    if part == "cores":
        runs = found["arena"]
        ratios = [run["ms"] / run["computed_ms"] for run in runs]
        return {**result, "ratio": statistics.median(ratios), "interval": median_interval(ratios)}
    first, *others = kinds_of(part, Path())
    for name in others:
        pairs = zip(found[first], found[name], strict=True)
        ratios = [one[key] / other[key] for one, other in pairs]
        result[name]["ratio"] = statistics.median(ratios)
        result[name]["interval"] = median_interval(ratios)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", nargs="?", help="model directory")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--shared", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    if args.child:
        part, *about = json.loads(args.child)
        print(json.dumps({"restart": restart, "cores": cores, "nothing": nothing}[part](*about)))
        return 0
    found = {}
    for part in args.parts.split(","):
        num_tokens = args.shared if part == "cores" else args.tokens
        found[part] = measured(part, args.model, num_tokens, args.rounds)
        rows = [(name, json.dumps(each)) for name, each in found[part].items()]
        title = f"{part}: {Path(args.model).name}, {machine.describe()['cpu']}"
        print_table(title, ("", ""), rows)
    keep(args.json, model=Path(args.model).name, **found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
