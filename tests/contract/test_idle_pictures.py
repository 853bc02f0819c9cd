"""The cost of waiting for a core that takes pictures, and its wakers: its turns are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from support.core_clients import HostedCore, drain
from support.data_plane import answer
from support.patience import WAIT_SECONDS
from support.seeing_core import SeeingBuild
from support.simulate import make_request
from support.spawned import FakeBuild, fake_config

from engine.ipc.pixel_segments import Segment, share
from engine.messages.media import MediaContent, PixelArray, Pixels
from engine.messages.requests import AddRequest, MediaItem
from engine.rpc.zmq_client import EngineCoreClient

NUM_CALLS = 20
IDLE_SECONDS = 0.01  # enough for a hundred turns of a core that does not sleep
NUM_REQUESTS = 40


def pixels() -> Pixels:
    values = np.ones((2, 3), "<f4")
    return {"pixel_values": PixelArray("<f4", [2, 3], values.tobytes())}


def seeing(name: str, key: str) -> AddRequest:
    """A request with a picture after its first tokens."""
    return make_request(name, [7] * 20, 3, media=[MediaItem(5, 8, key)])


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def turns_of(core: HostedCore, client: EngineCoreClient) -> int:
    """Turns of a core's loop in which it answers ``NUM_CALLS`` calls: one for each, or fewer if
    calls come together. In between it has nothing to do."""
    client.call("echo", 0)  # by now it has read everything else
    time.sleep(IDLE_SECONDS)  # and now it sleeps
    before = core.host.health().num_steps
    for number in range(NUM_CALLS):
        time.sleep(IDLE_SECONDS)
        assert client.call("echo", number) == number
    return core.host.health().num_steps - before


def test_an_idle_core_that_sees_takes_no_more_turns_than_one_that_does_not():
    """Pictures came in shared memory before, late, twice or for no request."""
    turns = []
    for build in (FakeBuild(), SeeingBuild()):
        with HostedCore(build) as core:
            client = EngineCoreClient(core.address)
            segment = share(pixels())
            if isinstance(build, SeeingBuild):
                content = MediaContent("a", pixels(), segment.handle)
                client.bring(["nobody"], content)
                request = seeing("r", "a")
                assert not client.add_all([request])
                for _ in range(2):
                    client.bring(["r"], content)
                tokens, ends = drain(client)
                assert (tokens["r"], ends["r"].reason) == (answer(request), "length")
                client.bring(["r"], content)
                assert client.call("echo", 1) == 1
                assert len(build.store) == 0
            turns.append(turns_of(core, client))
            client.shutdown()
    assert max(turns) < 2 * NUM_CALLS


def test_content_wakes_a_core_that_would_sleep_for_ever():
    """It has no unfinished request, so that nothing else would make it take a turn."""
    with HostedCore(SeeingBuild()) as core:
        client = EngineCoreClient(core.address)
        segment = share(pixels())
        client.call("echo", 0)
        before = core.host.health().num_steps
        client.bring(["gone"], MediaContent("a", pixels(), segment.handle))
        until(lambda: core.host.health().num_steps > before)
        client.shutdown()


def test_the_turn_that_takes_content_computes_the_request_that_awaits_it():
    client = SeeingBuild()(fake_config())
    client.add(seeing("r", "a"))
    client.turn()
    while not client.is_idle:
        client.turn()
    client.bring(["r"], MediaContent("a", pixels()))
    before = client.latest_stats()
    client.turn()
    after = client.latest_stats()
    assert before is not None
    assert after is not None
    assert after.num_scheduled_tokens > before.num_scheduled_tokens
    client.shutdown()


@pytest.mark.parametrize("order", ["abort first", "content first", "no content"])
def test_aborts_and_content_at_once_are_never_lost(order: str) -> None:
    """Content that nobody needs does not keep the core awake either."""
    build = SeeingBuild()
    segments: list[Segment] = []
    with HostedCore(build) as core:
        client = EngineCoreClient(core.address)
        for number in range(NUM_REQUESTS):
            name = str(number)
            segments.append(share(pixels()))
            content = MediaContent(name, pixels(), segments[-1].handle)
            assert not client.add_all([seeing(name, name)])
            if order == "content first":
                client.bring([name], content)
            client.abort([name])
            if order == "abort first":
                client.bring([name], content)
        _, ends = drain(client)
        assert len(ends) == NUM_REQUESTS
        reasons = {end.reason for end in ends.values()}
        assert reasons <= {"abort", "length"}
        assert order == "content first" or reasons == {"abort"}
        assert turns_of(core, client) < 2 * NUM_CALLS
        assert len(build.store) == 0
        client.shutdown()
    for segment in segments:
        segment.close()
