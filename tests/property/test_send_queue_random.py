"""What waits for a client that reads when it likes, at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest
from support.fake_router import Router, with_requests

from engine.messages.pooling import PooledColumns
from engine.messages.requests import CoreOutputs, Finished
from engine.rpc.sessions import FRAME_BYTES, ClientSessions, SendQueue

VECTOR = 1000  # counts as this many tokens


class Life:
    """A client that reads when it likes, and what it makes of what it is sent."""

    def __init__(self, router: Router, dice: random.Random) -> None:
        self.peers = ClientSessions(router, lambda ids: None, max_backlog_bytes=20 * FRAME_BYTES)
        self.peer = with_requests(self.peers, b"a")
        self.ends: dict[str, str] = {}
        """What it was told, by request."""
        self.num_made: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        self._num_read: dict[str, int] = {}
        self._router = router
        self._dice = dice

    def act(self) -> None:
        self._router.full = {b"a"} if self._dice.random() < 0.2 else set()
        self._dice.choice([self.step, self.step, self.step, self.submit, self.abort, self.read])()

    def submit(self) -> None:
        name = f"r{len(self.num_made)}"
        self.peer.live[name] = ()
        self.num_made[name] = 0

    def step(self) -> None:
        rows = [name for name in self.peer.live if self._dice.random() < 0.7]
        counts = [self._dice.randint(0, 2) for _ in rows]
        ends = [Finished(row, "length") for row in range(len(rows)) if self._dice.random() < 0.15]
        pooled = [end.index for end in ends if self._dice.random() < 0.5]
        self._publish(rows, counts, ends, pooled)

    def abort(self) -> None:
        """The core ends these, and says so in outputs."""
        names = [name for name in self.peer.live if self._dice.random() < 0.2]
        ends = [Finished(row, "abort") for row in range(len(names))]
        self._publish(names, [0] * len(names), ends)

    def read(self) -> None:
        self._read_sent()
        self.peers.grant(self.peer, self._dice.randint(1, 3))

    def finish(self) -> None:
        self._router.full.clear()
        rows = list(self.peer.live)
        self._publish(rows, [0] * len(rows), [Finished(row, "stop") for row in range(len(rows))])
        while len(self.peer.queue) or self._router.sent:
            self.read()

    def check_ends(self) -> None:
        assert self.ends.keys() == self.num_made.keys() and not self.peer.live
        for name, reason in self.ends.items():
            assert reason in ("abort", self._reasons.get(name)), name
            if reason != "abort":
                assert self._num_read[name] == self.num_made[name], f"{name} lost tokens unsaid"

    def _publish(
        self, rows: list[str], counts: list[int], ends: list[Finished], pooled: Sequence[int] = ()
    ) -> None:
        for name, count in zip(rows, counts, strict=True):
            self.num_made[name] += count
        for row in pooled:
            self.num_made[rows[row]] += VECTOR
        self._reasons.update((rows[end.index], end.reason) for end in ends)
        if rows:
            tokens = [1] * sum(counts)
            ones = [1] * len(pooled)
            vectors = (
                PooledColumns([*pooled], ones, ones, bytes(4 * len(pooled))) if pooled else None
            )
            self.peers.publish(
                0, CoreOutputs(rows, tokens, counts, 0.0, finished=ends, pooled=vectors)
            )

    def _read_sent(self) -> None:
        for each in self._router.batches():
            self._take(each)
        self._router.sent.clear()

    def _take(self, sent: CoreOutputs) -> None:
        counts = sent.counts or [1] * len(sent.request_ids)
        assert len(set(sent.request_ids)) == len(counts) and sum(counts) == len(sent.token_ids)
        for name, count in zip(sent.request_ids, counts, strict=True):
            assert name not in self.ends, f"{name}: rows behind its end"
            self._num_read[name] = self._num_read.get(name, 0) + count
        for row in () if sent.pooled is None else sent.pooled.rows:
            self._num_read[sent.request_ids[row]] += VECTOR
        self.ends.update((sent.request_ids[end.index], end.reason) for end in sent.finished)


@pytest.mark.parametrize("turn", range(20))
def test_each_request_ends_once_whatever_is_read_when(turn: int, seed: int) -> None:
    """Steps, credits, full queues and aborts; only who was aborted may lack tokens."""
    dice = random.Random(seed + turn)
    life = Life(Router(), dice)
    outbox = life.peer.queue
    for now in range(300):
        life.act()
        life.peers.tend(float(now))
        outbox.credits = min(outbox.credits, dice.randint(0, 5))
    life.finish()
    life.check_ends()
    assert outbox.num_bytes == 0 and not len(outbox)


def test_what_waits_is_counted_and_leaves_in_order(seed: int) -> None:
    """Answers among themselves, and batches among themselves; each once, or dropped."""
    dice = random.Random(seed)
    answers: deque[bytes] = deque()  # given, and not sent yet
    batches: deque[bytes] = deque()
    has_room = True

    def send(frame: bytes) -> bool:
        if has_room:
            kind = answers if frame.startswith(b"answer") else batches
            assert kind.popleft() == frame
        return has_room

    queue = SendQueue(send, num_credits=4)
    for number in range(2000):
        has_room = dice.random() < 0.6
        match dice.choice(["answer", "publish", "publish", "grant", "flush", "give up"]):
            case "answer":
                answers.append(b"answer %d " % number + b"x" * dice.randint(0, 99))
                queue.answer(answers[-1])
            case "publish":
                batches.append(b"%d " % number + b"x" * dice.randint(0, 99))
                queue.publish(batches[-1], CoreOutputs(["a"], [1], None, 0.0))
            case "grant":
                queue.grant(dice.randint(1, 3))
            case "flush":
                queue.flush()
            case "give up" if dice.random() < 0.1:
                queue.give_up("it does not read")
                batches.clear()
        assert len(queue) == len(answers) + len(batches) and 0 <= queue.credits <= 4
        waiting = [*answers, *batches]
        assert queue.num_bytes == sum(len(frame) + FRAME_BYTES for frame in waiting)
