"""Long prompts are computed by cores of their own: the same tokens, whatever dies or is aborted."""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import model_and_reference
from e2e.references import WHOLE, engine_for
from e2e.tiny_models import TinyModels
from support.kv_stores import slow_profile
from support.live_core import wait_until

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.assets import BOX_MODEL
from engine.cli import serve
from engine.cli.main import main
from engine.cli.options import engine_args
from engine.core.client import CoreClient
from engine.errors import ConfigError

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(10**6)))
APART: dict[str, Any] = {
    "multiprocess": True,
    "prefill_cores": 1,
    "decode_cores": 1,
    "prefill_threshold": 64,
    "kv_offloading_size": 0.1,
    "num_threads": 2,
    "max_model_len": 512,
    "num_kv_blocks": 400,
    "drain_timeout": 0.0,
}
LONG = [[(n * k) % 281 + 3 for k in range(150 + 23 * n)] for n in (7, 11, 13)]
SHORT = [[5, 6, 7, 8 + n] for n in range(3)]
PROMPTS = [LONG[0], SHORT[0], LONG[1], SHORT[1], LONG[2], SHORT[2], LONG[0]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, **WHOLE)
SEEDED = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, **WHOLE)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=200, **WHOLE)


def add(
    engine: LLMEngine,
    prompts: list[list[int]],
    params: SamplingParams = GREEDY,
    salt: str | None = None,
) -> None:
    """Add requests with the ids 0, 1, ... salt: no other salt's KV is used."""
    for number, ids in enumerate(prompts):
        prompt = {"prompt_token_ids": ids, "cache_salt": salt}
        engine.add_request(str(number), prompt if salt else ids, params)


def drain(engine: LLMEngine) -> list[RequestOutput]:
    """The last outputs of all requests, in the order of their ids."""
    last: dict[str, RequestOutput] = {}
    until = time.monotonic() + 120.0
    while engine.has_unfinished_requests():
        assert time.monotonic() < until
        last |= {out.request_id: out for out in engine.step()}
    return [last[name] for name in sorted(last, key=int)]


def tokens_of(outs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[each.token_ids for each in out.outputs] for out in outs]


def counters(engine: LLMEngine) -> dict[str, int]:
    """The counters of prefills."""
    stats = engine.stats()
    assert stats is not None
    prefix, found = "prefill apart.", stats.counters.items()
    return {name[len(prefix) :]: int(n) for name, n in found if name.startswith(prefix)}


def all_is_free(engine: LLMEngine) -> bool:
    engine.step()
    stats = engine.stats()
    assert stats is not None
    return not (stats.num_running or stats.num_waiting or stats.num_parked or stats.kv_usage)


def is_whole(client: CoreClient) -> bool:
    client.check_alive()  # which takes restarted cores into use
    return client.num_cores().alive == client.num_cores().total


