"""Prompts that another engine has computed, over TCP: the same tokens, whatever goes wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import model_and_reference
from e2e.picture_cases import picture
from e2e.references import WHOLE, engine_for, run
from e2e.seeing_models import make_seeing_model
from e2e.tiny_models import TinyModels
from support.adapted import random_adapter
from support.kv_stores import slow_profile
from support.live_core import wait_until
from support.relays import relay
from support.remote_prefill import SECRET, counters, decode, finish, is_idle, peers, prefill
from support.served import free_port, free_ports

from engine import LLMEngine, LoRARequest, RequestOutput, SamplingParams
from engine.core.replay import replay
from engine.errors import ConfigError, EngineDeadError, RequestError

NUM_NEW, BLOCK = 8, 8
PROMPTS = [[(n * k) % 281 + 3 for k in range(90 + 3 * n)] for n in (7, 11, 13)]
WHOLES = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, **WHOLE)
HERE = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 14579}
OTHERS = [
    pytest.param(each, marks=pytest.mark.slow)
    for each in ("mistral-window", "qwen3.5", "gpt-oss-sinks", "jamba-moe")
]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET)


@pytest.fixture(scope="module")
def right(tiny_models: TinyModels) -> list[list[int]]:
    """What one engine generates."""
    with engine_for(str(tiny_models.path("llama")), max_model_len=256) as engine:
        return run(engine, PROMPTS, NUM_NEW)[0]


@pytest.fixture
def start(tiny_models: TinyModels, tmp_path: Path) -> Any:
    """Starts engines, which end with the test."""
    profile = slow_profile(tmp_path / "slow.json")
    with ExitStack() as ending:

        def one(role: str, *, model: str = "", extra: Any = None, **options: Any) -> LLMEngine:
            options = {
                "cost_profile": profile,
                "max_model_len": 256,
                "kv_transfer_config": peers(role, options.pop("port", 14579), **(extra or {})),
                **options,
            }
            path = model or str(tiny_models.path("llama"))
            return ending.enter_context(engine_for(path, **options))

        yield one


def tokens_of(outs: list[Any]) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in outs]


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", *OTHERS])
def test_tokens_are_the_same_as_with_one_engine(
    family: str, tiny_models: TinyModels, tmp_path: Path, start: Callable[..., LLMEngine]
) -> None:
    path, port = str(model_and_reference(family, tiny_models, tmp_path / "m")[0]), free_port()
    with engine_for(path, max_model_len=256) as alone:
        right, _ = run(alone, PROMPTS, NUM_NEW)
    producer = start("producer", model=path, port=port)
    consumer = start("consumer", model=path, extra={"shares_memory": False})
    given = prefill(producer, PROMPTS)
    for prompt, each in zip(PROMPTS, given, strict=True):
        assert each["do_remote_prefill"] is True and each["do_remote_decode"] is False
        assert (each["remote_host"], each["remote_port"]) == ("127.0.0.1", port)
        assert len(each["remote_block_ids"]) == len(prompt) // BLOCK and each["tp_size"] == 1
    outs = decode(consumer, PROMPTS, given, GREEDY)
    assert tokens_of(outs) == right
    assert [out.num_cached_tokens for out in outs] == WHOLES
    assert is_idle(producer) and is_idle(consumer)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shares_memory", [False, True])
def test_each_rank_reads_from_the_same_rank_of_an_engine_with_as_many(
    size: int, shares_memory: bool, start: Callable[..., LLMEngine], right: list[list[int]]
) -> None:
    port = free_ports(2)
    exact = {"dtype": "float32", "num_threads": 1}
    producer = start("producer", port=port, tensor_parallel_size=2, **exact)
    extra = {"shares_memory": shares_memory}
    consumer = start("consumer", extra=extra, tensor_parallel_size=size, **exact)
    given = prefill(producer, PROMPTS)
    assert [(each["remote_port"], each["tp_size"]) for each in given] == [(port, 2)] * len(PROMPTS)
    outs = decode(consumer, PROMPTS, given, GREEDY)
    assert tokens_of(outs) == right
    assert [out.num_cached_tokens for out in outs] == (WHOLES if size == 2 else [0] * len(PROMPTS))
    assert is_idle(producer) and is_idle(consumer)


@pytest.mark.parametrize("depth", [1, 2])
def test_plans_are_the_same_in_a_replay(
    depth: int, start: Callable[..., LLMEngine], tmp_path: Path
) -> None:
    """Also where the producer's stores have dropped blocks that its pool still has."""
    logs = [tmp_path / "producer", tmp_path / "consumer"]
    steps = {"async_scheduling": depth == 2}
    small = {"kv_offloading_size": 0.001, "num_kv_blocks": 1000}
    producer = start("producer", port=free_port(), step_log=str(logs[0]), **small, **steps)
    consumer = start("consumer", step_log=str(logs[1]), **steps)
    for _ in range(2):
        outs = decode(consumer, PROMPTS, prefill(producer, PROMPTS), GREEDY)
        assert [out.num_cached_tokens for out in outs] == WHOLES
        others = [[(token + shift) % 281 + 3 for token in PROMPTS[0]] for shift in range(1, 24)]
        prefill(producer, others)
        consumer.reset_prefix_cache()
        decode(consumer, others[:1], [{}], GREEDY)
    assert counters(producer)["host.evicted"] > 0
    for engine, log in zip((producer, consumer), logs, strict=True):
        engine.shutdown()
        outcome = replay(log)
        assert outcome.difference is None and outcome.num_steps > 5


