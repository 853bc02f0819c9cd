"""Requests that nobody should send, each among 64 healthy ones, who must not notice."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from support.live_core import BLOCK_SIZE, VOCAB_SIZE, SizedBuild, is_running, pid_of, start
from support.patience import WAIT_SECONDS
from support.poison import FAILING, POISON, Poison
from support.streams import Streams

from engine.core.engine_core import Executor
from engine.ipc import sockets
from engine.ipc.address import Address
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.step import NewSeq
from engine.messages.wire import (
    PROTOCOL_VERSION,
    Fault,
    Hello,
    Outputs,
    Submitted,
    ToClient,
    Welcome,
)
from policylab.verify.fake import DigestWorker

NUM_BLOCKS = 1200
NUM_HEALTHY = 64


@dataclass(frozen=True)
class FailingWorker:
    """Makes a worker in which rows fail that have come to a certain token."""

    def __call__(self) -> Executor:
        return DigestWorker(NUM_BLOCKS, BLOCK_SIZE, vocab_size=VOCAB_SIZE, fail=why)


def why(seq: NewSeq, upto: int) -> str | None:
    return "poisoned" if FAILING in seq.token_ids[:upto] and "poison" in seq.request_id else None


class Poisoner:
    """A client that sends plain values, whatever they are, and notes what becomes of each."""

    def __init__(self, address: Address) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = sockets.dealer(self._context, None)
        self._socket.connect(address.data)
        self._decoder: MessageDecoder[Any] = MessageDecoder(ToClient)
        self._socket.send(MessageEncoder().encode(Hello(PROTOCOL_VERSION, address.token)))
        assert isinstance(self._next(WAIT_SECONDS), Welcome)

    def send(self, poison: Poison) -> None:
        request = poison.request("poison", time.monotonic())
        self._socket.send(msgspec.msgpack.encode(["submit", 1, [request]]))

    def became(self) -> str | None:
        """The outcome of the last one that was sent; ``None`` if it is not known yet."""
        match self._next(0.0):
            case Fault():
                return "fault"
            case Submitted(refusals=[_, *_]):
                return "refused"
            case Outputs(batch=batch) if batch.finished:
                return "error" if batch.finished[0].reason == "error" else "ends"
        return None

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _next(self, seconds: float) -> Any:
        if not self._socket.poll(1000 * seconds):
            return None
        return self._decoder.decode(self._socket.recv_multipart())


def test_poison_hurts_nobody_else(seed: int) -> None:
    owner = start(SizedBuild(num_blocks=NUM_BLOCKS, num_seats=70, worker=FailingWorker()))
    streams = Streams(owner, NUM_HEALTHY, random.Random(seed))
    poisoner = Poisoner(owner.address)
    wrong = []
    for poison in POISON:
        poisoner.send(poison)
        became = became_of(poisoner, streams)
        if became != poison.becomes:
            wrong.append(f"{poison.name}: {became}, not {poison.becomes}")
    streams.finish()
    poisoner.close()
    stats = owner.stats()
    assert stats is not None and (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0)
    assert is_running(pid_of(owner))
    owner.shutdown()
    assert len(POISON) >= 60
    assert not wrong, "; ".join(wrong)


def became_of(poisoner: Poisoner, streams: Streams) -> str | None:
    until = time.monotonic() + WAIT_SECONDS
    streams.turn()
    while (became := poisoner.became()) is None and time.monotonic() < until:
        streams.turn()
    return became
