"""Ten thousand random steps under priorities and drafts, and what must hold in each of them."""

from __future__ import annotations

import random

import pytest
from support.data_plane import FeatureWorker, answer, guess, make_feature_run
from support.simulate import Run, make_request

from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan
from engine.spec.worker_drafts import WorkerDrafts

STEPS = 800
MANY_STEPS = 4_000


class Blast:
    """Requests come, are aborted and finish at random."""

    def __init__(self, seed: int, num_drafts: int, depth: int) -> None:
        self.rng = random.Random(seed)
        self.run = self.make(num_drafts, depth)
        self.requests: dict[str, AddRequest] = {}
        self.seen: set[str] = set()  # ids the worker was told of
        self.num_added = 0

    def make(self, num_drafts: int, depth: int) -> Run:
        rng = self.rng
        drafts = [WorkerDrafts(num_drafts)] if num_drafts else []
        return make_feature_run(
            resources=drafts,
            propose=lambda tokens: guess(tokens, rng.randint(0, num_drafts), num_drafts),
            num_drafts=num_drafts,
            depth=depth,
            policy="priority",
            num_blocks=18,
            block_size=4,
            max_num_batched_tokens=24,
            max_num_seqs=6,
            max_model_len=64,
        )

    def add(self) -> None:
        rng, name = self.rng, str(self.num_added)
        prompt = [7] * rng.choice([0, 0, 8, 17]) + [
            rng.randrange(9) for _ in range(rng.randint(1, 20))
        ]
        request = make_request(name, prompt, rng.randint(1, 20), priority=rng.randint(-3, 3))
        self.requests[name] = request
        self.num_added += 1
        self.run.add(request)

    def step(self) -> None:
        rng, roster = self.rng, self.run.scheduler.roster
        if rng.random() < 0.5 and len(roster.by_id) < 20:
            self.add()
        if rng.random() < 0.01 and roster.by_id:
            self.run.scheduler.finish_requests(rng.choice(list(roster.by_id)))
        while len(self.run.flight) < self.run.depth:
            if not self.run.launch():
                break
            self.check(self.run.flight[-1][0])
        if self.run.flight:
            self.run.settle()
        self.check_blocks()

    def check(self, plan: StepPlan) -> None:
        """47, 48, 49: who is in the plan."""
        config, roster = self.run.scheduler.config, self.run.scheduler.roster
        scheduled = [roster.by_row[row].request_id for row in plan.rows.tolist()]
        new = [seq.request_id for seq in plan.new]
        cached = [name for name in scheduled if name not in new]
        assert set(cached) <= self.seen, "the worker was never told of it"
        for seq in plan.new:  # one that comes back is told anew, with what it has generated
            request = self.requests[seq.request_id]
            if seq.request_id not in self.seen:
                assert seq.token_ids == request.prompt_token_ids
            assert seq.token_ids[: seq.num_prompt] == request.prompt_token_ids
        self.seen.update(new)
        assert len(set(scheduled)) == len(scheduled) and set(new) <= set(scheduled)
        assert (plan.counts > 0).all()
        assert int(plan.counts.sum()) == plan.num_tokens <= config.max_num_batched_tokens
        if plan.drafts is not None:
            assert len(plan.drafts.counts) == len(plan.rows)
            assert (plan.drafts.counts < plan.counts).all()

    def check_blocks(self) -> None:
        """50: seats and blocks."""
        scheduler = self.run.scheduler
        pool, roster = scheduler.kv.pool, scheduler.roster
        assert len(roster.running) <= scheduler.config.max_num_seqs
        owners: dict[int, int] = {}
        for req in roster.by_id.values():
            for block in scheduler.kv.held(req):
                owners[block] = owners.get(block, 0) + 1
        shared = [block for block, count in owners.items() if count > 1]
        assert all(pool.cache.hash_of(block) is not None for block in shared)
        assert pool.num_free + len(owners) == pool.num_blocks - 1

    def finish(self) -> None:
        """51: nothing is left."""
        self.run.drain()
        pool = self.run.scheduler.kv.pool
        assert not self.run.scheduler.has_requests()
        assert sum(pool.num_refs) == 0 and pool.num_free == pool.num_blocks - 1
        for name, (reason, _) in self.run.finished.items():
            if reason == "length":
                assert self.run.outputs[name] == answer(self.requests[name])


@pytest.mark.behaviour(47, 48, 49, 50, 51)
@pytest.mark.parametrize("steps", [STEPS, pytest.param(MANY_STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_random_steps_keep_plans_seats_and_blocks_right(
    seed: int, num_drafts: int, depth: int, steps: int
) -> None:
    blast = Blast(seed, num_drafts, depth)
    assert isinstance(blast.run.worker, FeatureWorker)
    for _ in range(steps):
        blast.step()
    blast.finish()
    stats = blast.run.scheduler.make_stats()
    assert stats is not None and stats.num_preemptions > 20 and blast.num_added > 100
