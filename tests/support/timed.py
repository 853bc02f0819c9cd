"""Runs on a clock of their own, for tests of what a policy prefers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from engine.sched import Request
from policylab.verify.fake import DigestWorker
from support.simulate import Run, make_request, make_scheduler


class Clock:
    """Says what it was set to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class TimedRun(Run):
    """A run whose clock goes on by ``step_seconds`` with each step."""

    clock: Clock = field(default_factory=Clock)
    step_seconds: float = 1.0
    made: count = field(default_factory=lambda: count(1))
    may_be_rescued: bool = False  # where a policy leaves it to the mechanism to go on

    def ask(self, request_id: str, prompt: int | list[int], num_output: int = 1, **fields) -> None:
        """Add a request now. A number asks for a prompt of that length with no known beginning."""
        if isinstance(prompt, int):
            first = 10_000 * next(self.made)
            prompt = list(range(first, first + prompt))
        fields = {"arrival_time": self.clock.now, **fields}
        self.add(make_request(request_id, prompt, num_output, **fields))

    def step(self) -> bool:
        self.clock.now += self.step_seconds
        return super().step()

    def drain(self, limit: int = 5000) -> None:
        """Step until nobody is left; the policy alone has seen to that."""
        super().drain(limit)
        stats = self.scheduler.make_stats()
        assert self.may_be_rescued or not stats.num_rescued_steps, "the policy had to be overruled"
        assert stats.num_policy_faults == 0, self.scheduler.guard.faults.messages

    def steps(self, number: int) -> list[dict[str, int]]:
        """Plans of that many steps: tokens by request."""
        before = len(self.plans)
        for _ in range(number):
            self.step()
        return self.plans[before:]

    def order(self) -> list[str]:
        """In which order requests got their first tokens, once everybody has finished."""
        self.drain()
        return self.started

    @property
    def started(self) -> list[str]:
        """Requests in the order in which they first got tokens."""
        return list(dict.fromkeys(name for plan in self.plans for name in plan))

    @property
    def ended(self) -> list[str]:
        return list(self.finished)

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.make_stats().num_preemptions

    def request(self, request_id: str) -> Request:
        return self.scheduler.roster.by_id[request_id]


def timed_run(policy: object, *, step_seconds: float = 1.0, depth: int = 1, **options) -> TimedRun:
    """Scheduler, digest worker and clock; the options are those of ``make_scheduler``."""
    clock = Clock()
    scheduler = make_scheduler(policy=policy, clock=clock, **options)
    worker = DigestWorker(scheduler.kv.num_blocks, scheduler.kv.block_size)
    return TimedRun(scheduler, worker, depth, clock=clock, step_seconds=step_seconds)
