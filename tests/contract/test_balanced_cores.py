"""Front ends over the same cores: they know what each core has cached and how busy it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support.core_clients import HostedCore, drain
from support.patience import WAIT_SECONDS
from support.simulate import make_request
from support.spawned import FakeBuild, fake_config

from engine.core.inproc_client import InprocClient
from engine.errors import RequestError
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.wire import CacheNews, Follow, ToClient
from engine.rpc.client_protocol import ClientProtocol
from engine.rpc.launch import open_core
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.zmq_client import STEP_SECONDS, EngineCoreClient

pytestmark = pytest.mark.usefixtures("place")
PROMPT = list(range(1, 200))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def hosted(stack: ExitStack, num: int, **build: Any) -> list[HostedCore]:
    return [stack.enter_context(HostedCore(FakeBuild(**build))) for _ in range(num)]


def front_end(stack: ExitStack, cores: list[HostedCore]) -> ManyCoresClient:
    addresses = ", ".join(core.address.data for core in cores)
    client = open_core(fake_config(core_address=addresses))
    assert isinstance(client, ManyCoresClient)
    stack.callback(client.shutdown)
    return client


def steps_of(core: HostedCore) -> int:
    """Tokens that a core has computed."""
    one = EngineCoreClient(core.address)
    stats = one.stats()
    one.shutdown()
    assert stats is not None
    return stats.num_scheduled_tokens


def test_what_one_front_end_left_is_found_by_another(stack: ExitStack) -> None:
    cores = hosted(stack, 3)
    one, other = front_end(stack, cores), front_end(stack, cores)
    one.add_all([make_request(f"{one.id_prefix}{i}", [i] * 40, 2) for i in range(300, 302)])
    one.add_all([make_request(f"{one.id_prefix}a", PROMPT, 2)])  # to the third
    drain(one)
    tokens = [steps_of(core) for core in cores]
    assert tokens[2] > 190 > max(tokens[:2])
    for i in range(3):  # a late one, too
        client = front_end(stack, cores) if i == 2 else other
        for _ in range(2):
            client.stats()  # answered after what was reported before
        client.add_all([make_request(f"{client.id_prefix}{i}", [*PROMPT, i], 2)])
        drain(client)
        assert [steps_of(core) for core in cores[:2]] == tokens[:2]


def test_a_step_that_is_woken_before_it_begins_does_not_wait(stack: ExitStack) -> None:
    """Something came while the front end was doing other things; the best of several."""
    client = front_end(stack, hosted(stack, 2))
    client.step()
    seconds = []
    for _ in range(5):
        client.wake()
        began = time.monotonic()
        assert client.step() == []
        seconds.append(time.monotonic() - began)
    assert min(seconds) < STEP_SECONDS / 2


def test_one_front_end_sees_the_load_of_another(stack: ExitStack) -> None:
    cores = hosted(stack, 2, step_seconds=0.005)
    one, other = front_end(stack, cores), front_end(stack, cores)
    one.add_all([make_request(f"{one.id_prefix}a", [7] * 400, 100)])
    until = time.monotonic() + WAIT_SECONDS
    while other.loads[0] == 0:
        assert time.monotonic() < until, "the load was not reported"
        other.step()
    other.add_all([make_request(f"{other.id_prefix}{i}", [i + 1] * 9, 2) for i in range(3)])
    drain(other)
    assert steps_of(cores[1]) == 3 * 10
    drain(one)
    while other.loads != [0, 0]:
        assert time.monotonic() < until, "the end was not reported"
        other.step()


def test_no_stream_waits_for_the_step_of_a_core_that_is_watched(stack: ExitStack) -> None:
    """One core's step ends when a request of the other has ended, and another core dies."""
    cores = hosted(stack, 3)
    client = front_end(stack, cores)
    ids = [f"{client.id_prefix}{i}" for i in range(3)]
    goes_on = threading.Event()
    cores[0].inproc.turn = held(cores[0].inproc, goes_on)  # type: ignore[method-assign]
    client.add_all([make_request(name, [i] * 40, 40) for i, name in enumerate(ids)])
    take = client.begin_each("watch", {}, 10, [])
    ended: set[str] = set()
    until = time.monotonic() + WAIT_SECONDS
    while len(ended) < 2:
        assert time.monotonic() < until and take() is None
        for batch in client.step():
            ended |= {batch.request_ids[end.index] for end in batch.finished}
    assert ended == {ids[1], ids[2]}
    cores[1].close()
    goes_on.set()
    while (found := take()) is None:
        assert time.monotonic() < until, "a core does not answer"
    assert found.keys() in ({0, 2}, {0, 1, 2})
    drain(client)


@pytest.mark.parametrize("num_cores", [1, 2])
def test_a_token_that_is_none_is_refused_alone(stack: ExitStack, num_cores: int) -> None:
    addresses = ", ".join(core.address.data for core in hosted(stack, num_cores))
    client = open_core(fake_config(core_address=addresses))
    stack.callback(client.shutdown)
    wrong = [make_request(f"{client.id_prefix}{token}", [token], 2) for token in (2**40, -1)]
    errors = client.add_all([make_request(f"{client.id_prefix}a", PROMPT, 2), *wrong])
    assert [type(errors[place]) for place in sorted(errors)] == [RequestError] * 2
    assert drain(client)[1].keys() == {f"{client.id_prefix}a"}


def held(core: InprocClient, goes_on: threading.Event) -> Callable[[], Any]:
    """A turn of the core that waits, once it has a request."""
    turn = core.turn

    def turns() -> Any:
        assert not core.has_unfinished() or goes_on.wait(WAIT_SECONDS)
        return turn()

    return turns


def test_a_missed_report_is_made_up_for() -> None:
    """A core whose messages have a gap sends a client the whole cache again."""
    protocol, encode = ClientProtocol(), MessageEncoder().encode
    seen: list[CacheNews] = []
    protocol.on_news = seen.append
    assert MessageDecoder(Follow).decode([protocol.follow()]) == Follow()

    def come(*news: CacheNews) -> list[CacheNews]:
        before = len(seen)
        for each in news:
            protocol.feed([encode(each)])
        return seen[before:]

    whole, first = CacheNews(0, True, bytes(8), b"", 0), CacheNews(1, False, b"", b"", 5)
    assert come(first) == [] and not protocol.has_gap  # no second request for it
    assert come(whole, first) == [whole, first]
    third = replace_sequence(first, 3)
    assert come(third) == [] and protocol.has_gap
    protocol.follow()
    assert come(replace_sequence(first, 4)) == [] and not protocol.has_gap
    assert come(whole, first) == [whole, first]
    assert isinstance(whole, ToClient)


def replace_sequence(news: CacheNews, sequence: int) -> CacheNews:
    return CacheNews(sequence, news.is_whole, news.stored, news.removed, news.load)
