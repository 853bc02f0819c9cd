"""How long hooks take is known by hook, to the last second, whether they answer or raise."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from support.simulate import make_request, make_run

from engine.messages.kv_orders import Loaded
from engine.messages.requests import Arrival
from engine.messages.step import EMPTY, MaskPart, Masks
from engine.sched import Admission, Fit, Limits, OnRefuse, Policy, Resource, Scheduler
from engine.sched.plugins.hooks import HOOKS
from engine.sched.plugins.resources import HOOKS as RESOURCE_HOOKS


class Meter:
    """A clock that only hooks move, each by an eighth of a second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.spent: Counter[str] = Counter()

    def spend(self, label: str) -> None:
        self.now += 0.125
        self.spent[label] += 0.125


class Slow(Policy):
    dynamic = True

    def __init__(self, meter: Meter) -> None:
        self.spend = lambda hook: meter.spend(f"{type(self).__name__}.{hook}")

    def rank(self, req, view):
        self.spend("rank")
        return (req.priority,)

    def limits(self, view):
        self.spend("limits")
        return Limits()

    def evict(self, view):
        self.spend("evict")
        return ()

    def admit(self, req, view):
        self.spend("admit")
        return Admission.YES

    def chunk(self, req, num_tokens, view):
        self.spend("chunk")
        return num_tokens

    def outranks(self, req, other):
        self.spend("outranks")
        return (req.priority, req.arrival) < (other.priority, other.arrival)

    def takes_blocks(self, req, other):
        self.spend("takes_blocks")
        return (req.priority, req.arrival) < (other.priority, other.arrival)

    def victim(self, candidates, req, view):
        self.spend("victim")
        return candidates[-1]

    def on_add(self, req, view):
        self.spend("on_add")

    def on_grant(self, req, num_tokens, view):
        self.spend("on_grant")

    def on_preempt(self, req, view):
        self.spend("on_preempt")

    def on_tokens(self, reqs, view):
        self.spend("on_tokens")

    def on_step(self, shape, view):
        self.spend("on_step")

    def on_finish(self, req, view):
        self.spend("on_finish")


class SlowOrder(Slow):
    def order(self, view):
        for req in [*view.running, *view.waiting]:
            self.spend("order")
            yield req


class SlowQueue(Slow):
    waiting_may_preempt = True

    def ranks(self, reqs, view):
        self.spend("ranks")
        return view.columns(reqs).priority

    def next_waiting(self, view):
        self.spend("next_waiting")
        return view.step.next_waiting()


class SlowAndWrong(SlowOrder):
    """Takes its time and then raises, now and then."""

    def rank(self, req, view):
        super().rank(req, view)
        return (req.priority // (view.step.index % 5),)

    def chunk(self, req, num_tokens, view):
        super().chunk(req, num_tokens, view)
        return num_tokens // (view.step.index % 3)

    def on_grant(self, req, num_tokens, view):
        super().on_grant(req, num_tokens, view)
        return 1 // (view.step.index % 2)


class SlowResource(Resource):
    """Every hook of its own; parks each request once."""

    name = "slow"
    on_refuse = OnRefuse.PARK

    def __init__(self, meter: Meter) -> None:
        self.spend = lambda hook: meter.spend(f"SlowResource.{hook}")
        self.seen: set[str] = set()
        self.waiting: list[str] = []

    def attach(self, scheduler):
        self.scheduler = scheduler

    def objection(self, add):
        self.spend("objection")

    def added(self, req):
        self.spend("added")

    def arrived(self, arrival):
        self.spend("arrived")

    def transferred(self, report):
        self.spend("transferred")

    def reset(self):
        self.spend("reset")

    def watches(self, req):
        self.spend("watches")
        return True

    def serializes(self, req):
        self.spend("serializes")
        return False

    def begin_step(self, step):
        self.spend("begin_step")
        for name in self.waiting:
            self.scheduler.wake(name)
        self.waiting.clear()

    def extra(self, req, step):
        self.spend("extra")
        return 0

    def fit(self, req, num_tokens, step):
        self.spend("fit")
        return Fit(num_tokens if req.request_id in self.seen else 0)

    def take(self, req, num_tokens, step):
        self.spend("take")

    def parked(self, req):
        self.spend("parked")
        self.seen.add(req.request_id)
        self.waiting.append(req.request_id)

    def release(self, req):
        self.spend("release")

    def seated(self, req, step):
        self.spend("seated")

    def describe(self, plan):
        self.spend("describe")
        plan.masks = MaskPart(EMPTY)

    def masks(self, plan):
        self.spend("masks")
        return Masks(EMPTY, 1)

    def settle(self, plan, result):
        self.spend("settle")

    def counters(self):
        self.spend("counters")
        return {}

    def shutdown(self):
        self.spend("shutdown")


def run_all(policy: Policy, meter: Meter, *resources: Resource, **options) -> dict[str, float]:
    """Eight requests in a small memory; what the statistics say of hooks."""
    run = make_run(
        policy=policy,
        resources=resources,
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        scheduler_cls=partial(Scheduler, timer=lambda: meter.now),
        **options,
    )
    for index in range(8):
        run.add(make_request(str(index), [index + 1] * 9, 12, priority=-index % 3))
        run.step()
    run.scheduler.arrived(Arrival("picture", ["0"]))
    run.scheduler.transferred(Loaded(1, b"", 0.0))
    run.scheduler.reset_encoder_cache()
    run.drain()
    run.scheduler.shutdown()
    return run.scheduler.make_stats().hook_seconds


@pytest.mark.parametrize("cls", [SlowOrder, SlowQueue])
def test_the_time_of_each_hook_of_a_policy_is_known(cls):
    meter = Meter()
    told = run_all(cls(meter), meter)
    assert told == meter.spent
    left = {"next_waiting", "ranks", "outranks"} if cls is SlowOrder else {"order", "rank"}
    assert set(told) == {f"{cls.__name__}.{hook}" for hook in HOOKS if hook not in left}


def test_the_time_of_hooks_that_raise_is_known_too():
    meter = Meter()
    assert run_all(SlowAndWrong(meter), meter, max_policy_faults=10**6) == meter.spent


def test_the_time_of_each_hook_of_a_resource_is_known():
    meter = Meter()

    class Quick(Policy):
        def rank(self, req, view):
            return (req.arrival,)

    told = run_all(Quick(), meter, SlowResource(meter))
    assert told.pop("Quick.rank") == 0.0
    assert told == meter.spent
    assert set(told) == {f"SlowResource.{hook}" for hook in RESOURCE_HOOKS}


@pytest.mark.usefixtures("warnings_are_logged")
@pytest.mark.parametrize(("num_hooks", "is_named"), [(7, False), (8, True)])
def test_a_hook_is_named_from_the_first_second_on_that_all_wait_for_it(num_hooks, is_named, caplog):
    """Each call takes an eighth of a second, and one is made for each request."""
    meter = Meter()

    class Admits(Policy):
        def rank(self, req, view):
            return (req.arrival,)

        def admit(self, req, view):
            meter.spend("admit")
            return Admission.YES

    run = make_run(policy=Admits(), scheduler_cls=partial(Scheduler, timer=lambda: meter.now))
    for index in range(num_hooks):
        run.add(make_request(str(index), [index + 1] * 4, 1))
    run.drain()
    slow = [message for message in caplog.messages if "delayed all requests" in message]
    assert slow == ["Admits.admit took 1.0 s in one step and delayed all requests"] * is_named
