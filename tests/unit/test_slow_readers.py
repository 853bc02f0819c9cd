"""Connections that nothing leaves, and requests that nobody reads."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("starlette")
from engine.server.readers import MAX_TOTAL_BYTES, MAX_UNREAD_BYTES, SlowReaders


@dataclass(eq=False)
class FakeTransport:
    """With a buffer of any size."""

    size: int = 0
    is_cut: bool = False
    own: socket.socket = field(default_factory=socket.socket)

    def get_write_buffer_size(self) -> int:
        return self.size

    def get_extra_info(self, name: str) -> socket.socket:
        return self.own

    def abort(self) -> None:
        self.is_cut = True
        self.own.close()


@dataclass(eq=False)
class FakeConnection:
    transport: FakeTransport = field(default_factory=FakeTransport)


class FakeEngine:
    """Requests that nobody reads."""

    def __init__(self, unread: dict[str, int]) -> None:
        self.unread = unread
        self.given_up: list[str] = []

    def unread_bytes(self) -> dict[str, int]:
        return self.unread

    def give_up(self, error: Exception, request_ids: list[str]) -> int:
        assert "too slowly" in str(error)
        self.given_up += request_ids
        return len(request_ids)


def readers(connections: list[FakeConnection], **unread: int) -> tuple[SlowReaders, FakeEngine]:
    engine: Any = FakeEngine(unread)
    return SlowReaders(engine, connections, 30.0), engine


def test_a_connection_that_nothing_leaves_is_cut_and_one_that_moves_is_not() -> None:
    stuck, slow, quick = connections = [FakeConnection() for _ in range(3)]
    watch, _ = readers(connections)
    for second in range(60):
        stuck.transport.size = min(1000, 100 * (second + 1))  # it fills, and then stays full
        slow.transport.size = 5000 - 10 * (second // 20)  # something is read every 20 seconds
        quick.transport.size = 100 * (second % 2)
        watch.look(float(second))
        assert stuck.transport.is_cut == (second >= 39)  # 30 behind the last change
        if stuck.transport.is_cut:
            connections[:] = [slow, quick]
            break
    for second in range(40, 60):
        slow.transport.size = 5000 - 10 * (second // 20)
        watch.look(float(second))
    assert not slow.transport.is_cut and not quick.transport.is_cut
    for each in (slow, quick):
        each.transport.own.close()


def test_requests_with_too_much_unread_are_given_up() -> None:
    watch, engine = readers([], few=100, many=MAX_UNREAD_BYTES + 1, enough=MAX_UNREAD_BYTES)
    watch.look(0.0)
    assert engine.given_up == ["many"]


def test_all_together_is_bounded_too_the_slowest_go_first() -> None:
    size = MAX_UNREAD_BYTES
    num = MAX_TOTAL_BYTES // size
    watch, engine = readers([], **{f"r{i}": size - i for i in range(num + 3)})
    watch.look(0.0)
    assert engine.given_up == [f"r{i}" for i in range(len(engine.given_up))]
    left = sum(s for n, s in engine.unread.items() if n not in engine.given_up)
    assert MAX_TOTAL_BYTES - size < left <= MAX_TOTAL_BYTES