@pytest.fixture(scope="module")
def right() -> list[list[list[list[int]]]]:
    """What one core generates for ``PROMPTS``, greedily and with seeds."""
    with engine_for(str(BOX_MODEL), max_model_len=512, num_kv_blocks=400) as engine:
        found = []
        for params in (GREEDY, SEEDED):
            add(engine, PROMPTS, params)
            found.append(tokens_of(drain(engine)))
        return found


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Options with which blocks are always loaded, and awaited on a busy machine, too."""
    profile = slow_profile(tmp_path_factory.mktemp("profile") / "slow.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.rpc.apart.GRACE_SECONDS", 60.0)
        yield {**APART, "cost_profile": profile}


@pytest.fixture(scope="module")
def apart(options: dict[str, Any]) -> Iterator[LLMEngine]:
    with engine_for(str(BOX_MODEL), **options) as engine:
        yield engine


def test_tokens_are_the_same(apart: LLMEngine, right: list[list[list[list[int]]]]) -> None:
    """Each long prompt is computed once, on the prefill core, however many requests have it."""
    before = counters(apart).get("sent", 0)
    add(apart, PROMPTS, SEEDED)
    outs = drain(apart)
    assert tokens_of(outs) == right[1]
    assert counters(apart)["sent"] == before + len(LONG)
    for prompt, out in zip(PROMPTS, outs, strict=True):
        assert out.num_cached_tokens == (len(prompt) - 1) // 8 * 8 * (prompt in LONG)
    add(apart, PROMPTS)  # which the decode core has cached now
    assert tokens_of(drain(apart)) == right[0]
    assert counters(apart)["sent"] == before + len(LONG)
    add(apart, PROMPTS, salt="same tokens")
    assert tokens_of(drain(apart)) == right[0]
    assert counters(apart)["sent"] == counters(apart)["done"] == before + 2 * len(LONG)
    stats = apart.stats()
    assert stats is not None and stats.stores["host"].num_cores == 2
    assert apart.session.client.num_cores().by_role == {"prefill": (1, 1), "decode": (1, 1)}
    assert all_is_free(apart)


def test_requests_are_aborted_at_any_time(
    apart: LLMEngine, right: list[list[list[list[int]]]]
) -> None:
    rng = random.Random(SEED)
    for number in range(12):
        shift = rng.randrange(3, 250)
        prompts = [[(token + shift) % 281 + 3 for token in prompt] for prompt in PROMPTS]
        add(apart, prompts, rng.choice((ENDLESS, SEEDED)))
        until = time.monotonic() + rng.choice((0.0, 0.01, 0.03, 0.06, 0.1))
        while time.monotonic() < until:
            apart.step()
        apart.abort_request([str(each) for each in range(len(prompts))])
        drain(apart)
        assert wait_until(lambda: all_is_free(apart)) is not None, (SEED, number)
    add(apart, PROMPTS, salt="after aborts")
    assert tokens_of(drain(apart)) == right[0]


def test_a_prefill_core_that_hangs_delays_no_other_request(
    apart: LLMEngine, right: list[list[list[list[int]]]]
) -> None:
    prefill_core, _ = apart.session.client.pids
    os.kill(prefill_core, signal.SIGSTOP)
    try:
        add(apart, PROMPTS, salt="hang")
        outs: dict[str, RequestOutput] = {}
        while len(outs) < len(SHORT):
            outs |= {out.request_id: out for out in apart.step() if out.finished}
        shorts = [str(n) for n, prompt in enumerate(PROMPTS) if prompt in SHORT]
        assert sorted(outs) == shorts
    finally:
        os.kill(prefill_core, signal.SIGCONT)
    outs |= {out.request_id: out for out in drain(apart)}
    assert tokens_of([outs[str(n)] for n in range(len(PROMPTS))]) == right[0]


@pytest.mark.slow
def test_a_prefill_core_dies_amid_a_prefill(right: list[list[list[list[int]]]]) -> None:
    with engine_for(str(BOX_MODEL), **APART, on_core_death="restart") as engine:
        client = engine.session.client
        prefill_core, _ = client.pids
        os.kill(prefill_core, signal.SIGSTOP)
        add(engine, PROMPTS)
        for _ in range(3):
            engine.step()
        os.kill(prefill_core, signal.SIGKILL)
        assert tokens_of(drain(engine)) == right[0]
        assert counters(engine)["failed"] == len(LONG)
        assert wait_until(lambda: is_whole(client)) is not None
        add(engine, PROMPTS, SEEDED, salt="again")
        assert tokens_of(drain(engine)) == right[1]
        assert counters(engine)["done"] == len(LONG)
        assert all_is_free(engine)


@pytest.mark.slow
@pytest.mark.parametrize("amid", ["decode", "the wait"])
def test_a_decode_core_dies(amid: str, right: list[list[list[list[int]]]]) -> None:
    """Its requests end with an error; prefill cores do everything until it is back."""
    with engine_for(str(BOX_MODEL), **APART, on_core_death="restart") as engine:
        client = engine.session.client
        prefill_core, decode_core = client.pids
        if amid == "the wait":
            os.kill(prefill_core, signal.SIGSTOP)
        add(engine, LONG, ENDLESS)
        seen: set[str] = set()
        while amid == "decode" and len(seen) < len(LONG):
            seen |= {out.request_id for out in engine.step()}
        os.kill(decode_core, signal.SIGKILL)
        if amid == "the wait":
            wait_until(lambda: engine.step() != [])
            os.kill(prefill_core, signal.SIGCONT)
        ends = [each for out in drain(engine) for each in out.outputs]
        assert {each.code for each in ends} <= {"core_died"}
        assert client.num_cores().alive == 1
        add(engine, PROMPTS)
        assert tokens_of(drain(engine)) == right[0]
        assert wait_until(lambda: is_whole(client)) is not None
        add(engine, PROMPTS, SEEDED)
        assert tokens_of(drain(engine)) == right[1]
        assert wait_until(lambda: all_is_free(engine)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "lfm2", "mistral-window", "qwen3.5", "gpt-oss-sinks"])
def test_tokens_of_other_models_are_the_same(
    family: str,
    tiny_models: TinyModels,
    tmp_path: Path,
    options: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(model_and_reference(family, tiny_models, tmp_path / "m")[0])
    prompts = [[token % 250 + 3 for token in prompt] for prompt in PROMPTS]
    with engine_for(path, max_model_len=512, num_kv_blocks=2000) as engine:
        add(engine, prompts)
        tokens = tokens_of(drain(engine))
    log = tmp_path / "steps"
    options = {**options, "num_kv_blocks": 2000, "step_log": str(log)}
    with engine_for(path, **options) as engine:
        add(engine, prompts)
        outs = drain(engine)
        assert tokens_of(outs) == tokens
        assert counters(engine)["done"] == len(LONG) and "given_up" not in counters(engine)
        cached = [out.num_cached_tokens for out in outs]
        assert cached == [(len(p) - 1) // 8 * 8 if len(p) > 4 else 0 for p in prompts]
    assert main(["replay", str(log)]) == 0
    assert capsys.readouterr().out.count(": identical: ") == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_cores": 1}, "prefill_cores is 1 and decode_cores is 0: set both"),
        ({"decode_cores": 2}, "prefill_cores is 0 and decode_cores is 2: set both"),
        ({"prefill_cores": 40, "decode_cores": 40}, "together at most 64"),
        ({"prefill_cores": -1}, "prefill_cores is -1, must be in"),
        ({**APART, "data_parallel_size": 2}, "and data_parallel_size is 2: leave"),
        ({**APART, "multiprocess": False}, "multiprocess is False"),
        ({**APART, "data_parallel_backend": "ray"}, "run on one machine"),
        ({**APART, "prefill_threshold": 0}, "prefill_threshold is 0, must be"),
        ({**APART, "enable_prefix_caching": False}, "but enable_prefix_caching is False"),
        ({**APART, "prefix_caching_hash_algo": "fast"}, "prefix_caching_hash_algo is 'fast'"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_for(str(BOX_MODEL), **options)


def test_the_server_has_short_names_for_these_options() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = engine_args(parser.parse_args(["--prefill", "1", "--decode", "2"]))
    assert (args.prefill_cores, args.decode_cores, args.num_cores) == (1, 2, 3)
