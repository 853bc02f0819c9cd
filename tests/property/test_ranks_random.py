"""Ranks over arrays are those that a policy would give one by one: the plans are the same."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.timed import TimedRun, timed_run

from engine.sched.policies import POLICIES
from engine.sched.policies.andes import Andes
from engine.sched.policies.blendserve import BlendServe
from engine.sched.policies.dlpm import DLPM
from engine.sched.policies.fastserve import FastServe
from engine.sched.policies.hrrn import HRRN
from engine.sched.policies.k_lpm import KLPM
from engine.sched.policies.lpm import LPM
from engine.sched.policies.ltr import LTR
from engine.sched.policies.mc_sf import MCSF
from engine.sched.policies.plas import PLAS
from engine.sched.policies.qoserve import QoServe
from engine.sched.policies.residual_sjf import ResidualSJF
from engine.sched.policies.slai import SLAI
from engine.sched.policies.trail import TRAIL
from engine.sched.policies.vtc import VTC
from engine.sched.roster import sorted_places


class OneByOne:
    """By class: who runs or ran, who waited for long, the others by ``key``."""

    def rank(self, req, view):
        if not req.is_waiting or req.num_preempted:
            return (0, req.arrival)
        if view.now - req.arrival_time >= getattr(self, "max_wait", float("inf")):
            return (1, req.arrival)
        return (2, self.key(req, view), req.arrival)


class OneLPM(OneByOne, LPM):
    def key(self, req, view):
        return -view.kv.cached_prefix(req)

    rank = OneByOne.rank


class OneMCSF(OneByOne, MCSF):
    def key(self, req, view):
        return view.predict(req)

    rank = OneByOne.rank


class OneResidualSJF(OneByOne, ResidualSJF):
    def key(self, req, view):
        return view.kv.blocks_for(req.num_tokens - view.kv.cached_prefix(req))

    rank = OneByOne.rank


class OneSLAI(OneByOne, SLAI):
    def key(self, req, view):
        return req.num_tokens - view.kv.cached_prefix(req)

    rank = OneByOne.rank


class OnePLAS(OneByOne, PLAS):
    def key(self, req, view):
        return self.service.get(str(req.hints.get("program")), 0.0)

    rank = OneByOne.rank


class OneHRRN(OneByOne, HRRN):
    def key(self, req, view):
        waited = self.computed - view.own("computed before")[req]
        return -waited / (req.num_tokens - view.kv.cached_prefix(req))

    rank = OneByOne.rank


class OneTRAIL(TRAIL):
    def rank(self, req, view):
        predicted = view.predict(req)
        is_old = not req.is_waiting and req.num_output >= self.young * predicted
        if is_old or view.now - req.arrival_time >= self.max_wait:
            return (0, req.arrival)
        return (1, predicted - req.num_output, req.arrival)


class OneLTR(LTR):
    def rank(self, req, view):
        idle = view.step.index - view.own("last step")[req]
        if req.is_waiting and idle >= self.starve_steps:
            view.own("boost")[req] = self.boost_tokens
        return (not view.own("boost")[req], view.own("length")[req], req.arrival)


class OneAndes(Andes):
    def rank(self, req, view):
        ttft, tbt = view.own("ttft")[req], view.own("tbt")[req]
        in_hand = req.num_output - (view.now - req.arrival_time - ttft) / tbt
        is_safe = not req.is_waiting and req.num_preempted >= self.max_preemptions
        if is_safe or in_hand <= -self.max_late:
            return (0, req.arrival)
        gain = 1.0 / (1.0 + max(0.0, in_hand)) if req.num_output else 2.0
        return (1, -gain / req.num_tokens, req.arrival)


class OneQoServe(QoServe):
    def rank(self, req, view):
        if view.now - req.arrival_time >= self.max_wait:
            return (0, req.arrival)
        cached = view.kv.cached_prefix(req) if req.is_waiting else 0
        work = view.cost.prefill_seconds(req.num_uncomputed - cached, req.num_computed + cached)
        due = req.arrival_time + view.own("ttft")[req] + req.num_output * view.own("tbt")[req]
        is_late = not req.num_output and view.now + work > due
        return (2 if is_late else 1, due + self.alpha * work, req.arrival)


class OneVTC(VTC):
    def next_waiting(self, view):
        heads = {}
        for req in view.unoffered:
            heads.setdefault(req.user, req)
        key = {user: (self.counter(user, view), req.arrival) for user, req in heads.items()}
        return min(heads.values(), key=lambda req: key[req.user], default=None)


class OneKLPM(KLPM):
    def next_waiting(self, view):
        waiting = view.unoffered
        if self.num_started % self.k == 0:
            return waiting[0] if waiting else None
        return max(
            waiting, key=lambda req: (view.kv.cached_prefix(req), -req.arrival), default=None
        )


class OneDLPM(DLPM):
    def next_waiting(self, view):
        waiting = view.unoffered
        if not waiting:
            return None
        credit = {user: self.credit(user, view) for user in dict.fromkeys(r.user for r in waiting)}
        most, refill = max(credit.values()), 0.0
        if most <= 0:
            refill = self.quantum * (-most // self.quantum + 1)
        for user in credit:
            self.given[user] += refill
        able = [req for req in waiting if credit[req.user] + refill > 0]
        if view.now - able[0].arrival_time >= self.max_wait:
            return able[0]
        return max(able, key=lambda req: (view.kv.cached_prefix(req), -req.arrival))


class OneBlendServe(BlendServe):
    def next_waiting(self, view):
        waiting, share = view.unoffered, view.own("share")
        if waiting and view.now - waiting[0].arrival_time >= self.max_wait:
            return waiting[0]
        running = [share[req] for req in view.running]
        mean = sum(running) / len(running) if running else self.blend
        pick = min if mean > self.blend else max
        return pick(waiting, key=share.__getitem__, default=None)


class OneFastServe(FastServe):
    def rank(self, req, view):
        if req.is_waiting:
            if view.now - view.own("served")[req] >= self.max_wait:
                view.own("level")[req] = view.own("used")[req] = 0.0
                view.own("served")[req] = view.now
            view.own("seated")[req] = req.num_output
        return (view.own("level")[req], req.arrival)


class LooksUp(LPM):
    """Every request is looked up in each step, whatever the watch of the cache remembers."""

    def ranks(self, reqs, view):
        answer = super().ranks(reqs, view)
        columns = view.columns(reqs)
        waits = columns.is_waiting
        found = [view.kv.cached_prefix(req) for req in columns[waits].requests]
        assert columns.cached_prefix[waits].tolist() == found
        return answer


PAIRS = {
    "lpm": OneLPM,
    "mc-sf": OneMCSF,
    "residual-sjf": OneResidualSJF,
    "slai": OneSLAI,
    "plas": OnePLAS,
    "hrrn": OneHRRN,
    "trail": OneTRAIL,
    "ltr": OneLTR,
    "andes": OneAndes,
    "qoserve": OneQoServe,
    "vtc": OneVTC,
    "k-lpm": OneKLPM,
    "dlpm": OneDLPM,
    "blendserve": OneBlendServe,
    "fastserve": OneFastServe,
}
OPTIONS = {"dlpm": {"quantum": 16.0}}  # so small that some users have no credit left


def overloaded(policy, rng: random.Random, depth: int, num_requests: int) -> list[object]:
    """The plans of a run that is short of blocks and seats."""
    block_size = rng.choice([2, 4])
    run: TimedRun = timed_run(
        policy,
        depth=depth,
        step_seconds=rng.choice([0.0, 0.05, 2.0]),
        num_blocks=1 + rng.randint(60, 110) // block_size,
        block_size=block_size,
        max_num_seqs=rng.randint(2, 16),
        max_num_batched_tokens=rng.randint(16, 64),
        max_model_len=64,
        length_predictor=rng.choice(["none", "history", "oracle"]),
        max_policy_faults=0,
    )
    run.may_be_rescued = True
    plans, schedule = [], run.scheduler.schedule

    def recorded():
        plan = schedule()
        columns = (plan.rows, plan.counts, plan.starts, plan.block_ids)
        plans.append(
            ([column.tolist() for column in columns], [new.request_id for new in plan.new])
        )
        return plan

    run.scheduler.schedule = recorded
    shared = [rng.randrange(1000) for _ in range(20)]
    for index in range(num_requests):
        prompt = shared[: rng.choice([0, 0, 8, 20])]
        prompt = [*prompt, *(rng.randrange(1000) for _ in range(rng.randint(1, 5)))]
        num_output = rng.randint(1, 24)
        hints = {"output_tokens": num_output, "ttft": rng.choice([2, 5.0, 1e6])}
        hints |= {"program": rng.choice("pq")}
        if rng.random() < 0.3:
            hints["tbt"] = rng.choice([0.1, 1, 3.5])
        tbt = rng.choice([None, 0.5])
        user = rng.choice("abc")
        run.ask(f"r{index}", prompt, num_output, user=user, tbt=tbt, hints=hints)
        for _ in range(rng.choice([0, 0, 1, 3])):
            run.step()
    run.drain()
    return plans


@pytest.mark.parametrize("num_runs", [2, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PAIRS)
def test_plans_are_those_of_ranks_one_by_one(name: str, num_runs: int, seed: int) -> None:
    for index in range(num_runs):
        depth, begins, options = 1 + index % 2, seed + index, OPTIONS.get(name, {})
        at_once = overloaded(POLICIES[name](**options), random.Random(begins), depth, 40)
        assert at_once == overloaded(PAIRS[name](**options), random.Random(begins), depth, 40)


def test_a_remembered_prefix_is_the_one_that_a_lookup_finds(seed: int) -> None:
    for index in range(4):
        overloaded(LooksUp(), random.Random(seed + index), 1 + index % 2, 60)


def test_places_are_sorted_as_tuples_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        count = int(rng.integers(1, 200))
        columns = [
            rng.choice(
                [rng.integers(0, 3, count) / 2, rng.integers(-2, 9, count), rng.random(count)]
            )
            for _ in range(rng.integers(0, 4))
        ]
        columns = [*columns, rng.permutation(count)]
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        assert sorted_places(columns).tolist() == sorted(range(count), key=rows.__getitem__)
