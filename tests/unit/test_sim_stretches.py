"""Stretches by example: where they begin, where they end, and who never has any."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from engine.config.sched import SchedulerConfig
from engine.kv.events import EventLog
from engine.messages.kv_events import KVEventBatch
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched import Policy, Request, Resource, Scheduler, SchedView
from engine.sched.interface import PauseState
from engine.sched.policies import POLICIES
from policylab.sim.job import END, FILLER
from policylab.sim.jumps.blocks import RepeatingKV
from policylab.sim.jumps.core import JumpingCore
from policylab.sim.worker import StepCost, TimedWorker, VirtualClock

ONE_SECOND = StepCost(fixed=1.0, per_seq=0.0, per_token=0.0, per_context=0.0, per_attention=0.0)


class Engine:
    """A core on a virtual clock whose steps take a second each."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        cls: type[Scheduler] = Scheduler,
        num_blocks: int = 100,
        events: EventLog | None = None,
        resources: tuple[Resource, ...] = (),
        **config: Any,
    ) -> None:
        self.clock, self.lengths = VirtualClock(), dict[str, int]()
        kv = RepeatingKV(num_blocks, 4, events=events)
        options = {"max_num_batched_tokens": 64, "max_num_seqs": 4, "max_model_len": 200, **config}
        self.scheduler = cls(
            SchedulerConfig(**options),
            kv,
            policy or POLICIES["fcfs"](),
            clock=self.clock,
            resources=resources,
        )
        worker = TimedWorker(self.clock, ONE_SECOND, options["max_num_seqs"], self.lengths)
        self.core = JumpingCore(self.scheduler, worker, clock=self.clock)

    def add(
        self,
        name: str,
        num_output: int,
        max_tokens: int = 100,
        prompt: Sequence[int] = (5, 6, 7),
        **fields: Any,
    ) -> None:
        self.lengths[name] = num_output
        params = SamplingParams(max_tokens=max_tokens)
        fields = {"arrival_time": self.clock.now, "eos_token_ids": [END], **fields}
        self.scheduler.add_request(
            AddRequest(name, list(prompt), params, seed=0, max_tokens=max_tokens, **fields)
        )

    def jump(self, until: float = inf) -> int:
        """Steps jumped over in a call."""
        self.core.step(until)
        return self.core.stretch.num_steps if self.core.stretch is not None else 0


def test_a_stretch_goes_to_the_step_before_an_end() -> None:
    engine = Engine()
    engine.add("a", 10)
    assert engine.jump() == 0 and engine.clock.now == 1.0  # the prompt, and the first token
    outputs = engine.core.step()
    stretch = engine.core.stretch
    assert stretch is not None and (stretch.num_steps, stretch.num_planned) == (8, 9)
    assert stretch.ends.tolist() == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    assert stretch.growth.peaks.usage == 1 - 96 / 99  # twelve tokens, in blocks of four
    assert stretch.begins.tolist() == [1.0, *stretch.ends.tolist()]
    assert stretch.request_ids == ["a"] and stretch.token == FILLER
    assert [plan.starts.tolist() for plan in stretch.plans()] == [[n] for n in range(3, 12)]
    assert [end.reason for end in outputs[0].finished] == ["stop"] and outputs[0].time == 10.0


def test_who_waits_for_a_seat_does_not_end_it() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a", 20)
    engine.core.step()
    engine.add("b", 20)
    assert engine.jump() == 18
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert engine.jump() == engine.jump() == 0


def test_who_waits_for_blocks_does_not_end_it() -> None:
    engine = Engine(num_blocks=6)
    engine.add("a", 16, 16)
    engine.core.step()
    engine.add("b", 2, 2, prompt=[8] * 18)
    assert engine.jump() == 0  # "a" fills its first block, which might have been that of "b"
    assert engine.jump() == 13


class Silent:
    """A listener that keeps nothing."""

    def publish(self, batch: KVEventBatch) -> None:
        pass

    def close(self) -> None:
        pass


class Planner(Scheduler):
    def preempt(self, req: Request, step: Any, by: str = "") -> None:
        super().preempt(req, step, by)


class Watcher(Resource):
    name = "watcher"

    def begin_step(self, step: Any) -> None:
        """It looks at each."""


class Told(Policy):
    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        """It counts them."""


@pytest.mark.parametrize(
    "asked",
    [
        {"events": EventLog(Silent(), block_size=4, clock=float)},
        {"cls": Planner},
        {"resources": (Watcher(),)},
        {"policy": Told()},
        {"policy": POLICIES["trail"]()},
    ],
    ids=["events", "scheduler", "resource", "hook", "dynamic"],
)
def test_who_sees_every_step_is_asked_in_every_step(asked: dict[str, Any]) -> None:
    engine = Engine(**asked)
    engine.add("a", 30)
    assert not any(engine.jump() for _ in range(30))
    assert not engine.scheduler.roster.by_id


class Stable(Policy):
    """Dynamic, and as sure of itself as it is told to be."""

    dynamic = True

    def __init__(self, steps: Any = 0) -> None:
        self.steps = steps

    def rank(self, req: Request, view: SchedView) -> tuple[int]:
        return (req.arrival,)

    def stable_for(self, view: SchedView) -> Any:
        return self.steps


def test_a_dynamic_policy_says_how_far() -> None:
    engine = Engine(Stable(5))
    engine.add("a", 30)
    # It is asked once it has ranked the request among those that run.
    assert [engine.jump() for _ in range(3)] == [0, 0, 5]


@pytest.mark.parametrize("steps", ["many", -1, None, True])
def test_a_wrong_answer_is_a_fault_and_no_stretch(steps: Any) -> None:
    engine = Engine(Stable(steps))
    engine.add("a", 5)
    assert not any(engine.jump() for _ in range(5))
    assert "Stable.stable_for" in engine.scheduler.guard.faults.messages[0]
