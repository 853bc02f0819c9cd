"""Random requests, aborts, resets and pauses while a store of KV blocks fails at random: tokens are
those of an engine without a store, and no block is lost."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.general_models import model_and_reference
from e2e.references import engine_for
from e2e.test_kv_tier_faults import NUM_NEW, finish, is_empty, store_threads, until
from e2e.tiny_models import TinyModels
from support.kv_stores import HOOKS, METHODS, MemoryStore, counters, drop, hooked, slow_profile

from engine import LLMEngine, SamplingParams
from engine.kv_transfer import store_thread, tiers

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(10**6)))
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
WISHES: list[dict[str, Any]] = [{}, {}, {}, {"max_load_tokens": 30}, {"store": False}]


class Chaos:
    """Hooks that make any method fail now and then."""

    def __init__(self, rng: random.Random, hooks: dict[str, Callable[..., Any]]) -> None:
        self.rng = rng
        self.lock = threading.Lock()
        self.share = 0.0  # of calls that fail
        for method in METHODS:
            hooks[method] = self._hook(method)

    def _hook(self, method: str) -> Callable[..., Any]:
        def call(store: Any, *given: Any) -> Any:
            with self.lock:
                luck, kind = self.rng.random(), self.rng.randrange(6)
            if method == "clear":  # the weights are the same, so its blocks stay right
                return None
            if luck > self.share or method in ("close", "forget"):
                return getattr(MemoryStore, method)(store, *given)
            if kind == 0:
                raise OSError("chance")
            if kind == 1:
                return None
            if kind == 2:
                time.sleep(0.002)
            if kind == 3 and method == "read":
                given[1][:] = 0x3C
                return [False] * len(given[0])
            if kind == 4 and method == "read":
                time.sleep(0.03)  # longer than is waited for it
            answer = getattr(MemoryStore, method)(store, *given)
            return np.array(answer) if kind == 5 and method != "counts" else answer

        return call


def requests(rng: random.Random, num: int) -> list[list[int]]:
    """Prompts with common beginnings."""
    roots = [[rng.randrange(3, 280) for _ in range(64)] for _ in range(3)]
    return [
        [*rng.choice(roots)[: rng.randint(8, 64)], *(rng.randrange(3, 280) for _ in range(num_own))]
        for num_own in (rng.randint(1, 30) for _ in range(num))
    ]


def wanted_of(path: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    with engine_for(path, enable_prefix_caching=False, max_model_len=128) as engine:
        for name, ids in prompts.items():
            engine.add_request(name, ids, GREEDY)
        return {name: output.outputs[0].token_ids for name, output in finish(engine).items()}


def run_chaos(engine: LLMEngine, rng: random.Random, chaos: Chaos, num: int) -> Any:
    """Returns the prompts, and the outputs of requests that have ended."""
    prompts = {f"{nth}": ids for nth, ids in enumerate(requests(rng, num))}
    left, outputs = list(prompts.items()), {}
    while left or engine.has_unfinished_requests():
        what = rng.random()
        if what < 0.4 and left:
            name, ids = left.pop()
            engine.add_request(name, ids, GREEDY, kv_transfer_params=rng.choice(WISHES))
        elif what < 0.43:
            engine.abort_request(rng.choice([*prompts]))
        elif what < 0.45:
            engine.reset_prefix_cache(rng.random() < 0.5)
        elif what < 0.47:
            engine.pause()
            outputs |= {out.request_id: out for out in engine.step()}
            engine.resume()
        elif what < 0.5:
            chaos.share = rng.choice([0.0, 0.1, 0.5])
        for _ in range(rng.randrange(4)):
            outputs |= {out.request_id: out for out in engine.step()}
    return prompts, outputs


def loads_after_another(engine: LLMEngine) -> int:
    """The number of loads after a prompt whose blocks only stores may have."""
    engine.reset_prefix_cache()
    engine.add_request("another", list(range(3, 67)), GREEDY)
    finish(engine)
    return int(counters(engine)["loads"])


QUICK = {("llama", True), ("lfm2", False)}
CASES = [
    pytest.param(family, ahead, marks=() if (family, ahead) in QUICK else pytest.mark.slow)
    for family in ("llama", "gemma3", "lfm2", "qwen3.5")
    for ahead in (False, True)
]


@pytest.mark.parametrize(("family", "ahead"), CASES)
def test_tokens_are_right_whatever_the_store_does(
    family: str,
    ahead: bool,
    tiny_models: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    print(f"seed {SEED}")
    monkeypatch.setattr(store_thread, "MOST_FAULTS", 10**6)  # so that it is always used
    monkeypatch.setattr(store_thread, "MOST_SECONDS", 0.02)
    monkeypatch.setattr(tiers, "MAX_SECONDS", 0.5)
    path = str(model_and_reference(family, tiny_models, tmp_path / "model")[0])
    name, rng = f"{request.node.name}", random.Random(SEED)
    chaos = Chaos(random.Random(SEED + 1), HOOKS[name])
    options = {
        "kv_transfer_config": hooked(name),
        "cost_profile": slow_profile(tmp_path / "slow.json"),
        "async_scheduling": ahead,
        "max_model_len": 128,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 4,
        "num_kv_blocks": 40,
    }
    before = store_threads()
    with engine_for(path, **options) as engine:
        prompts, outputs = run_chaos(engine, rng, chaos, 40)
        chaos.share = 0.0
        engine.add_request("last", [5, 6], GREEDY)
        finish(engine)
        until(lambda: is_empty(engine) or engine.step())
        until(lambda: counters(engine)["loads"] > 1 or loads_after_another(engine) > 1)
    assert not store_threads() - before
    wanted = wanted_of(path, prompts)
    for each, output in outputs.items():
        (end,) = output.outputs
        if end.finish_reason != "abort":
            assert (end.finish_reason, end.token_ids) == ("length", wanted[each]), (SEED, each)
    drop(name)
