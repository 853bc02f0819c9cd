"""One contract for every way to a core: same outputs, same errors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.core_clients import REMOTE, a_client, attach, drain, read
from support.patience import SOON_SECONDS, WAIT_SECONDS
from support.simulate import expected, make_request
from support.spawned import FakeBuild, fake_config

from engine.errors import (
    ConfigError,
    EngineError,
    RefusedError,
    RequestError,
    RequestTypeError,
)
from engine.frontend.session import Session
from engine.llm_engine import LLMEngine
from engine.messages.params import SamplingParams
from engine.messages.requests import Finished

pytestmark = pytest.mark.usefixtures("place")

SLOW = FakeBuild(step_seconds=0.002)


@pytest.fixture
def client(kind: str) -> Iterator[Any]:
    """A client of a core, at which the test leaves nothing."""
    with a_client(kind) as client:
        yield client
        assert not client.has_unfinished()
        counts = client.stats()
        assert (counts.num_running, counts.num_waiting, counts.kv_usage) == (0, 0, 0.0)


# -- outputs


@pytest.mark.behaviour(106)
def test_ten_requests_get_twenty_tokens_each(client: Any) -> None:
    prompts = {str(i): [i + 1] * (i + 1) for i in range(10)}
    assert client.add_all([make_request(name, ids, 20) for name, ids in prompts.items()]) == {}
    tokens, ends = drain(client)
    assert tokens == {name: expected(ids, 20) for name, ids in prompts.items()}
    assert {end.reason for end in ends.values()} == {"length"} and len(ends) == 10


@pytest.mark.behaviour(106, 113)
def test_who_is_aborted_stops_early_and_the_others_are_exact(kind: str, opened: Any) -> None:
    client = opened(kind, SLOW)
    client.add_all([make_request(str(i), [i + 1] * 4, 20) for i in range(10)])
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finished] = {}
    while len(tokens) < 10:
        for batch in client.step():
            read(batch, tokens, ends)
    stopped = [str(i) for i in range(0, 10, 2)]
    client.abort([*stopped, "nobody"])
    while client.has_unfinished():
        for batch in client.step():
            read(batch, tokens, ends)
    for i in range(10):
        whole = expected([i + 1] * 4, 20)
        if str(i) in stopped:
            assert len(tokens[str(i)]) < 20 and tokens[str(i)] == whole[: len(tokens[str(i)])]
        else:
            assert tokens[str(i)] == whole
    reasons = {name: end.reason for name, end in ends.items()}
    assert reasons == {str(i): "length" if i % 2 else "abort" for i in range(10)}


def test_an_abort_says_how_the_request_had_fared(client: Any) -> None:
    """A core may have ended the request before it hears of the abort."""
    for attempt in range(20):
        name = f"a{attempt}"
        client.add(make_request(name, [1] * 4, 400))
        while not client.step():
            pass
        client.abort(["nobody", name])
        client.abort([name])
        _, ends = drain(client)
        assert list(ends) == [name] and ends[name].reason in ("abort", "length")
        if ends[name].reason == "abort":
            break
    assert ends[name].reason == "abort"
    (queued, _), (scheduled, time_then) = ends[name].events
    assert (queued, scheduled) == ("queued", "scheduled")
    assert abs(time_then - time.monotonic()) < 60


def test_first_output_says_when_it_started_and_what_was_cached(client: Any) -> None:
    prompt = list(range(100, 140))
    for name, num_cached in (("cold", 0), ("warm", 32)):
        client.add(make_request(name, prompt, 1))
        batches: list[Any] = []
        while client.has_unfinished():
            batches += client.step()
        (started,) = [s for batch in batches for s in batch.started]
        assert started.num_cached_tokens == num_cached
        assert abs(started.scheduled_time - time.monotonic()) < 60
    assert client.call("reset_prefix_cache") is True


def test_requests_of_n_sequences(kind: str, opened: Any) -> None:
    client = opened(kind)
    engine = LLMEngine(Session(fake_config(), client, None, time.monotonic))
    params = SamplingParams(n=3, max_tokens=5, temperature=1.0)
    engine.add_request("a", [7, 8], params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [c.token_ids for c in outputs[-1].outputs] == [expected([7, 8], 5)] * 3
    assert outputs[-1].finished
    engine.add_request("b", [7, 8], SamplingParams(n=2, max_tokens=400, temperature=1.0))
    engine.abort_request("b")
    assert [o.outputs[0].finish_reason for o in engine.step()] == ["abort"]


# -- errors


@pytest.mark.behaviour(103)
def test_an_id_in_use_is_refused_and_free_again_after_its_end(client: Any) -> None:
    client.call("pause")
    client.add(make_request("a", [1], 3))
    with pytest.raises(RequestError, match="'a' is in use"):
        client.add(make_request("a", [2], 3))
    client.call("resume")
    assert drain(client)[0] == {"a": expected([1], 3)}
    client.add(make_request("a", [2], 3))
    assert drain(client)[0] == {"a": expected([2], 3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": "a" * 5000}, "request_id 'aaaa.* has 5000 characters, the limit is 4096"),
        ({"prompt_token_ids": [1000]}, "prompt_token_ids has token id 1000, must be in .0, 999."),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids has token id -1"),
        ({"prompt_token_ids": []}, "empty prompt"),
        ({"prompt_token_ids": [1] * 600}, "prompt has 600 tokens; it must have 1 to 511"),
        ({"eos_token_ids": [5000]}, "eos_token_ids has token id 5000"),
        ({"bad_words_ids": [[1], [-7]]}, "bad_words_ids has token id -7"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2**40}, "max_tokens is"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"end_deadline": float("nan")}, "end_deadline of request 'a' is nan"),
        ({"params": SamplingParams(stop_token_ids=[4000])}, "stop_token_ids has token id 4000"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused_alone(
    client: Any, change: dict[str, Any], message: str
) -> None:
    bad = msgspec.structs.replace(make_request("a", [1, 2], 4), **change)
    good = make_request("b", [3], 4)
    errors = client.add_all([bad, good])
    assert list(errors) == [0] and isinstance(errors[0], RequestError)
    assert errors[0].param == next(iter(change)) or isinstance(change.get("params"), SamplingParams)
    with pytest.raises(RequestError, match=message):
        raise errors[0]
    assert drain(client)[0] == {"b": expected([3], 4)}


@pytest.mark.behaviour(130)
def test_a_full_queue_refuses_and_counts(kind: str, opened: Any) -> None:
    if kind == "two cores":
        pytest.skip("each core has a queue of its own")
    client = opened(kind, FakeBuild(options={"max_waiting_requests": 4, "max_num_seqs": 1}))
    client.call("pause", "all")
    errors = client.add_all([make_request(str(i), [i + 1], 2) for i in range(7)])
    assert sorted(errors) == [4, 5, 6]
    for error in errors.values():
        assert isinstance(error, RefusedError) and "the queue is full" in str(error)
        assert error.retry_after is None and error.code == "queue_full"
    assert client.stats().num_refused == 3
    client.call("resume")
    assert sorted(drain(client)[0]) == ["0", "1", "2", "3"]


def test_deadlines_end_requests_that_wait_and_requests_that_run(client: Any) -> None:
    now = time.monotonic()
    client.call("pause", "all")
    client.add(make_request("waits", [1], 4, queue_deadline=now + 0.05))
    client.add(make_request("ends", [2], 4, end_deadline=now + 0.1))
    client.add(make_request("stays", [3], 4, end_deadline=now + 60))
    ends: dict[str, Finished] = {}
    while len(ends) < 2:
        for batch in client.step():
            read(batch, {}, ends)
    assert time.monotonic() - now < SOON_SECONDS
    assert {name: end.reason for name, end in ends.items()} == {
        "waits": "deadline",
        "ends": "deadline",
    }
    client.call("resume")
    assert drain(client)[0] == {"stays": expected([3], 4)}


# -- utilities


@pytest.mark.behaviour(107)
def test_a_utility_answers_and_one_that_raises_says_so(client: Any) -> None:
    value = [None, True, -(2**63), 2**64 - 1, 0.5, "text", b"bytes", [1, [2]], {"a": {"b": 1}}]
    assert client.call("echo", value) == value
    with pytest.raises(ConfigError, match="Call to pause method failed: pause 'x' is not"):
        client.call("pause", "x")
    with pytest.raises(EngineError, match="Call to echo method failed: TypeError"):
        client.call("echo", 1, 2)
    assert client.call("echo", "still there") == "still there"


@pytest.mark.behaviour(108)
@pytest.mark.parametrize("name", ["nothing", "shutdown", "__class__", "_stats", "", "x" * 100_000])
def test_an_unknown_utility_is_an_error_and_nothing_more(client: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="is not available; there are: echo, ") as info:
        client.call(name)
    assert len(str(info.value)) < 300
    assert client.call("echo", 1) == 1


class Custom:
    pass


@pytest.mark.behaviour(109)
@pytest.mark.parametrize("value", [Custom(), [Custom()], {"a": Custom()}, 1j, {1, 2}, Finished])
def test_custom_types_are_refused(client: Any, value: Any) -> None:
    with pytest.raises(RequestTypeError, match="must be None, a boolean"):
        client.call("echo", value)
    assert client.call("echo", 1) == 1


@pytest.mark.behaviour(115)
def test_pause_of_new_and_of_all_and_resume(client: Any) -> None:
    client.call("pause", "all")
    client.add(make_request("a", [1], 3))
    for _ in range(3):
        assert client.step() == []
    client.call("resume")
    assert drain(client)[0] == {"a": expected([1], 3)}
    client.call("pause", "new")
    client.add(make_request("b", [2], 3))
    assert client.step() == [] and client.stats().num_waiting == 1
    client.call("resume")
    assert drain(client)[0] == {"b": expected([2], 3)}


@pytest.mark.behaviour(129)
def test_counters_agree_with_the_outputs(kind: str, opened: Any) -> None:
    client = opened(kind)
    lengths = {str(i): (3 + i, 1 + 2 * i) for i in range(8)}
    client.add_all([make_request(name, [9] * p, m) for name, (p, m) in lengths.items()])
    tokens, ends = drain(client)
    stats = client.stats()
    num_prompt = sum(p for p, _ in lengths.values())
    num_output = sum(map(len, tokens.values()))
    assert num_output == sum(m for _, m in lengths.values()) and len(ends) == 8
    # The last token of each is never computed; what was found in the cache neither.
    assert stats.num_scheduled_tokens == num_prompt + num_output - 8 - stats.prefix_hits
    assert (stats.num_running, stats.num_waiting, stats.num_failed) == (0, 0, 0)


# -- several clients


@pytest.mark.behaviour(114)
def test_each_client_gets_its_own(opened: Any) -> None:
    first = opened(REMOTE, SLOW)
    others = [attach(first) for _ in range(2)]
    clients = [first, *others]
    assert len({client.id_prefix for client in clients}) == 3
    for i, client in enumerate(clients):
        client.add_all([make_request(f"{client.id_prefix}{n}", [i + 1, n + 1], 9) for n in (0, 1)])
    with pytest.raises(RequestError, match="in use"):
        others[0].add(make_request(f"{first.id_prefix}0", [1], 1))
    others[0].abort([f"{first.id_prefix}0"])  # not its own
    for i, client in enumerate(clients):
        tokens, _ = drain(client)
        assert tokens == {f"{client.id_prefix}{n}": expected([i + 1, n + 1], 9) for n in (0, 1)}
    for client in others:
        client.shutdown()


def test_what_a_client_had_at_the_core_ends_when_it_leaves(opened: Any) -> None:
    stays = opened(REMOTE, SLOW)
    leaves = attach(stays)
    leaves.add_all([make_request(f"x{i}", [i + 1], 400) for i in range(5)])
    while not leaves.step():
        pass
    leaves.shutdown()
    until = time.monotonic() + WAIT_SECONDS
    while stays.stats().num_running and time.monotonic() < until:
        time.sleep(0.01)
    counts = stays.stats()
    assert (counts.num_running, counts.num_waiting, counts.kv_usage) == (0, 0, 0.0)
