"""The ranks as threads with which other tests run."""

from __future__ import annotations

import pytest
import torch
from support.rank_threads import run_ranks

from engine.errors import RankError
from engine.parallel.collectives import Collectives


def test_ranks_add_and_gather_in_order():
    def work(ranks: Collectives):
        mine = torch.full((2, 3), float(10**ranks.rank), dtype=torch.bfloat16)
        gathered = ranks.all_gather(mine)
        ranks.barrier()
        return ranks.all_reduce(mine), gathered

    for total, gathered in run_ranks(3, work):
        assert torch.equal(total, torch.full((2, 3), 111.0, dtype=torch.bfloat16))
        assert gathered[:, 0, 0].tolist() == [1, 10, 100]


def test_other_calls_of_a_rank_are_found():
    def work(ranks: Collectives):
        return ranks.barrier() if ranks.rank else ranks.all_reduce(torch.zeros(3))

    with pytest.raises(RankError, match="different operations"):
        run_ranks(2, work)


def test_the_error_of_a_rank_ends_the_others():
    def work(ranks: Collectives):
        if ranks.rank == 1:
            raise ValueError("broken")
        ranks.barrier()

    with pytest.raises(ValueError, match="broken"):
        run_ranks(2, work)
