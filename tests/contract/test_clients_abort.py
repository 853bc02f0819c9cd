"""One contract for every way to a core: who is aborted ends once, whatever had come before it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.core_clients import IN_PROCESS, REMOTE, WAIT_SECONDS, drain, read
from support.simulate import expected, make_request
from support.spawned import FakeBuild

from engine.errors import RequestError, RequestTypeError

pytestmark = pytest.mark.usefixtures("place")

SLOW = FakeBuild(step_seconds=0.002)


def settle(client: Any, is_so: Callable[[Any], bool]) -> None:
    """Read nothing until the statistics are so; then what the core has sent has come as well."""
    until = time.monotonic() + WAIT_SECONDS
    while not is_so(client.stats()):
        assert time.monotonic() < until
        time.sleep(0.005)


def outputs_pile_up(kind: str, client: Any, before: int, num_steps: int = 20) -> None:
    """Read nothing until there were more steps than before; the count is from before the adds."""
    if kind != IN_PROCESS:
        settle(client, lambda stats: stats.num_steps >= before + num_steps)


def all_end(kind: str, client: Any) -> None:
    if kind != IN_PROCESS:
        settle(client, lambda stats: stats.num_running + stats.num_waiting == 0)


def is_quiet(client: Any) -> bool:
    """Are there no more outputs of any request?"""
    return not any(batch.request_ids for _ in range(3) for batch in client.step())


def ends_of(client: Any) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Tokens and reasons by request, until nobody is left."""
    tokens, ends = drain(client)
    return tokens, {name: end.reason for name, end in ends.items()}


@pytest.mark.behaviour(106)
@pytest.mark.parametrize("num_steps", [20, 300])  # 300: more than the core may send unread
def test_nothing_follows_the_end_of_an_aborted_request(
    kind: str, opened: Any, num_steps: int
) -> None:
    """What the core had made before comes all the same, in order; then the end, once."""
    client = opened(kind, SLOW if num_steps < 256 else None)
    before = client.stats().num_steps
    client.add_all([make_request(str(i), [i + 1], 400) for i in range(4)])
    outputs_pile_up(kind, client, before, num_steps)
    client.abort(["0", "nobody", "2"])
    client.abort(["0"])
    tokens, reasons = ends_of(client)
    for name, told in tokens.items():
        assert told == expected([int(name) + 1], 400)[: len(told)], name
        assert reasons[name] == ("length" if len(told) == 400 else "abort"), name
    assert len(tokens) == len(reasons) == 4 and len(tokens["1"]) == len(tokens["3"]) == 400
    if num_steps < 256:
        assert reasons["0"] == reasons["2"] == "abort"
    assert is_quiet(client)


@pytest.mark.behaviour(106)
def test_an_id_is_free_again_when_the_end_of_its_abort_was_read(kind: str, opened: Any) -> None:
    client = opened(kind, SLOW)
    for turn in range(3):
        before = client.stats().num_steps
        client.add_all([make_request(name, [turn + 1, len(name)], 400) for name in ("a", "bb")])
        outputs_pile_up(kind, client, before)
        client.abort(["a"])
        tokens: dict[str, list[int]] = {}
        ends: dict[str, Any] = {}
        while "a" not in ends:
            for batch in client.step():
                read(batch, tokens, ends)
        tokens["a"], ends = [], {}
        client.add(make_request("a", [77 + turn], 9))
        while "a" not in ends:
            for batch in client.step():
                read(batch, tokens, ends)
        assert tokens["a"] == expected([77 + turn], 9) and ends["a"].reason == "length"
        assert tokens["bb"] == expected([turn + 1, 2], 400)[: len(tokens["bb"])]
        client.abort(["bb"])
        drain(client)
    assert is_quiet(client) and not client.has_unfinished()


@pytest.mark.behaviour(106)
def test_a_request_that_had_ended_before_the_abort_has_the_end_that_it_had(
    kind: str, opened: Any
) -> None:
    client = opened(kind)
    client.add_all([make_request(name, [1], 3) for name in ("a", "b")])
    all_end(kind, client)
    client.abort(["nobody", "a"])
    _, reasons = ends_of(client)
    assert reasons == {"a": "abort" if kind == IN_PROCESS else "length", "b": "length"}
    client.abort(["a", "b"])
    assert is_quiet(client)


