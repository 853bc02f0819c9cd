"""What a core reports to those who watch it, and that it does nothing for it while nobody does."""

from __future__ import annotations

from typing import Any

import pytest
from support.fakes import FakeClock
from support.simulate import make_request

from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.watching import MOST_NAMED, CoreWatch
from engine.kv.manager import KVManager
from engine.messages.watch import WatchedCore, WatchedStep
from engine.sched.interface import PauseState
from engine.sched.plugins.find import make_scheduler
from policylab.verify.fake import DigestWorker


class Ticking(DigestWorker):
    """A worker whose steps take this many seconds."""

    def __init__(self, clock: FakeClock, seconds: float, num_blocks: int) -> None:
        super().__init__(num_blocks, 16)
        self.clock, self.seconds = clock, seconds

    def collect(self, ticket: Any) -> Any:
        self.clock.now += self.seconds
        result = super().collect(ticket)
        result.seconds = self.seconds
        return result


class WatchedBox:
    """A core with a fake worker, and its watch."""

    def __init__(self, seconds: float = 1.0, num_blocks: int = 200, **options: Any) -> None:
        self.clock = FakeClock()
        options = {
            "max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": 256, **options
        }  # fmt: skip
        kv = KVManager(num_blocks, 16)
        self.scheduler: Any = make_scheduler(SchedulerConfig(**options), kv, clock=self.clock)
        self.worker = Ticking(self.clock, seconds, num_blocks)
        self.core = EngineCore(self.scheduler, self.worker)
        self.watch = CoreWatch(self.core, self.clock, watch_seconds=5.0)
        self.look = self.watch.methods["watch"]
        self.known: dict[str, int] = {}

    def add(self, name: str, num_prompt: int = 8, max_tokens: int = 8, **fields: Any) -> None:
        fields = {"arrival_time": self.clock.now, **fields}
        self.scheduler.add_request(
            make_request(name, list(range(num_prompt)), max_tokens, **fields)
        )

    def all(self) -> WatchedCore:
        seen: WatchedCore = self.look(self.known, 100)
        if seen.steps:
            self.known = {seen.core_id: seen.steps[-1].number}
        return seen


def tokens(core: WatchedCore, step: WatchedStep) -> dict[str, int]:
    names = [core.names[place] for place in step.names]
    return dict(zip(names, step.tokens, strict=True))


def test_each_request_shows_its_state_its_counts_and_why_it_waits() -> None:
    box = WatchedBox()
    box.all()
    for name in ("a", "b", "c"):
        box.add(name, priority=7)
    box.core.step()
    box.core.step()
    seen = box.all()
    a, b, c = seen.requests
    assert [each.request_id for each in seen.requests] == ["a", "b", "c"]
    assert (a.state, b.state, c.state) == ("running", "running", "waiting")
    assert (a.cause, b.cause, c.cause) == ("", "", "seats")
    assert c.waits == {"seats": 2.0} and a.waits == {}
    assert (a.age, a.since, c.age, c.since) == (2.0, 2.0, 2.0, 2.0)
    assert (a.num_prompt, a.num_computed, a.num_output) == (8, 9, 2)
    assert (c.num_computed, c.num_output, c.priority) == (0, 0, 7)
    assert seen.num_blocks == 199 and seen.stats.num_waiting == 1
    assert [tokens(seen, step) for step in seen.steps] == [{"a": 8, "b": 8}, {"a": 1, "b": 1}]
    assert [step.causes for step in seen.steps] == [{"seats": 1}] * 2
    assert [step.age for step in seen.steps] == [2.0, 1.0]
    assert [step.seconds for step in seen.steps] == [1.0, 1.0]


def test_seconds_shown_while_it_waits_are_those_reported_when_it_starts() -> None:
    """A request is refused for causes of its own and of the queue in turn; and it is preempted."""
    box = WatchedBox(num_blocks=9, max_num_seqs=3)
    box.all()
    for name in ("a", "b", "c", "d"):
        box.add(name, num_prompt=16, max_tokens=60)
    shown: dict[str, dict[str, float]] = {}
    for index in range(200):
        if index == 3:
            box.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        if index == 9:
            box.scheduler.set_pause_state(PauseState.UNPAUSED)
        before = {each.request_id: each for each in box.all().requests}
        box.core.step()
        reqs = box.scheduler.roster.by_id
        for name, each in before.items():
            if each.state != "running" and name in reqs and not reqs[name].is_waiting:
                # It has started in the step, at the time of the look.
                assert reqs[name].history.waits == pytest.approx(each.waits)
                shown[name] = each.waits
        if not reqs:
            break
    causes = {cause.partition(" by ")[0] for waits in shown.values() for cause in waits}
    assert {"paused", "preempted"} <= causes, causes


