"""What policies see of the engine, and what is estimated for whoever has to wait."""

from __future__ import annotations

import random

import pytest
from support.fakes import FakeClock
from support.simulate import make_request, make_run

from engine.errors import RefusedError
from engine.sched import Policy
from engine.sched.policies import FCFS


class Looks(FCFS):
    """Compares what it is shown with what it can see for itself."""

    def __init__(self) -> None:
        self.num_mixed = self.num_promised = 0

    def order(self, view):
        running = list(view.running)
        first = view.decodes_first()
        assert first == sorted(running, key=lambda req: req.num_uncomputed != 1)
        self.num_mixed += first != running
        size = view.kv.block_size
        behind = [req for req in running if req.num_tokens - req.num_computed > 1]
        promised = sum(-(-req.num_tokens // size) - len(view.kv.held(req)) for req in behind)
        assert view.promised_blocks == promised
        self.num_promised += promised > 0
        for req in view.unfinished:
            held = len(view.kv.held(req)) * size
            start = view.kv.cached_prefix(req) if req.is_waiting else req.num_computed
            assert view.start_of(req) == start and (req.is_waiting or start <= held)
        assert set(view.by_id.values()) == set(view.unfinished) == {*running, *view.waiting}
        assert all(view.knows(req) for req in view.unfinished)
        return super().order(view)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_seats", [8, 40])  # vectors pay from sixteen requests on
def test_what_a_policy_is_shown_is_what_is_there(num_seats, depth, seed):
    rng = random.Random(seed)
    policy = Looks()
    run = make_run(
        policy=policy,
        depth=depth,
        num_blocks=400,
        block_size=4,
        max_num_seqs=num_seats,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=8,
    )
    for index in range(80):
        run.add(make_request(str(index), [index] * rng.randint(1, 40), rng.randint(1, 20)))
        run.step()
    run.drain()
    assert not run.scheduler.guard.faults.messages, f"seed {seed}"
    assert policy.num_mixed > 10 and policy.num_promised > 10, f"seed {seed}"


class Remembers(Policy):
    """Reads the last step and what the engine has learnt of its speed."""

    def __init__(self) -> None:
        self.shapes = []

    def rank(self, req, view):
        return (req.arrival,)

    def on_step(self, shape, view):
        assert shape == view.last
        self.shapes.append(tuple(shape))
        self.learnt = view.cost.num_observed


@pytest.mark.parametrize("measured", [True, False])
def test_a_step_has_the_shape_of_its_plan_and_is_learnt_from_if_it_was_timed(measured):
    policy = Remembers()
    run = make_run(policy=policy)
    launch = run.worker.launch

    def timed(plan):
        result = launch(plan)
        result.seconds = 0.25 * measured
        return result

    run.worker.launch = timed
    run.add(make_request("a", [1] * 5, 3))
    run.step()
    run.add(make_request("b", [2] * 4, 2))
    run.drain()
    # rows, tokens, decodes, tokens in the cache, pairs of a new token and one before it
    shapes = [(1, 5, 0, 0, 15), (2, 5, 1, 5, 6 + 10), (2, 2, 2, 6 + 4, 7 + 5)]
    *shown, last = policy.shapes
    assert shown == [(*shape, 0.25 * measured) for shape in shapes]
    assert last[:5] == (0, 0, 0, 0, 0), "the worker was only told who has gone"
    assert policy.learnt == 3 * measured


def test_the_pace_of_the_queue_is_smoothed():
    """The estimate moves by a twentieth of what the last start was off."""
    clock = FakeClock(0.0)
    run = make_run(clock=clock, max_num_seqs=1, max_waiting_requests=2)
    starts = [0.0, 4.0, 12.0, 14.0]
    for index, start in enumerate(starts):
        clock.now = start
        run.add(make_request(str(index), [1], 1))
        run.step()
    pace = 4.0
    for gap in (8.0, 2.0):
        pace += 0.05 * (gap - pace)
    run.add(make_request("x", [1], 1))
    run.add(make_request("y", [1], 1))
    with pytest.raises(RefusedError) as refused:
        run.add(make_request("z", [1], 1))
    assert refused.value.retry_after == pytest.approx(2 * pace)
