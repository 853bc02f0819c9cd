"""Ranks as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from engine.errors import RankError
from engine.parallel.collectives import Collectives
from engine.parallel.shared import SharedCollectives
from kernels.cpu.collectives import shared_bytes
from support.patience import WAIT_SECONDS

T = TypeVar("T")


class Abandoned(RankError):
    """Another rank has failed."""


class _Meeting:
    """Where the ranks exchange their tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=WAIT_SECONDS)
        self.given: list[tuple[str, Any, torch.Tensor]] = [("", None, torch.empty(0))] * size


class ThreadCollectives:
    """``Collectives`` of a rank that is a thread. ``names``: the operations called so far."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.names: list[str] = []
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x, dtype=torch.float32)
        for part in self._exchange("all_reduce", x):
            total += part
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("all_gather", x))

    def barrier(self) -> None:
        self._exchange("barrier", torch.empty(0))

    def check(self) -> None:
        pass

    def _exchange(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        assert x.is_contiguous(), (name, x.shape, x.stride())
        self.names.append(name)
        meeting = self._meeting
        meeting.given[self.rank] = name, (x.dtype, x.shape), x.clone()
        try:
            meeting.barrier.wait()
            given = list(meeting.given)
            meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise Abandoned(f"rank {self.rank} waits in {name}: the group has stopped") from None
        calls = [one[:2] for one in given]
        if any(call != calls[0] for call in calls):
            raise RankError(f"ranks call different operations: {calls}")
        return [part for _, _, part in given]


def run_ranks(size: int, work: Callable[[Collectives], T]) -> list[T]:
    """Call ``work`` in a thread for each rank. Returns the results in order of ranks.

    Raises the error of the lowest rank that failed by itself."""
    meeting = _Meeting(size)
    return run_all([ThreadCollectives(meeting, rank, size) for rank in range(size)], work, meeting)


def run_all(
    ranks: Sequence[Collectives], work: Callable[[Collectives], T], meeting: _Meeting | None = None
) -> list[T]:
    """Call ``work`` with each of ``ranks`` in a thread of its own. Returns the results."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(one: Collectives) -> None:
        try:
            results[one.rank] = work(one)
        except BaseException as error:
            errors[one.rank] = error
            if meeting is not None:
                meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS * 2)
        assert not thread.is_alive(), f"{len(results)} of {len(ranks)} ranks have ended"
    first = sorted(errors, key=lambda rank: (isinstance(errors[rank], Abandoned), rank))
    if first:
        raise errors[first[0]]
    return [results[rank] for rank in range(len(ranks))]


def shared_ranks(size: int, wait_seconds: float = 100.0) -> list[SharedCollectives]:
    """Ranks in shared memory, for threads; their operations can be recorded."""
    memory = np.zeros(shared_bytes(size), np.uint8)
    return [
        SharedCollectives(memory, rank, size, num_threads=size, wait_seconds=wait_seconds)
        for rank in range(size)
    ]
