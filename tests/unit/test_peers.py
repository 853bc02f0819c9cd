"""What a core keeps of its clients, without sockets."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import zmq

from engine.core.peers import NUM_CREDITS, Peer, Peers
from engine.ipc.codec import Decoder
from engine.messages.outputs import CoreOutputs, Finished, TokenLogprobs
from engine.messages.wire import Outputs, ToClient


class Router:
    """Takes what is sent; clients in ``gone`` cannot be reached, those in ``full`` do not read."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, Any]] = []
        self.gone: set[bytes] = set()
        self.full: set[bytes] = set()
        self._decoder: Decoder[Any] = Decoder(ToClient)

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        assert flags == zmq.NOBLOCK
        if frames[0] in self.gone:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        if frames[0] in self.full:
            raise zmq.Again
        self.sent.append((frames[0], self._decoder.decode(frames[1:])))


@pytest.fixture
def router() -> Router:
    return Router()


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def peers(router: Router, ended: list[str]) -> Peers:
    return Peers(router, ended.extend, max_backlog_bytes=1000)


def with_requests(peers: Peers, identity: bytes, *names: str) -> Peer:
    peer = peers.welcome(identity, identity.decode())
    peer.live.update(dict.fromkeys(names, ()))
    return peer


def batch(*names: str, **details: Any) -> CoreOutputs:
    return CoreOutputs(list(names), [1] * len(names), None, 0.0, **details)


@pytest.mark.parametrize("trouble", ["gone", "full"])
def test_who_cannot_be_sent_anything_has_left(
    trouble: str, peers: Peers, router: Router, ended: list[str]
) -> None:
    with_requests(peers, b"a", "x", "y")
    other = with_requests(peers, b"b", "z")
    getattr(router, trouble).add(b"a")
    peers.publish(0, batch("x", "y"))
    assert ended == ["x", "y"] and len(peers) == 1 and peers.get(b"b") is other
    peers.publish(0, batch("x"))  # of a step that was under way: nobody is there
    assert not any(isinstance(message, Outputs) for _, message in router.sent)


def test_a_newcomer_makes_the_vanished_be_forgotten(
    peers: Peers, router: Router, ended: list[str]
) -> None:
    with_requests(peers, b"a", "x")
    router.gone.add(b"a")
    with_requests(peers, b"b")
    assert ended == ["x"] and [peer.index for peer in peers] == [1]


def test_credits_are_spent_returned_and_never_more_than_there_were(
    peers: Peers, router: Router
) -> None:
    peer = with_requests(peers, b"a", "x")
    peer.credits = 2
    for _ in range(5):
        peers.publish(0, batch("x"))
    assert len(router.sent) == 2 and len(peer.backlog) == 3 and peers.has_backlog()
    peers.grant(peer, 2)
    assert len(router.sent) == 4 and peer.credits == 0
    peers.grant(peer, 10**9)
    assert len(router.sent) == 5 and peer.credits == NUM_CREDITS - 1
    assert peer.backlog_bytes == 0 and not peers.has_backlog()


def test_an_end_is_forgotten_also_when_it_waits_for_a_credit(peers: Peers) -> None:
    peer = with_requests(peers, b"a", "x", "y")
    peer.credits = 0
    peers.publish(0, batch("x", "y", finished=[Finished(1, "length")]))
    assert list(peer.live) == ["x"]


def test_outputs_too_large_to_travel_fail_who_wanted_them_alone(
    peers: Peers,
    router: Router,
    ended: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("engine.ipc.codec.MAX_MESSAGE_BYTES", 2000)
    peer = with_requests(peers, b"a", "small", "large", "done")
    large = TokenLogprobs(list(range(500)), [-1.0] * 500, 1)
    with caplog.at_level(logging.WARNING):
        peers.publish(
            0,
            batch(
                "small", "large", "done", finished=[Finished(2, "length")], logprobs={1: [large]}
            ),
        )
    ((_, outputs),) = router.sent
    assert isinstance(outputs, Outputs) and outputs.batch.token_ids == [1, 1, 1]
    reasons = {outputs.batch.request_ids[e.index]: e.reason for e in outputs.batch.finished}
    assert reasons == {"done": "length", "large": "error"}
    assert "the limit is 2000" in outputs.batch.finished[-1].message
    assert ended == ["large"] and list(peer.live) == ["small"]


def test_a_name_is_shown_on_one_line(peers: Peers) -> None:
    peer = peers.welcome(b"a", "evil\nCRITICAL: \x1b[31m" + "x" * 500)
    assert str(peer) == "client 0 (evil?CRITICAL: ?[31m" + "x" * 60 + ")"
    assert str(peers.welcome(b"b", "")) == "client 1"