@pytest.mark.behaviour(106)
@pytest.mark.parametrize("what", ["all", "new"])
def test_an_abort_is_reported_in_a_pause(kind: str, opened: Any, what: str) -> None:
    client = opened(kind)
    client.call("pause", what)
    client.add(make_request("a", [1], 3))
    client.abort(["a"])
    assert ends_of(client) == ({"a": []}, {"a": "abort"})
    client.call("resume")


@pytest.mark.behaviour(103)
def test_the_core_refuses_an_id_that_it_has_and_hurts_nobody(kind: str, opened: Any) -> None:
    client = opened(kind, SLOW)
    client.add(make_request("a", [1], 30))
    again = make_request("a", [2], 3)
    with pytest.raises(RequestError, match="'a' is in use"):
        client.add(again)
    three = [again, make_request("b", [3], 30), make_request("b", [4], 3)]
    assert list(client.add_all(three)) == [0, 2]
    assert drain(client)[0] == {"a": expected([1], 30), "b": expected([3], 30)}
    client.add(again)
    assert drain(client)[0] == {"a": expected([2], 3)}


@pytest.mark.behaviour(103)
@pytest.mark.parametrize("how", ["length", "abort"])
def test_an_id_that_is_used_too_soon_mixes_up_nothing(how: str, opened: Any) -> None:
    """Its client gets one request behind the other, each with its end; the core keeps neither."""
    client = opened(REMOTE)
    lengths = {"length": 3, "abort": 400}
    client.call("pause")
    client.add(make_request("a", [1], lengths[how]))
    if how == "abort":
        client.abort(["a"])
    client.call("resume")
    all_end(REMOTE, client)
    is_told = False
    while not is_told:  # the end, by the core
        is_told = not client.add_all([make_request("a", [2], 5)])
    told: list[tuple[list[int], str]] = []
    tokens: list[int] = []
    while client.has_unfinished():
        for batch in client.step():
            tokens += batch.token_ids
            for end in batch.finished:
                told.append((tokens, end.reason))
                tokens = []
    first = ([], "abort") if how == "abort" else (expected([1], 3), "length")
    assert told == [first, (expected([2], 5), "length")]
    counts = client.stats()
    assert (counts.num_running, counts.num_waiting, counts.kv_usage) == (0, 0, 0.0)


@pytest.mark.parametrize("kind", ["remote", "two cores"])
def test_an_interrupted_add_can_be_aborted(kind: str, opened: Any) -> None:
    client = opened(kind, FakeBuild(step_seconds=0.3))
    client.add_all([make_request(f"runs{i}", [1 + i], 3) for i in range(2)])
    time.sleep(0.1)  # the cores are in the middle of a step now and answer later
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            client.add_all([make_request(f"x{i}", [i + 1], 400) for i in range(8)])
    finally:
        signal.signal(signal.SIGALRM, before)
    client.abort([f"x{i}" for i in range(8)])
    tokens, ends = drain(client)
    assert {tuple(tokens[f"runs{i}"]) for i in range(2)} == {
        tuple(expected([1 + i], 3)) for i in range(2)
    }
    assert {end.reason for name, end in ends.items() if name.startswith("x")} <= {"abort"}
    client.add(make_request("x0", [5], 2))  # the ids are free
    assert drain(client)[0] == {"x0": expected([5], 2)}
    counts = client.stats()
    assert (counts.num_running, counts.num_waiting, counts.kv_usage) == (0, 0, 0.0)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("wrong", [5, [5], ["a", None], [["a"]], [b"a"]])
def test_ids_that_are_none_are_refused_at_once_and_hurt_no_other_call(
    kind: str, opened: Any, wrong: Any
) -> None:
    client = opened(kind)
    client.add_all([make_request("a", [1], 40), make_request("b", [2], 40)])
    with pytest.raises(RequestTypeError, match="must be a str or several"):
        client.abort(wrong)
    assert client.stats() is not None
    tokens, reasons = ends_of(client)
    assert tokens == {"a": expected([1], 40), "b": expected([2], 40)}
    assert reasons == {"a": "length", "b": "length"}


def test_one_id_is_taken_whole(kind: str, opened: Any) -> None:
    """A text is a sequence of texts, too."""
    client = opened(kind, SLOW)
    client.add_all([make_request("ab", [1], 400), make_request("a", [2], 5)])
    client.abort("ab")
    assert ends_of(client)[1] == {"ab": "abort", "a": "length"}
