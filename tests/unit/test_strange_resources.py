"""What resources may do that nobody thought of, each in its smallest form."""

from __future__ import annotations

import numpy as np
import pytest
from support.data_plane import answer, make_feature_run, tiers_of
from support.simulate import expected, make_request, make_run

from engine.kv_transfer.tiers import Tiers
from engine.messages.step import DraftPart
from engine.sched.policies import FCFS
from engine.sched.policy import Admission
from engine.sched.resource import Fit, OnRefuse, Resource
from engine.sched.scheduler import Scheduler
from policylab.verify.tiers import FakeCopies

PROMPT = list(range(100, 140))


class Pace(Resource):
    """Lets requests go in every so many steps."""

    name = "pace"

    def __init__(self, every):
        self.every = every

    def fit(self, req, num_tokens, step):
        return Fit(0 if step.index % self.every else num_tokens)


@pytest.mark.parametrize("every", [2, 30])
def test_who_is_refused_for_a_while_keeps_its_blocks(every):
    """Each refusal of the only request cost it all that was computed: it never came to its end."""
    run = make_run(resources=[Pace(every)], caching=False, max_num_batched_tokens=16)
    run.add(make_request("a", PROMPT, 3))
    for _ in range(5 * every):
        run.step()
    assert run.outputs["a"] == expected(PROMPT, 3)
    assert run.scheduler.settler.counters.num_preemptions == 0


class Exchange(Resource):
    """Each of two requests goes on only when the other one does not run."""

    def fit(self, req, num_tokens, step):
        others = [other for other in self.scheduler.view.running if other is not req]
        return Fit(0 if others and not req.is_waiting else num_tokens)

    def attach(self, scheduler):
        self.scheduler = scheduler


def test_who_blocks_each_other_by_a_resource_is_parted_in_the_end():
    run = make_run(resources=[Exchange()], stalled_steps=10)
    prompts = {name: [ord(name)] * 20 for name in "ab"}
    for name, prompt in prompts.items():
        run.add(make_request(name, prompt, 3))
    for _ in range(100):
        run.step()
    assert run.outputs == {name: expected(prompt, 3) for name, prompt in prompts.items()}


class Idle(FCFS):
    def order(self, view):
        return iter(())


class Talks(Resource):
    """Has something to tell the worker in every step."""

    def watches(self, req):
        return False

    def describe(self, plan):
        plan.kv_transfer = str(plan.step).encode()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_steps_without_a_token_do_not_keep_an_idle_policy_from_being_replaced(depth):
    """With two of them in flight there always was one, and nobody ever ran."""
    run = make_run(policy=Idle(), resources=[Talks()], depth=depth)
    run.add(make_request("a", PROMPT, 3))
    for _ in range(20):
        run.step()
    assert run.outputs["a"] == expected(PROMPT, 3)


class Passes(FCFS):
    """Passes over one request."""

    def admit(self, req, view):
        return Admission.SKIP if req.request_id == "passed" else super().admit(req, view)


class Parks(Resource):
    """Parks requests that have room, until somebody wakes them."""

    on_refuse = OnRefuse.PARK
    is_broken = False

    def fit(self, req, num_tokens, step):
        return Fit(num_tokens if req.user else 0, room=0 if req.user else req.num_tokens)

    def begin_step(self, step):
        assert not self.is_broken


def test_who_is_passed_over_before_it_is_parked_does_not_close_admission():
    run = make_run(policy=Passes(), resources=[Parks()])
    run.add(make_request("first", PROMPT, 9, user="x"))
    run.step()
    run.add(make_request("passed", PROMPT, 3))
    run.add(make_request("next", PROMPT, 3, user="x"))
    run.step()
    assert [req.request_id for req in run.scheduler.roster.running] == ["first", "next"]


def test_who_is_parked_for_ever_is_named():
    run = make_run(resources=[Parks()])
    run.add(make_request("a", PROMPT, 3))
    for _ in range(3):
        run.step()
    assert run.scheduler.make_stats().blocked == "a: resource"
    run.add(make_request("b", PROMPT, 3, user="x"))
    run.step()
    assert run.scheduler.make_stats().blocked == ""


class ParksBig(Parks):
    """Wants room for more blocks than there are."""

    def fit(self, req, num_tokens, step):
        return super().fit(req, num_tokens, step)._replace(room=0 if req.user else 1 << 30)


def test_who_wants_more_room_than_there_is_ends_and_holds_up_nobody():
    run = make_run(resources=[ParksBig()])
    run.add(make_request("a", PROMPT, 3))
    run.add(make_request("b", PROMPT, 3, user="x"))
    run.drain()
    assert run.finished == {"a": ("error", None), "b": ("length", None)}
    assert "there are only 999" in run.ends["a"].message


def test_who_is_parked_is_woken_if_its_resource_is_left_out():
    parks = Parks()
    run = make_run(resources=[parks])
    run.add(make_request("a", PROMPT, 3))
    run.step()
    parks.is_broken = True
    for _ in range(10):
        run.step()
    assert run.outputs["a"] == expected(PROMPT, 3)