@pytest.mark.parametrize("fault", ["cut", "changed", "stalled", "slow"])
def test_what_a_faulty_connection_does_not_bring_is_computed(
    fault: str, start: Callable[..., LLMEngine], right: list[list[int]]
) -> None:
    port, extra = free_port(), {"shares_memory": False, "timeout": 0.3}
    producer, consumer = start("producer", port=port), start("consumer", extra=extra)
    given = prefill(producer, PROMPTS)
    with relay(port, fault, 30_000) as address:
        through = {"remote_port": int(address.rpartition(":")[2])}
        outs = decode(consumer, PROMPTS, [each | through for each in given], GREEDY)
    assert tokens_of(outs) == right
    found = counters(consumer)
    assert sum(found[f"peer.{name}"] for name in ("lost", "late", "damaged")) or fault == "slow"
    assert is_idle(consumer)


def test_prompts_are_computed_if_their_blocks_are_not_to_be_had(
    start: Callable[..., LLMEngine],
    right: list[list[int]],
    tiny_models: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No engine is there, one of a model that was trained on, one with another secret; then a right
    one."""
    nowhere = {"do_remote_prefill": True, "remote_host": "localhost", "remote_port": free_port()}
    consumer = start("consumer")
    outs = decode(consumer, PROMPTS[:1], [nowhere], GREEDY)
    assert tokens_of(outs) == right[:1] and outs[0].num_cached_tokens == 0
    trained = shutil.copytree(tiny_models.path("llama"), tmp_path / "trained")
    weights = trained / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    other = start("producer", port=free_port(), model=str(trained))
    outs = decode(consumer, PROMPTS[1:2], prefill(other, PROMPTS[1:2]), GREEDY)
    assert tokens_of(outs) == right[1:2] and outs[0].num_cached_tokens == 0
    assert counters(consumer)["peer.refused"] == 1
    monkeypatch.setenv("METRONOME_CORE_SECRET", "what others do not know")
    foreign = start("producer", port=free_port())
    outs = decode(consumer, PROMPTS[2:], prefill(foreign, PROMPTS[2:]), GREEDY)
    assert tokens_of(outs) == right[2:] and outs[0].num_cached_tokens == 0
    assert counters(foreign)["host.served.sent"] == 0
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET)
    producer = start("both", port=free_port())
    salted = [{"prompt_token_ids": prompt, "cache_salt": "s"} for prompt in PROMPTS]
    outs = decode(consumer, salted, prefill(producer, salted), GREEDY)
    assert tokens_of(outs) == right and [out.num_cached_tokens for out in outs] == WHOLES


def test_a_request_ends_in_error_if_the_operator_wants_that(
    start: Callable[..., LLMEngine],
) -> None:
    policy = peers("consumer") | {"kv_load_failure_policy": "fail"}
    consumer = start("consumer", kv_transfer_config=policy)
    nowhere = {**HERE, "remote_port": free_port()}
    (out,) = decode(consumer, PROMPTS[:1], [nowhere], GREEDY)
    (end,) = out.outputs
    assert end.code == "kv_transfer_failed" and "peer did not supply" in str(end.error)


def test_a_consumer_without_room_computes_in_chunks(
    start: Callable[..., LLMEngine], right: list[list[int]]
) -> None:
    """Its pool holds one of the prompts at a time."""
    producer = start("producer", port=free_port())
    consumer = start("consumer", num_kv_blocks=max(WHOLES) // BLOCK + 4)
    outs = decode(consumer, PROMPTS, prefill(producer, PROMPTS), GREEDY)
    assert tokens_of(outs) == right
    assert is_idle(consumer)


def test_a_transfer_that_stalls_holds_up_no_other(
    start: Callable[..., LLMEngine], right: list[list[int]]
) -> None:
    """One of its requests is aborted, the other computes when it has waited long enough. Meanwhile
    blocks of another engine come."""
    port = free_port()
    stalled, other = start("producer", port=port), start("producer", port=free_port())
    consumer = start("consumer", extra={"shares_memory": False})
    given = [*prefill(stalled, PROMPTS[:2]), *prefill(other, PROMPTS[2:])]
    with relay(port, "stalled", 10_000) as address:
        for each in given[:2]:
            each["remote_port"] = int(address.rpartition(":")[2])
        for name, prompt, params in zip("abc", PROMPTS, given, strict=True):
            consumer.add_request(name, prompt, GREEDY, kv_transfer_params=params)
        consumer.step()
        assert num_parked(consumer) == 3
        consumer.abort_request("a")
        ended: list[RequestOutput] = []
        while consumer.has_unfinished_requests():
            ended += [out for out in consumer.step() if out.finished and out.request_id != "a"]
    assert [out.request_id for out in ended] == ["c", "b"]
    assert tokens_of(ended) == [right[2], right[1]]
    assert [out.num_cached_tokens for out in ended] == [WHOLES[2], 0]
    assert wait_until(lambda: is_idle(consumer)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("after", [2_000, 60_000])
def test_a_consumer_that_dies_amid_a_transfer_leaves_nothing(
    after: int, start: Callable[..., LLMEngine], right: list[list[int]]
) -> None:
    """The producer drops it, and serves others meanwhile."""
    port = free_port()
    producer = start("producer", port=port)
    given = prefill(producer, PROMPTS)
    tcp = {"shares_memory": False}
    dying = start("consumer", extra=tcp, multiprocess=True)
    with relay(port, "stalled", after) as address:
        through = {"remote_port": int(address.rpartition(":")[2])}
        for name, prompt, each in zip("abc", PROMPTS, given, strict=True):
            dying.add_request(name, prompt, GREEDY, kv_transfer_params=each | through)
        assert wait_until(lambda: counters(producer)["host.served.num_consumers"] > 0) is not None
        os.kill(dying.session.client.pids[0], signal.SIGKILL)
        outs = decode(start("consumer", extra=tcp), PROMPTS, given, GREEDY)
    assert tokens_of(outs) == right and [out.num_cached_tokens for out in outs] == WHOLES
    with pytest.raises(EngineDeadError):
        finish(dying)


def num_parked(engine: LLMEngine) -> int:
    stats = engine.stats()
    assert stats is not None
    return stats.num_parked


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("both", {"do_remote_decode": "yes"}, "do_remote_decode .* is 'yes', must be true or false"),
    ("both", {"do_remote_prefill": 1}, "do_remote_prefill .* is 1, must be true or false"),
    ("both", {"do_remote_prefill": True, "do_remote_decode": True}, "are both true"),
    ("both", {"do_remote_prefill": True}, "remote_host .* is None, must be the IPv4 address"),
    ("both", {"do_remote_prefill": True, "remote_host": "a.b"}, "remote_host .* is 'a.b'"),
    ("both", {"do_remote_prefill": True, "remote_host": "127.0.0.1"}, "remote_port .* is None"),
    ("both", {"remote_port": "1"}, "remote_port .* is '1', must be a whole number"),
    ("both", {"remote_block_ids": "0"}, "remote_block_ids .* is '0', must be a list"),
    ("both", {"remote_engine_id": 5}, "remote_engine_id .* is 5, must be a string"),
    ("both", {"tp_size": [1]}, r"tp_size .* is \[1\], must be a whole number"),
    ("both", {"do_remote_decode": True, "store": False}, "can only read what is stored"),
    ("both", {"do_remote": True}, "'do_remote', which is not known"),
    ("both", {**HERE, "remote_port": 65535}, "remote_port .* is 65535"),
    ("both", {**HERE, "remote_host": "10.0.0.6"}, "'10.0.0.6' .* may not read KV: add it to"),
    ("both", {**HERE, "remote_host": "10.0.0.5"}, "'10.0.0.5' .port 14579., from which"),
    ("producer", HERE, "kv_role of this engine is 'kv_producer': send the request to a consumer"),
    ("consumer", {"do_remote_decode": True}, "is 'kv_consumer': send the request to a producer"),
]


def test_wrong_parameters_are_named(start: Callable[..., LLMEngine]) -> None:
    engines = {
        role: start(role, port=free_port(), extra={"allowed": ["10.0.0.5:1", "10.0.1.0/24"]})
        for role in ("both", "producer", "consumer")
    }
    for role, given, message in WRONG:
        with pytest.raises(RequestError, match=message):
            engines[role].add_request("a", PROMPTS[0], GREEDY, kv_transfer_params=given)
        assert not engines[role].has_unfinished_requests()


def test_an_address_in_use_is_named(start: Callable[..., LLMEngine]) -> None:
    port = free_port()
    start("producer", port=port)
    with pytest.raises(ConfigError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
        start("both", port=port)


def test_blocks_travel_with_mooncake(
    start: Callable[..., LLMEngine], right: list[list[int]]
) -> None:
    """Also next to an engine that does not have it. Each engine is a process of its own."""
    pytest.importorskip("mooncake.engine")
    options = {"extra": {"transport": "mooncake", "shares_memory": False}, "multiprocess": True}
    producer = start("producer", port=free_port(), **options)
    given = prefill(producer, PROMPTS)
    for consumer in (start("consumer", **options), start("consumer")):
        outs = decode(consumer, PROMPTS, given, GREEDY)
        assert tokens_of(outs) == right and [out.num_cached_tokens for out in outs] == WHOLES


def test_without_mooncake_its_packages_are_named(start: Callable[..., LLMEngine]) -> None:
    if importlib.util.find_spec("mooncake") is not None:
        pytest.skip("Mooncake is installed")
    with pytest.raises(ConfigError, match="pip install mooncake-transfer-engine-non-cuda"):
        start("producer", port=free_port(), extra={"transport": "mooncake"})


def test_adapters_have_blocks_of_their_own(
    tiny_models: TinyModels, tmp_path: Path, start: Callable[..., LLMEngine]
) -> None:
    """The same prompt with an adapter, whose file is another one for each engine, and without."""
    model = tiny_models.reference("llama")
    paths = [random_adapter(model, tmp_path / str(n), seed=3) for n in range(2)]
    other = random_adapter(model, tmp_path / "other", seed=4)
    lora = {"enable_lora": True, "max_loras": 2}
    producer, consumer = start("producer", port=free_port(), **lora), start("consumer", **lora)
    for engine, path in zip((producer, consumer), paths, strict=True):
        engine.add_lora(LoRARequest("a", 1, str(path)))
    outs = [
        decode(consumer, PROMPTS, prefill(producer, PROMPTS, **options), GREEDY, **options)
        for options in ({"adapter": "a"}, {})
    ]
    right = [decode(producer, PROMPTS, [{}] * 3, GREEDY, **each) for each in ({"adapter": "a"}, {})]
    assert [tokens_of(each) for each in outs] == [tokens_of(each) for each in right]
    assert tokens_of(outs[0]) != tokens_of(outs[1])
    for each in outs:
        assert [out.num_cached_tokens for out in each] == WHOLES
    consumer.add_lora(LoRARequest("b", 2, str(other)))
    (out,) = decode(consumer, PROMPTS[:1], prefill(producer, PROMPTS[:1], adapter="a"), GREEDY,
                    adapter="b")  # fmt: skip
    assert out.num_cached_tokens == 0


def test_pictures_are_part_of_what_a_block_is_found_by(
    tmp_path: Path, start: Callable[..., LLMEngine]
) -> None:
    path = str(make_seeing_model(tmp_path / "seeing", "smolvlm"))
    options = {"model": path, "skip_tokenizer_init": False}
    producer = start("producer", port=free_port(), **options)
    consumer = start("consumer", **options)
    text = "what is <image> this, and how many of them are there?"
    prompts = [
        {"prompt": text, "multi_modal_data": {"image": [picture(50, 30, seed=n)]}} for n in range(3)
    ]
    given = prefill(producer, prompts[:2])
    outs = decode(consumer, prompts, [*given, given[0]], GREEDY)
    assert tokens_of(outs) == tokens_of(decode(producer, prompts, [{}] * 3, GREEDY))
    cached, whole = [out.num_cached_tokens for out in outs], len(outs[0].prompt_token_ids) - 1
    assert cached[0] == cached[1] == whole // BLOCK * BLOCK > cached[2]
