"""Random requests over connections with random faults, aborts and small pools: the tokens are those
of one engine, and nothing is left."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import model_and_reference
from e2e.references import WHOLE, engine_for
from e2e.tiny_models import TinyModels
from support.kv_stores import slow_profile
from support.live_core import wait_until
from support.relays import relay
from support.remote_prefill import SECRET, counters, decode, finish, is_idle, peers, prefill
from support.served import free_port

from engine import LLMEngine, SamplingParams

NUM_NEW = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, **WHOLE)
FAULTS = ("cut", "changed", "slow", "stalled")
NUM_POOL = {"llama": 50, "gemma3": 120, "lfm2": 150}  # blocks of the consumer
ROUNDS = [
    ("llama", 3),
    pytest.param("llama", 25, marks=pytest.mark.slow),
    pytest.param("gemma3", 15, marks=pytest.mark.slow),
    pytest.param("lfm2", 15, marks=pytest.mark.slow),
]


def prompts_of(rng: random.Random) -> list[list[int]]:
    """Prompts, some of which begin alike."""
    begin = [rng.randrange(3, 284) for _ in range(64)]
    return [
        begin[: rng.choice((0, 30, 64))]
        + [rng.randrange(3, 284) for _ in range(rng.randint(9, 90))]
        for _ in range(rng.randint(3, 6))
    ]


@pytest.mark.parametrize(("family", "num_rounds"), ROUNDS)
def test_random_faults_never_change_tokens(
    family: str,
    num_rounds: int,
    tiny_models: TinyModels,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET)
    rng, port = random.Random(seed), free_port()
    path = str(model_and_reference(family, tiny_models, tmp_path / "m")[0])
    options = {"max_model_len": 256, "cost_profile": slow_profile(tmp_path / "slow.json")}
    threads = set(threading.enumerate())
    sending = {**options, "kv_offloading_size": 0.01, "kv_transfer_config": peers("both", port)}
    getting = {**options, "kv_transfer_config": peers("consumer", shares_memory=False, timeout=0.3)}
    getting |= {"num_kv_blocks": NUM_POOL[family], "max_num_batched_tokens": 64}
    with (
        engine_for(path, max_model_len=256) as alone,
        engine_for(path, **sending) as producer,
        engine_for(path, **getting) as consumer,
    ):
        for _ in range(num_rounds):
            prompts = prompts_of(rng)
            outs = decode(alone, prompts, [{}] * len(prompts), GREEDY)
            right = [out.outputs[0].token_ids for out in outs]
            round_of(rng, producer, consumer, prompts, right, port)
            if rng.random() < 0.3:
                consumer.reset_prefix_cache()
        found = counters(consumer)
        print(found)
        assert found["peer.loaded"] > 0
    assert wait_until(lambda: not set(threading.enumerate()) - threads) is not None


def round_of(
    rng: random.Random,
    producer: LLMEngine,
    consumer: LLMEngine,
    prompts: list[list[int]],
    right: list[list[int]],
    port: int,
) -> None:
    given = prefill(producer, prompts)
    with ExitStack() as ending:
        for number, prompt in enumerate(prompts):
            params = given[number]
            if rng.random() < 0.6:
                fault, after = rng.choices(FAULTS, (4, 4, 1, 1))[0], rng.randrange(30_000)
                print(number, fault, after)
                address = ending.enter_context(relay(port, fault, after))
                params = params | {"remote_port": int(address.rpartition(":")[2])}
            consumer.add_request(str(number), prompt, GREEDY, kv_transfer_params=params)
            for _ in range(rng.randrange(3)):
                consumer.step()
        aborted = [str(n) for n in range(len(prompts)) if rng.random() < 0.2]
        consumer.abort_request(aborted)
        outs: dict[str, Any] = finish(consumer)
    for number, tokens in enumerate(right):
        if (out := outs.get(str(number))) is not None and str(number) not in aborted:
            assert out.outputs[0].token_ids == tokens, number

    def nothing_is_left() -> bool:
        consumer.session.client.step()  # which takes note of loads that have ended
        return is_idle(consumer)

    assert wait_until(nothing_is_left) is not None and is_idle(producer)
