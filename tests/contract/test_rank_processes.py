"""Operations of ranks that are processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from contextlib import ExitStack

from support.patience import WAIT_SECONDS
from support.rank_work import a_rank

from engine.parallel.shared import SharedCollectives, SharedMemory

SIZE = 2


def test_ranks_get_the_same_bits_in_each_run_and_one_that_is_killed_ends_the_others(seed: int):
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        memories = [SharedMemory(SIZE) for _ in range(2)]
        for memory in memories:
            stack.callback(memory.close)
        handles = [memory.handle for memory in memories]
        lines, ranks = [], []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            lines.append(ours)
            arguments = theirs, handles, rank, SIZE, seed, 1000
            ranks.append(context.Process(target=a_rank, args=arguments, daemon=True))
            ranks[-1].start()
            stack.callback(ranks[-1].kill)
        digests = []
        for line in lines:
            assert line.poll(WAIT_SECONDS)
            digests += line.recv()
        assert len(set(digests)) == 1
        watcher = SharedCollectives(handles[0], SIZE - 1, SIZE, num_threads=SIZE)
        lines[-1].send("die")
        ranks[-1].join(WAIT_SECONDS)
        assert ranks[-1].exitcode == -signal.SIGKILL
        watcher.stop()
        assert lines[0].poll(WAIT_SECONDS)
        expected = "the group has stopped: rank 0 waited for rank 1 in all_reduce of 4000 bytes of "
        assert lines[0].recv().startswith(expected)
        ranks[0].join(WAIT_SECONDS)
        assert ranks[0].exitcode == 0
    assert not [name for name in os.listdir("/dev/shm") if "metronome-ranks" in name]
