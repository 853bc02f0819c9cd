"""What a rank may be, whenever it is given; and a queue that keeps to the ranks it was given."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from support.simulate import make_request, make_run

from engine.sched.plugins.ranks import Last, RankCheck
from engine.sched.policies.fcfs import FCFS
from engine.sched.request import Request
from engine.sched.roster import RankedQueue
from engine.sched.table import Table
from policylab.verify.invariants import find_leak

NAN = math.nan


@pytest.mark.parametrize(
    "rank",
    [(), (1,), (1.5, "a"), (True, 2), (np.float32(2.0), 3), (math.inf,), (-math.inf, "")],
)
def test_numbers_and_strings_are_ranks_at_first_and_later(rank):
    check = RankCheck()
    assert check.wrong(rank) is None
    assert check.wrong(rank) is None


@pytest.mark.parametrize(
    ("first", "rank", "fault"),
    [
        ((1.0,), (NAN,), "holds a NaN"),
        ((1, 1.0), (NAN, 1.0), "holds a NaN"),
        ((1.0, 2.0), (3.0, NAN), "holds a NaN"),
        ((np.float64(1.0),), (np.float64(NAN),), "holds a NaN"),
        ((1,), [1], "must be a tuple"),
        ((1,), 1, "must be a tuple"),
        ((1,), (None,), "must hold numbers and strings"),
        ((1,), (1j,), "must hold numbers and strings"),
        ((1,), ("a",), "cannot be compared with earlier ranks"),
        (("a",), (1,), "cannot be compared with earlier ranks"),
        ((1, "a"), (1, 2), "cannot be compared with earlier ranks"),
        ((1,), (1, "a"), "cannot be compared with earlier ranks"),  # arrival stands there
        ((1, "a"), (1,), "cannot be compared with earlier ranks"),
    ],
)
def test_a_wrong_rank_is_told_whenever_it_comes(first, rank, fault):
    check = RankCheck()
    assert check.wrong(first) is None
    for _ in range(2):
        assert fault in check.wrong(rank)
        assert not check.are_good([first, rank])
        assert not check.are_good([rank, first])
    assert check.wrong(first) is None


def test_ranks_of_many_are_good_together_only_if_their_types_were_seen():
    check = RankCheck()
    assert not check.are_good([(1, 2.0), (2, 2.0)])  # seen by nobody so far: a closer look
    assert check.wrong((1, 2.0)) is None and check.are_good([(1, 2.0), (2, 2.0)])
    assert not check.are_good([(1, 2.0), (2, 2)])
    assert not check.are_good([(1, 2.0), [2, 2.0]])
    assert not check.are_good([(1, 2.0), (2, 2.0, 3)])


def test_who_cannot_be_ranked_comes_behind_everybody():
    last = Last()
    for other in (5, math.inf, "z", None):
        assert last > other and not last < other and last != other
    assert last == Last() and not last > Last() and not last < Last()
    assert hash(last) == hash(Last())
    assert sorted([(last, 1), (3, 2), (last, 0)], key=lambda key: key) == [
        (3, 2),
        (last, 0),
        (last, 1),
    ]


def requests(*ranks):
    table, made = Table(), []
    for index, rank in enumerate(ranks):
        req = Request(make_request(str(index), [1]), index, table, max_model_len=64)
        req.rank = (rank,)
        made.append(req)
    return made


def test_a_queue_is_in_order_of_rank_then_arrival():
    for order in permutations(range(4)):
        reqs, queue = requests(2, 1, 2, 0), RankedQueue()
        for index in order:
            queue.add(reqs[index])
        assert [req.request_id for req in queue] == ["3", "1", "0", "2"]
        for index in order:
            assert len(queue) == 4 - order.index(index)
            queue.remove(reqs[index])
            assert reqs[index] not in list(queue)


class Meddles(FCFS):
    """Writes ranks itself, behind the back of the queues."""

    def on_grant(self, req, num_tokens, view):
        for other in (*view.waiting, *view.running):
            other.rank = (-other.arrival,)


def test_a_policy_that_writes_ranks_itself_loses_nobody():
    run = make_run(policy=Meddles(), max_num_seqs=2, num_blocks=8, max_num_batched_tokens=16)
    for i in range(6):
        run.add(make_request(str(i), [i + 1] * 20, 5))
    for _ in range(200):
        plan = run.scheduler.schedule()
        run.read(run.scheduler.update_from_output(plan, run.worker.launch(plan)))
    assert {name: len(tokens) for name, tokens in run.outputs.items()} == dict.fromkeys("012345", 5)
    assert not run.scheduler.has_unfinished_requests()
    assert run.scheduler.kv.num_free == run.scheduler.kv.num_usable


def test_a_queue_in_columns_forgets_who_has_left():
    queue, table = RankedQueue(), Table()
    reqs = [make_request(str(i), [1, 2, 3], 5) for i in range(3)]
    first, second, third = (Request(r, i, table, max_model_len=8) for i, r in enumerate(reqs))
    queue.add(first)
    by_row = np.full(table.num_rows, None, dtype=object)
    by_row[first.row] = first
    queue.rerank_columns([np.array([1.0])], by_row)
    queue.add(second)
    queue.add(third)
    queue.remove(second)
    queue.remove(third)
    queue.remove(first)
    assert find_leak(queue) is None