def test_a_running_request_that_the_step_left_out_says_why() -> None:
    box = WatchedBox(max_num_batched_tokens=16, long_prefill_token_threshold=0)
    box.all()
    box.add("long", num_prompt=60)
    box.core.step()
    box.add("next", num_prompt=60)
    box.core.step()
    first, second = box.all().requests
    assert (first.state, first.cause, second.state) == ("running", "", "waiting")
    assert second.cause == "token budget" and first.num_computed == 32


def test_a_preempted_request_names_who_took_its_blocks() -> None:
    box = WatchedBox(num_blocks=7, max_num_seqs=2)
    box.all()
    box.add("a", num_prompt=32, max_tokens=60)
    box.add("b", num_prompt=32, max_tokens=60)
    for _ in range(40):
        box.core.step()
        found = {each.request_id: each for each in box.all().requests}
        if found["b"].state == "waiting":
            break
    assert found["b"].cause == "preempted by a"


def test_nothing_is_recorded_unless_somebody_looks() -> None:
    box = WatchedBox()
    assert box.look(None, 0).steps == [] and box.core.executor is box.worker
    box.all()
    assert box.core.executor is not box.worker
    box.add("a", max_tokens=50)
    for _ in range(5):
        box.core.step()
    assert box.core.executor is not box.worker
    for _ in range(2):  # five seconds after the last look
        box.core.step()
    assert box.core.executor is box.worker
    box.core.step()
    assert box.all().steps == []  # what was recorded before belongs to another time
    box.core.step()
    assert len(box.all().steps) == 1


def test_two_who_watch_get_all_steps_each() -> None:
    box = WatchedBox()
    first, second = box.look({}, 0), box.look({}, 0)
    box.add("a", max_tokens=4)
    box.core.step()
    seen = box.look({first.core_id: 0}, 0)
    assert len(seen.steps) == 1
    box.core.step()
    assert len(box.look({first.core_id: seen.steps[-1].number}, 0).steps) == 1
    assert len(box.look({second.core_id: 0}, 0).steps) == 2
    assert len(box.look({"another start": 1000}, 0).steps) == 2


def test_short_steps_are_recorded_together() -> None:
    box = WatchedBox(seconds=0.03)
    box.all()
    box.add("a", num_prompt=10, max_tokens=9)
    while box.core.has_work:
        box.core.step()
    seen = box.all()
    assert [step.num_steps for step in seen.steps] == [3, 3, 3]
    assert [step.seconds for step in seen.steps] == pytest.approx([0.09] * 3)
    assert [tokens(seen, step) for step in seen.steps] == [{"a": 12}, {"a": 3}, {"a": 3}]


def test_a_large_step_names_the_requests_with_most_tokens() -> None:
    box = WatchedBox(max_num_seqs=50, max_num_batched_tokens=4096)
    box.all()
    for index in range(50):
        box.add(str(index), num_prompt=index + 1, cache_salt=str(index))
    box.core.step()
    seen = box.all()
    (step,) = seen.steps
    named = tokens(seen, step)
    assert len(named) == MOST_NAMED and set(named) == {str(i) for i in range(18, 50)}
    assert step.num_others == sum(range(1, 19))
    assert step.num_others + sum(named.values()) == seen.stats.num_scheduled_tokens


def test_requests_may_be_named_and_unknown_ones_are_left_out() -> None:
    box = WatchedBox()
    for name in ("a", "b", "c"):
        box.add(name)
    assert [each.request_id for each in box.look(None, 0, ["c", "nobody"]).requests] == ["c"]
    assert [each.request_id for each in box.look(None, 1, ["a", "b"]).requests] == ["a", "b"]


def test_steps_in_flight_when_the_watch_begins_are_not_recorded() -> None:
    box = WatchedBox(seconds=0.3)
    box.core.depth = 2
    box.add("a", max_tokens=9)
    box.core.step()
    box.all()
    while box.core.has_work:
        box.core.step()
    seen = box.all()
    assert len(seen.steps) == 7  # of nine steps two were launched before
    assert all(step.num_steps == 1 for step in seen.steps)