class Noted(Resource):
    def __init__(self):
        self.num_calls = 0

    def fit(self, req, num_tokens, step):
        self.num_calls += 1
        return Fit(num_tokens)


def test_a_request_that_is_refused_is_not_shown_to_further_resources():
    """Stores were searched for its blocks before its adapter was known, and so in vain."""
    first, second = Pace(3), Noted()
    run = make_run(resources=[first, second], max_num_batched_tokens=64)
    run.add(make_request("a", PROMPT, 1))
    run.step()
    run.step()
    assert not second.num_calls
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 1) and second.num_calls == 1


class BrokenLater(Tiers):
    is_broken = False

    def begin_step(self, step):
        assert not self.is_broken
        super().begin_step(step)


def test_who_waits_for_a_load_that_nobody_will_report_computes():
    stores = FakeCopies(["slow"], 99, 0)
    tiers = tiers_of(stores, BrokenLater)
    run = make_feature_run(resources=[tiers], stores=stores, num_blocks=8)
    request = make_request("a", [7] * 60, 4)
    for each in (request, make_request("other", [8] * 100, 4)):  # which takes all blocks
        run.add(each)
        run.drain()
    run.add(request)
    run.step()
    assert run.scheduler.get_request_counts().parked == 1
    tiers.is_broken = True
    for _ in range(10):
        run.step()
    assert run.outputs["a"] == answer(request)
    assert run.scheduler.is_transferring, "a load may still write into its blocks"


class Guesses(Resource):
    """Wants slots for drafts, and fails to say which."""

    def __init__(self, failing):
        self.failing = failing

    def extra(self, req, step):
        return 2

    def take(self, req, num_tokens, step):
        assert self.failing != "take"

    def describe(self, plan):
        assert self.failing != "describe"
        if self.failing == "counts":
            ones = np.ones(len(plan.rows), dtype=np.int32)
            plan.drafts = DraftPart(ones, ones * 0)
        if self.failing == "rows":
            plan.drafts = DraftPart(np.array([2], dtype=np.int32), np.array([5], dtype=np.int32))


@pytest.mark.parametrize("failing", ["take", "describe", "counts", "rows", ""])
def test_slots_for_drafts_that_nobody_named_are_padded(failing):
    """The worker read tokens that were not there, and the request never came to its next one."""
    run = make_run(resources=[Guesses(failing)], depth=2)
    run.num_drafts = 2
    run.add(make_request("a", PROMPT, 8))
    run.add(make_request("b", PROMPT[::-1], 20))
    run.drain()
    assert run.outputs == {"a": expected(PROMPT, 8), "b": expected(PROMPT[::-1], 20)}


class PreemptsGranted(Scheduler):
    """Preempts a request to which the step grants tokens."""

    def schedule(self):
        step = self.begin_step()
        self.serve(self.offers(step), step)
        self.preempt(self.roster.by_id["a"], step)
        return self.seal(step)


def test_a_loop_that_preempts_a_request_with_granted_tokens_fails():
    """Otherwise the plan would name a seat that is free, and the worker write into another."""
    run = make_run(scheduler_cls=PreemptsGranted)
    run.add(make_request("a", PROMPT, 8))
    with pytest.raises(AssertionError, match="preempted in the step that grants it tokens"):
        run.scheduler.schedule()


def calling_back(hook, call):
    """A resource that calls the scheduler that asks it, once."""

    class CallsBack(Resource):
        is_armed = False

        def attach(self, scheduler):
            self.scheduler = scheduler

    def call_back(self, *args):
        is_armed, self.is_armed = self.is_armed, False
        if is_armed:
            call(self.scheduler)
        return getattr(Resource, hook)(self, *args)

    setattr(CallsBack, hook, call_back)
    return CallsBack()


CALLS = {
    "add_request": lambda scheduler: scheduler.add_request(make_request("new", PROMPT, 3)),
    "finish_requests": lambda scheduler: scheduler.finish_requests(None),
    "reset_prefix_cache": lambda scheduler: scheduler.reset_prefix_cache(reset_running=True),
    "schedule": lambda scheduler: scheduler.schedule(),
    "take_outputs": lambda scheduler: scheduler.take_outputs(),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "hook",
    [
        *("objection", "added", "watches", "begin_step", "extra", "fit", "take", "release"),
        *("describe", "settle"),
    ],
)
def test_a_hook_that_calls_back_is_named_and_changes_nothing(hook, call, depth):
    """Requests ended in the middle of the step that had granted them tokens."""
    resource = calling_back(hook, CALLS[call])
    run = make_run(resources=[resource], depth=depth, num_blocks=20)
    prompts = [[index + 1] * 20 for index in range(4)]
    for index, prompt in enumerate(prompts):
        resource.is_armed |= index == 1
        run.add(make_request(str(index), prompt, 3 + index))
    run.drain()
    assert list(run.outputs.values()) == [expected(p, 3 + i) for i, p in enumerate(prompts)]
    (fault,) = run.scheduler.guard.faults.messages
    assert f"RuntimeError: {call}() was called within " in fault
