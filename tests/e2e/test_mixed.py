"""A hundred mixed requests on the model in the box: each is answered as if it were alone."""

from __future__ import annotations

import random

import pytest
from e2e.box_engine import EXACT

from engine import EngineArgs, LLMEngine, SamplingParams

SEED = 11
WORDS = [
    *("the", "class", "object", "returns", "a", "list", "of", "file", "names", "and"),
    *("import", "module", "if", "None", "self", "value"),
]
STOPS = ["\n\n", ". ", "the ", " of a", "turn"]


def make_params(rng: random.Random) -> SamplingParams:
    """Anything a user may ask for, seeded."""
    options: dict = {"max_tokens": rng.randint(1, 40), "seed": rng.randrange(1 << 30)}
    options["temperature"] = rng.choice([0.0, 0.0, 0.7, 1.0])
    if options["temperature"]:
        options["top_p"] = rng.choice([1.0, 0.9])
        options["top_k"] = rng.choice([0, 0, 20])
        options["min_p"] = rng.choice([0.0, 0.05])
    if rng.random() < 0.3:
        options["presence_penalty"] = 0.5
        options["repetition_penalty"] = 1.2
    if rng.random() < 0.4:
        options["stop"] = rng.sample(STOPS, 2)
        options["include_stop_str_in_output"] = rng.random() < 0.5
    if rng.random() < 0.2:
        options["logprobs"] = 3
    if rng.random() < 0.2:
        options["logit_bias"] = {rng.randrange(1000): 5.0}
    if rng.random() < 0.2:
        options["min_tokens"] = options["max_tokens"] // 2
    if rng.random() < 0.1:
        options["ignore_eos"] = True
    return SamplingParams(**options)


def make_requests(count: int) -> list[tuple[str, str, SamplingParams]]:
    rng = random.Random(SEED)
    shared = " ".join(rng.choices(WORDS, k=40))
    requests = []
    for index in range(count):
        words = " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))
        prompt = f"{shared} {words}" if rng.random() < 0.4 else words
        requests.append((f"request-{index}", prompt, make_params(rng)))
    return requests


def engine_for(**options) -> LLMEngine:
    return LLMEngine.from_engine_args(
        EngineArgs(log_level="error", num_threads=1, block_size=16, **options)
    )


def run(engine: LLMEngine, requests, abort: set[str], rng: random.Random) -> dict:
    """Add them over time, abort some midway; the last output of each."""
    todo, last, finished = list(requests), {}, []
    live: list[str] = []
    while todo or engine.has_unfinished_requests():
        while todo and rng.random() < 0.5:
            request_id, prompt, params = todo.pop(0)
            engine.add_request(request_id, prompt, params)
            live.append(request_id)
        for request_id in [name for name in live if name in abort and rng.random() < 0.2]:
            engine.abort_request(request_id)
            live.remove(request_id)
        for out in engine.step():
            last[out.request_id] = out
            if out.finished:
                finished.append(out.request_id)
    assert sorted(finished) == sorted(request_id for request_id, _, _ in requests)
    return last


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_hundred_mixed_requests_end_as_if_each_were_alone(depth):
    requests = make_requests(100)
    rng = random.Random(SEED)
    abort = {name for name, _, _ in requests if rng.random() < 0.1}
    common = {"max_model_len": 512, **EXACT}
    options = {"max_num_seqs": 24, "max_num_batched_tokens": 64, "num_kv_blocks": 150}
    with engine_for(async_scheduling=depth == 2, **common, **options) as engine:
        together = run(engine, requests, abort, rng)
        stats = engine.stats()
        assert stats.kv_usage == 0.0 and stats.num_running == stats.num_waiting == 0
        assert stats.num_failed == 0
    with engine_for(max_num_seqs=1, enable_prefix_caching=False, **common) as engine:
        for request_id, prompt, params in requests[depth - 1 :: 2]:  # half for each depth
            if request_id in abort:
                assert together[request_id].outputs[0].finish_reason in ("abort", "stop", "length")
                continue
            alone = run(engine, [(request_id, prompt, params)], set(), rng)[request_id].outputs[0]
            out = together[request_id].outputs[0]
            assert out.token_ids == alone.token_ids, f"seed {SEED}, {request_id}: {params}"
            assert out.text == alone.text, f"seed {SEED}, {request_id}"
            assert out.finish_reason == alone.finish_reason
            assert out.stop_reason == alone.stop_reason
