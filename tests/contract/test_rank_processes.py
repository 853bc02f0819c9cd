"""Operations of ranks that are processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
from support.patience import WAIT_SECONDS
from support.rank_work import a_rank, a_torch_rank

from engine.parallel.shared import SharedCollectives, SharedMemory

SIZE = 2
NUM = 200
HOST = "127.0.0.1"


class Ranks:
    """Processes, and the line of each."""

    def __init__(self, stack: ExitStack) -> None:
        self.lines: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._stack = stack

    def start(self, target: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        rank = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        rank.start()
        theirs.close()
        self._stack.callback(rank.kill)
        self.processes.append(rank)
        self.lines.append(ours)

    def message(self, rank: int) -> Any:
        assert self.lines[rank].poll(WAIT_SECONDS)
        return self.lines[rank].recv()

    def kill_last(self) -> None:
        self.lines[-1].send("die")
        self.processes[-1].join(WAIT_SECONDS)
        assert self.processes[-1].exitcode == -signal.SIGKILL


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("num", (NUM, pytest.param(50 * NUM, marks=pytest.mark.slow)))
def test_ranks_get_the_same_bits_in_each_run_and_a_killed_one_ends_the_others(
    stack: ExitStack, num: int, seed: int
):
    ranks = Ranks(stack)
    memories = [SharedMemory(SIZE) for _ in range(2)]
    for memory in memories:
        stack.callback(memory.close)
    handles = [memory.handle for memory in memories]
    for rank in range(SIZE):
        ranks.start(a_rank, handles, rank, SIZE, seed, num)
    digests = [digest for rank in range(SIZE) for digest in ranks.message(rank)]
    assert len(set(digests)) == 1
    watcher = SharedCollectives(handles[0], SIZE - 1, SIZE, num_threads=SIZE)
    ranks.kill_last()
    watcher.stop()
    expected = "the group has stopped: rank 0 waited for rank 1 in all_reduce of 4000 bytes of "
    assert ranks.message(0).startswith(expected)
    ranks.processes[0].join(WAIT_SECONDS)
    assert ranks.processes[0].exitcode == 0
    assert not [name for name in os.listdir("/dev/shm") if "metronome-ranks" in name]


def test_torch_ranks_get_the_same_bits_and_a_killed_one_ends_the_others(
    stack: ExitStack, seed: int
):
    ranks = Ranks(stack)
    ranks.start(a_torch_rank, HOST, 0, 0, SIZE, seed, NUM)
    port = ranks.message(0)
    ranks.start(a_torch_rank, HOST, port, 1, SIZE, seed, NUM)
    digests = [digest for rank in range(SIZE) for digest in ranks.message(rank)]
    assert len(set(digests)) == 1
    ranks.kill_last()
    assert ranks.message(0).startswith("rank 0 failed in all_reduce: ")
    ranks.processes[0].join(WAIT_SECONDS)
