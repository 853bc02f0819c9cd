"""A listener of cache events that misses none: what a router does with them."""

from __future__ import annotations

import msgspec
import zmq

from engine.core.kv_publisher import END, from_bytes, replay_endpoint, to_bytes
from engine.messages.kv_events import KVEventBatch


class KVEventSubscriber:
    """Reads all batches of a publisher in order; asks for those that it missed.

    ``num_lost`` counts batches that the publisher no longer had: what was built from the events
    must then be thrown away.
    """

    def __init__(self, endpoint: str, topic: str = "", replay: str | None = None) -> None:
        self.num_lost = 0
        self._next = 0  # sequence number of the next batch
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay or replay_endpoint(endpoint))

    def read(self, timeout: float) -> list[KVEventBatch]:
        """The next batches; [] if none came within ``timeout`` seconds."""
        if not self._live.poll(round(1000 * timeout)):
            return []
        _, sequence, payload = self._live.recv_multipart()
        first = from_bytes(sequence)
        missed = self.catch_up(timeout) if first > self._next else []
        return missed + self._take(first, payload)

    def catch_up(self, timeout: float) -> list[KVEventBatch]:
        """Ask for all batches so far that were not read.

        Raises ``TimeoutError`` if the publisher does not answer within ``timeout`` seconds.
        """
        batches: list[KVEventBatch] = []
        while page := self._ask(timeout):
            batches += page
        return batches

    def close(self) -> None:
        """Close the sockets; harmless when repeated."""
        self._context.destroy(linger=0)

    def _ask(self, timeout: float) -> list[KVEventBatch]:
        self._replay.send_multipart([b"", to_bytes(self._next)])
        batches: list[KVEventBatch] = []
        while self._replay.poll(round(1000 * timeout)):
            _, _, sequence, payload = self._replay.recv_multipart()
            if from_bytes(sequence) == END:
                return batches
            batches += self._take(from_bytes(sequence), payload)
        raise TimeoutError(f"no answer about past cache events within {timeout} s")

    def _take(self, sequence: int, payload: bytes) -> list[KVEventBatch]:
        if sequence < self._next:  # it was among the past batches already
            return []
        self.num_lost += sequence - self._next
        self._next = sequence + 1
        return [self._decoder.decode(payload)]
