"""Operations of ranks in shared memory, with ranks as threads."""

from __future__ import annotations

import threading

import pytest
import torch
from support.rank_threads import run_all, shared_ranks
from support.rank_work import random_operations

from engine.errors import RankError
from engine.parallel.collectives import Collectives
from kernels.cpu.recording import Launches


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_random_operations_are_exact_and_repeat(size: int, seed: int):
    runs = [
        run_all(shared_ranks(size), lambda ranks: random_operations(ranks, seed, 150))
        for _ in range(2)
    ]
    if size == 1:
        return
    reduced = {digest for run in runs for digest in run}
    assert len(reduced) == 1


def test_recorded_operations_can_be_repeated(seed: int):
    def work(ranks: Collectives):
        x = torch.empty(1000)

        def step():
            ranks.all_reduce(x)
            return ranks.all_gather(x[:3])

        gathered, launches = Launches.of(lambda: step())
        for number in range(50):
            x.fill_(float(number + ranks.rank))
            if number % 7 == 3:
                ranks.barrier()  # recordings hold no numbers
            launches.repeat()
            ranks.check()
            assert x[0] == x[-1] == 3 * number + 3
            assert torch.equal(gathered, x[:3].expand(3, 3))
        return x[0]

    assert run_all(shared_ranks(3), work) == [3 * 49 + 3] * 3


def test_ranks_that_compute_different_things_are_named():
    def work(ranks: Collectives):
        ranks.barrier()
        if ranks.rank == 2:
            return ranks.all_gather(torch.zeros(7, dtype=torch.int64))
        return ranks.all_reduce(torch.zeros(5, dtype=torch.bfloat16))

    with pytest.raises(RankError) as caught:
        run_all(shared_ranks(3), work)
    assert str(caught.value) == (
        "rank 0 computes all_reduce of 10 bytes of bfloat16, but rank 2 computes all_gather of 56 "
        "bytes (meeting 2): all ranks must do the same"
    )


def test_a_rank_that_does_not_answer_is_named():
    with pytest.raises(RankError, match=r"^rank 1 has not answered for 0\.1 s: rank 0 waited .*"):
        shared_ranks(2, wait_seconds=0.1)[0].barrier()


def test_a_group_that_is_stopped_leaves_its_operations():
    group = shared_ranks(2)
    timer = threading.Timer(0.1, group[1].stop)
    timer.start()
    with pytest.raises(RankError, match=r"^the group has stopped: rank 0 waited for rank 1 in all"):
        group[0].all_gather(torch.zeros(1))
    with pytest.raises(RankError, match=r"^the group has stopped"):
        group[0].all_reduce(torch.zeros(1))
    timer.join()
