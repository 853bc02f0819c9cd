"""A client's side of the conversation alone: what it counts, and what it asks again."""

from __future__ import annotations

import msgspec
import pytest
from support.wire_frames import TO_CLIENT
from support.wire_samples import frames_of

from engine.errors import WireError
from engine.ipc.codec import MAX_MESSAGE_BYTES
from engine.messages.media import MediaContent, PixelArray, SharedPixels
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest, CoreOutputs, Finished
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Answer, Bring, Failure, Outputs, Refusal, Submitted
from engine.rpc.client_protocol import ClientProtocol, refused


def request(name: str, length: int = 4) -> AddRequest:
    return AddRequest(name, [1], SamplingParams(), 1, 0.0, length)


def read(link: ClientProtocol) -> list[CoreOutputs]:
    return link.take_batches(lambda frame: None)


def test_unfinished_are_those_that_were_taken_until_their_end_is_read() -> None:
    link = ClientProtocol()
    (part,), errors = link.submit([request(name) for name in "abc"])
    assert not errors
    full = Refusal(1, Failure("RefusedError", "full"))
    reply = link.feed(frames_of([Submitted(part.number, 0.0, [full])]))
    assert reply is not None and str(refused(part, reply)[1]) == "full"
    assert link.num_unfinished == 2
    link.abort(["a"])
    ends = [Finished(0, "length"), Finished(1, "abort")]
    link.feed(frames_of([Outputs(CoreOutputs(["c", "a"], [5], [1, 0], 0.0, finished=ends))]))
    assert link.num_unfinished == 2
    assert [batch.request_ids for batch in read(link)] == [["c", "a"]]
    assert link.num_unfinished == 0


def test_what_was_never_sent_is_not_waited_for() -> None:
    """The answer to a later call shows that an interrupt came before the first was sent."""
    link = ClientProtocol()
    link.submit([request("a")])
    (later,), _ = link.submit([request("a")])
    link.feed(frames_of([Submitted(later.number, 0.0, [])]))
    assert link.num_unfinished == 1
    with pytest.raises(WireError, match=r"answered message 0, which was not sent"):
        link.feed(frames_of([Submitted(0, 0.0, [])]))


def test_a_request_that_cannot_travel_fails_alone() -> None:
    link = ClientProtocol()
    odd = msgspec.structs.replace(request("b"), hints={"handle": object()})
    parts, errors = link.submit([request("a"), odd, request("c")])
    assert [part.places for part in parts] == [[0], [2]] and list(errors) == [1]
    for part in parts:
        link.feed(frames_of([Submitted(part.number, 0.0, [])]))
    assert link.num_unfinished == 2


def test_statistics_are_asked_for_once_at_a_time_and_kept() -> None:
    link = ClientProtocol()
    stats = SchedulerStats(*range(10))
    assert link.request_stats() is not None and link.request_stats() is None and link.stats is None
    link.feed(frames_of([Answer(0, stats)]))
    assert link.stats == stats and link.request_stats() is not None
    link.feed(frames_of([Answer(1, failure=Failure("EngineError", "it fell over"))]))
    assert link.stats == stats and link.request_stats() is not None
    link.feed(frames_of([Answer(2, ["rubbish"])]))
    assert link.stats == stats and link.request_stats() is not None


def test_statistics_are_requested_again_if_the_request_was_never_sent() -> None:
    """The answer to a later call shows that an interrupt came before the first was sent."""
    link = ClientProtocol()
    assert link.request_stats() is not None
    number, _ = link.call("echo", (None,))
    link.feed(frames_of([Answer(number)]))
    assert link.request_stats() is not None
    (part,), _ = link.submit([request("a")])
    link.feed(frames_of([Submitted(part.number, 0.0, [])]))
    assert link.request_stats() is not None and link.request_stats() is None


@pytest.mark.parametrize(("namespace", "is_shared"), [("here", True), ("elsewhere", False)])
def test_pixels_are_sent_to_cores_that_cannot_read_their_handle(
    namespace: str, is_shared: bool
) -> None:
    link = ClientProtocol()
    link.welcome = msgspec.structs.replace(TO_CLIENT["welcome"], namespace=namespace)
    pixels = {"pixel_values": PixelArray("|u1", [4], b"1234")}
    handle = SharedPixels("here", 1, 2, 3, 64, {})
    sent = decoded(link.bring(["a"], MediaContent("key", pixels, handle)))
    assert sent.request_ids == ["a"] and sent.content.key == "key"
    assert sent.content.shared == (handle if is_shared else None)
    assert bool(sent.content.pixels) != is_shared


def test_pixels_that_are_too_large_for_a_message_are_an_error_of_their_requests() -> None:
    data = PixelArray("|u1", [MAX_MESSAGE_BYTES], bytes(MAX_MESSAGE_BYTES))
    sent = decoded(ClientProtocol().bring(["a"], MediaContent("key", {"pixel_values": data})))
    assert sent.request_ids == ["a"] and sent.content.pixels is None
    assert "the limit is" in sent.content.error and "shrink the picture" in sent.content.error


def decoded(frame: bytes) -> Bring:
    return msgspec.msgpack.decode(frame, type=Bring)
