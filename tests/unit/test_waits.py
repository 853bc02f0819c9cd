"""Every second in the queue is charged to exactly one cause, and users see which."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from support.fakes import FakeClock
from support.simulate import Run, make_request, make_run, random_requests

from engine.sched import Defer, Fit, Limits, OnRefuse, Policy, Resource
from engine.sched.interface import PauseState
from engine.sched.request import Request

CAUSES = {
    *("token budget", "seats", "KV blocks", "policy order", "paused", "next step"),
    *("adapter", "grammar", "deferred", "preempted by", "restarted"),
}


class Moody(Policy):
    """Defers some, closes admission now and then, ranks by priority."""

    waiting_may_preempt = True

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def rank(self, req, view):
        return (req.priority,)

    def on_add(self, req, view):
        return Defer(view.now + self.rng.randrange(1, 40) / 8) if self.rng.random() < 0.1 else None

    def limits(self, view):
        return Limits(admission=self.rng.random() < 0.9)


class OneAdapter(Resource):
    """Two requests at a time may use adapters; later ones may go first."""

    name = "adapter"

    def __init__(self) -> None:
        self.users: set[Request] = set()

    def fit(self, req, num_tokens, step):
        free = not req.adapter or req in self.users or len(self.users) < 2
        return Fit(num_tokens) if free else Fit(0)

    def take(self, req, num_tokens, step):
        if req.adapter:
            self.users.add(req)

    def release(self, req):
        self.users.discard(req)


class SlowGrammar(Resource):
    """Parks who has a grammar until the test says that it is there."""

    name = "grammar"

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.waiting: list[str] = []

    def fit(self, req, num_tokens, step):
        if not req.add.grammar or req.request_id in self.ready:
            return Fit(num_tokens)
        return Fit(0, on_refuse=OnRefuse.PARK)

    def parked(self, req):
        self.waiting.append(req.request_id)


def queue_seconds(req: Request, end: float) -> float:
    """From what happened to it: time without a seat."""
    total, since = 0.0, None
    for event, time in req.history.events:
        if event in ("queued", "preempted"):
            since = time
        elif event == "scheduled":
            assert since is not None
            total, since = total + time - since, None
    return total if since is None else total + end - since


class Workload:
    """A run on a clock of eighths, whose sums are exact, with everything that makes wait."""

    def __init__(self, seed: int, depth: int) -> None:
        self.rng = random.Random(seed)
        self.clock = FakeClock(16.0)
        self.grammar = SlowGrammar()
        self.ended: list[tuple[Request, float]] = []
        self.run: Run = make_run(
            depth=depth,
            policy=Moody(self.rng),
            resources=(OneAdapter(), self.grammar),
            clock=self.clock,
            num_blocks=self.rng.randint(16, 24),
            block_size=4,
            max_num_batched_tokens=self.rng.randint(12, 30),
            max_num_seqs=self.rng.randint(4, 8),
            max_model_len=48,
        )
        settler, finish = self.run.scheduler.settler, self.run.scheduler.settler.finish

        def watched(req: Request) -> None:
            finish(req)
            self.ended.append((req, self.clock.now))

        settler.finish = watched  # the only way out for every request

    def tick(self) -> None:
        self.clock.now += self.rng.randrange(8) / 8

    def step(self) -> None:
        self.tick()
        while len(self.run.flight) < self.run.depth and self.run.launch():
            self.tick()
        if self.run.flight:
            self.run.settle()
        else:
            self.run.scheduler.take_outputs()

    def disturb(self) -> None:
        """What comes from outside."""
        rng, scheduler = self.rng, self.run.scheduler
        self.tick()
        if self.grammar.waiting and rng.random() < 0.3:
            name = self.grammar.waiting.pop(0)
            self.grammar.ready.add(name)
            scheduler.wake(name)
        if rng.random() < 0.02:
            scheduler.set_pause_state(rng.choice(list(PauseState)))
        if rng.random() < 0.1:
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running=True)
        if rng.random() < 0.02 and scheduler.roster.by_id:
            scheduler.finish_requests(rng.choice(list(scheduler.roster.by_id)))

    def work(self, num_requests: int = 60) -> None:
        requests = random_requests(self.rng, num_requests)
        while requests or self.run.scheduler.has_requests() or self.run.flight:
            if requests and self.rng.random() < 0.4:
                request = requests.pop()
                self.run.add(self.with_needs(request))
            self.step()
            self.disturb()

    def with_needs(self, request):
        rng = self.rng
        fields = {name: getattr(request, name) for name in ("priority", "cache_salt")}
        if rng.random() < 0.4:
            fields["adapter"] = "a"
        if rng.random() < 0.2:
            fields["grammar"] = "g"
        if rng.random() < 0.1:
            fields["queue_deadline"] = self.clock.now + rng.randrange(80) / 8
        return make_request(
            request.request_id, request.prompt_token_ids, request.max_tokens, **fields
        )


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_waits_sum_up_to_the_queue_time_exactly(seed: int, depth: int) -> None:
    seen: Counter[str] = Counter()
    for offset in range(8):
        work = Workload(seed + offset, depth)
        work.work()
        assert len(work.ended) == 60
        for req, end in work.ended:
            waits = req.history.waits
            assert sum(waits.values()) == queue_seconds(req, end), (req, waits, req.history.events)
            assert req.history.queue_seconds == sum(waits.values())
            assert all(seconds >= 0 for seconds in waits.values()), waits
            seen.update(cause.partition(" by ")[0] + " by" * (" by " in cause) for cause in waits)
        scheduler = work.run.scheduler
        stats = scheduler.make_stats()
        charged = sum(sum(req.history.waits.values()) for req, _ in work.ended)
        assert stats is not None and sum(stats.wait_seconds.values()) == charged
    assert set(seen) == CAUSES, CAUSES.symmetric_difference(seen)


def one_wait(num_prompt: int = 16, **options: object) -> dict[str, float]:
    """What the second of two requests waited for; each step takes one second."""
    clock = FakeClock(0.0)
    run = make_run(clock=clock, **options)
    first, second = (make_request(name, [ord(name)] * num_prompt, 4) for name in "ab")
    run.add(first)
    run.add(second)
    waits: dict[str, float] = {}
    req = run.scheduler.roster.by_id["b"]
    while run.step():
        clock.now += 1.0
        waits = dict(req.history.waits)
    return waits


def test_each_cause_is_named() -> None:
    assert one_wait() == {}
    assert one_wait(max_num_seqs=1) == {"seats": 4.0}
    assert one_wait(max_num_batched_tokens=16) == {"token budget": 1.0}
    assert one_wait(17, num_blocks=4, max_model_len=32) == {"KV blocks": 4.0}
    assert one_wait(16, num_blocks=3, max_model_len=32) == {"preempted by a": 3.0}


@pytest.mark.behaviour(33)
def test_preemptions_are_counted_and_dated_and_who_preempted_is_named() -> None:
    clock = FakeClock(0.0)
    run = make_run(clock=clock, num_blocks=11, policy="priority", block_size=16)
    run.add(make_request("urgent", [1] * 80, 20, priority=0))
    run.add(make_request("late", [2] * 80, 20, priority=1))
    late = run.scheduler.roster.by_id["late"]
    while run.step():
        clock.now += 1.0
    events = [event for event, _ in late.history.events]
    assert events == ["queued", "scheduled", "preempted", "scheduled"]
    times = dict(late.history.events[1:])
    assert late.num_preempted == 1
    seconds = times["scheduled"] - times["preempted"]
    assert late.history.waits == {"preempted by urgent": seconds}
    stats = run.scheduler.make_stats()
    assert stats is not None and stats.wait_seconds == {"preempted": seconds}  # not one for each id
