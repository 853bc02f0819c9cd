"""What policies and clients may do that nobody thought of, each in its smallest form."""

from __future__ import annotations

import gc
from functools import partial

import numpy as np
import pytest
from support.fakes import FakeDecided
from support.simulate import expected, make_request, make_run

from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.errors import EngineDeadError, RequestError
from engine.sched.plugins.find import choose
from engine.sched.policies import FCFS
from engine.sched.policy import Defer, Limits
from engine.sched.request import Request
from engine.sched.resource import Fit, Resource
from engine.sched.scheduler import Scheduler
from policylab.verify.check import check_empty

PROMPT = list(range(100, 140))


class LooksBack(FCFS):
    """Asks the cache about requests that have ended."""

    def __init__(self):
        self.ended = []

    def rank(self, req, view):
        self.ask(view)
        return (req.arrival,)

    def on_finish(self, req, view):
        self.ended.append(req)
        self.ask(view)

    def ask(self, view):
        for old in self.ended:
            view.kv.cached_prefix(old)
            view.kv.missing(old, 8)
            assert not view.kv.held(old)


def test_who_asks_about_an_ended_request_changes_nothing_for_the_next_in_its_row():
    """The next one found the ended one's hashes in its row and read its KV."""
    run = make_run(policy=LooksBack())
    prompts = {name: [ord(name)] * 40 for name in "abcd"}
    for name, prompt in prompts.items():
        run.add(make_request(name, prompt, 5))
        run.drain()
    assert run.outputs == {name: expected(prompt, 5) for name, prompt in prompts.items()}
    assert not run.scheduler.guard.faults.messages


class Numerical(FCFS):
    """Answers in the types that numpy gives."""

    waiting_may_preempt = True

    def limits(self, view):
        return Limits(max_tokens=np.int64(500), admission=np.float64(1) < np.float64(2))

    def outranks(self, req, other):
        return np.float64(req.arrival) < np.float64(other.arrival)


class Unclear(FCFS):
    def limits(self, view):
        return Limits(admission=np.array([1, 2]))


class Untold(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Speechless(FCFS):
    def admit(self, req, view):
        raise Untold


class LateLedger(FCFS):
    """Would like to read a ledger that was not kept from the start."""

    def on_step(self, shape, view):
        self.uses_ledger = True


class Ragged(FCFS):
    """A name stands where other ranks have the number of arrival behind them."""

    def rank(self, req, view):
        return (1,) if req.arrival % 2 else (1, "x")


class EvictsNothing(FCFS):
    def evict(self, view):
        """Forgets to return anything."""


@pytest.mark.parametrize(
    ("policy", "fault"),
    [
        (Numerical, ""),
        (Unclear, "whose admission must be True or False"),
        (Speechless, "Untold"),
        (LateLedger, ""),
        (Ragged, "cannot be compared with earlier ranks"),
        (EvictsNothing, "EvictsNothing.evict: returns None, must be iterable"),
    ],
)
def test_answers_nobody_thought_of(policy, fault):
    run = make_run(policy=policy(), num_blocks=8)
    prompts = [[index + 1] * 30 for index in range(4)]
    for index, prompt in enumerate(prompts):
        run.add(make_request(str(index), prompt, 10))
    run.drain()
    assert list(run.outputs.values()) == [expected(prompt, 10) for prompt in prompts]
    messages = run.scheduler.guard.faults.messages
    assert fault in messages[0] if fault else not messages


class Named(FCFS):
    """Ranks by name, until it fails for good: ranks by number come behind."""

    dynamic = True

    def __init__(self, hook):
        self.num_asked = 0
        if hook == "on_step":
            self.num_asked = -1000

    def on_add(self, req, view):
        return Defer(1.0) if req.user == "later" else None

    def rank(self, req, view):
        self.num_asked += 1
        if self.num_asked > 30 and self.num_asked % 2:
            raise KeyError("a bug of mine")
        return ("a", req.arrival)

    def on_step(self, shape, view):
        if self.num_asked < 0:
            raise KeyError("a bug of mine")


@pytest.mark.parametrize("hook", ["rank", "on_step"])
def test_ranks_stay_comparable_while_a_policy_is_left_out(hook):
    """Names and numbers met in one queue: of those who came, who waited and who were parked."""
    now = [0.0]
    run = make_run(policy=Named(hook), max_num_seqs=2, clock=lambda: now[0])
    run.add(make_request("deferred", PROMPT, 3, user="later"))
    for index in range(12):
        run.add(make_request(str(index), [index + 1] * 9, 30))
    while not run.scheduler.guard.is_left_out:
        run.step()
    run.add(make_request("new", PROMPT, 3))
    run.step()
    now[0] = 2.0
    run.drain()
    assert run.outputs["deferred"] == run.outputs["new"] == expected(PROMPT, 3)


class Plain(FCFS):
    """The simplest order there is, straight from the view."""

    def order(self, view):
        yield from view.running
        yield from view.waiting


def test_an_order_straight_from_the_queues_leaves_nobody_out():
    """Whoever was admitted left the queue, and the next one was passed over."""
    run = make_run(policy=Plain())
    for index in range(8):
        run.add(make_request(str(index), [index + 1] * 4, 3))
    run.step()
    assert list(run.plans[0]) == [str(index) for index in range(8)]


@pytest.mark.parametrize("name", ["arrival_time", "deadline", "queue_deadline", "end_deadline"])
@pytest.mark.parametrize("time", [float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(name, time):
    """Behind a deadline that is not a number no other one was ever due."""
    run = make_run()
    with pytest.raises(RequestError, match=f"{name} of request 'a' is {time}"):
        run.scheduler.add_request(make_request("a", PROMPT, 3, **{name: time}))
    check_empty(run.scheduler)


def test_timers_of_ended_requests_are_forgotten():
    def num_kept():
        return sum(type(each) is Request for each in gc.get_objects())

    run, before = make_run(), num_kept()
    for index in range(500):
        run.add(make_request(str(index), [1], 1, end_deadline=1e9))
        run.step()
    assert num_kept() - before <= 64


class Notes(FCFS):
    def __init__(self):
        self.known = set()

    def on_add(self, req, view):
        self.known.add(req)

    def on_finish(self, req, view):
        self.known.remove(req)


def test_whom_a_predictor_refuses_leaves_no_trace():
    run = make_run(policy=Notes(), length_predictor="oracle")
    with pytest.raises(RequestError):
        run.scheduler.add_request(make_request("a", PROMPT, 3))
    check_empty(run.scheduler)
    assert not run.scheduler.policy.known


class Asking(FCFS):
    """Has its decodes granted one by one."""

    def chunk(self, req, num_tokens, view):
        return num_tokens


@pytest.mark.parametrize("policy", [FCFS, Asking])
def test_an_engine_outlives_two_thousand_million_steps(policy):
    """At a thousand steps a second, or idle ones, that is 25 days."""
    run = make_run(policy=policy(), max_num_seqs=32)
    run.scheduler.settler.counters.num_steps = (1 << 31) - 5
    for index in range(20):
        run.add(make_request(str(index), [index] * 4, 9))
    run.drain()
    assert run.outputs["7"] == expected([7] * 4, 9)


def test_statistics_are_of_their_moment():
    run = make_run(clock=iter(range(1000)).__next__)
    run.add(make_request("a", PROMPT, 3))
    before = run.scheduler.make_stats()
    run.drain()
    assert before.wait_seconds == {} != run.scheduler.make_stats().wait_seconds


class Reads(FCFS):
    """Reads the counts of whom it is told of."""

    def __init__(self):
        self.read = []

    def on_grant(self, req, num_tokens, view):
        self.read.append((num_tokens, req.num_computed, req.num_pending, req.num_uncomputed))


class Watches(Resource):
    """Is asked about every row."""

    def fit(self, req, num_tokens, step):
        return Fit(num_tokens)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_grant_looks_the_same_whether_somebody_watches_the_row(depth):
    """Rows that nobody watches still had the counts from before their grant."""
    read = []
    for resources in ([], [Watches()]):
        run = make_run(policy=Reads(), resources=resources, depth=depth)
        run.add(make_request("a", PROMPT, 6))
        run.drain()
        read.append(run.scheduler.policy.read)
    assert read[0] == read[1] and read[0][1] == (1, 41, depth, 1)


class Quits(FCFS):
    def admit(self, req, view):
        raise SystemExit(3)


def test_a_core_that_was_left_in_the_middle_of_a_step_does_not_go_on():
    run = make_run(policy=Quits())
    client = InprocClient(EngineCore(run.scheduler, run.worker), FakeDecided())
    client.add(make_request("a", PROMPT, 3))
    with pytest.raises(SystemExit):
        client.step()
    with pytest.raises(EngineDeadError, match="SystemExit: 3"):
        client.step()


class Dawdles(FCFS):
    """Takes as long as it is told to."""

    def __init__(self):
        self.now = self.delay = 0.0

    def admit(self, req, view):
        self.now += self.delay
        return super().admit(req, view)


def test_a_hook_that_everybody_waits_for_is_named(caplog):
    policy = Dawdles()
    timed = partial(Scheduler, timer=lambda: policy.now)
    run = make_run(policy=policy, scheduler_cls=timed)
    for name, delay in (("a", 0.5), ("b", 2.5), ("c", 3.0), ("d", 6.0)):
        policy.delay = delay
        run.add(make_request(name, PROMPT, 1))
        run.drain()
    named = [record.getMessage() for record in caplog.records]
    assert named == [  # not every time: it would be a line a step
        "Dawdles.admit took 2.5 s in one step and delayed all requests",
        "Dawdles.admit took 6.0 s in one step and delayed all requests",
    ]


class Forgets(Scheduler):
    def schedule(self):
        step = self.begin_step()
        self.serve(self.offers(step), step)
        self.seal(step)


def test_a_loop_that_forgets_its_plan_is_named():
    run = make_run(scheduler_cls=Forgets)
    client = InprocClient(EngineCore(run.scheduler, run.worker), FakeDecided())
    client.add(make_request("a", PROMPT, 3))
    with pytest.raises(
        EngineDeadError, match=r"Forgets\.schedule\(\) returned None, must return a"
    ):
        client.step()


class Idles(FCFS):
    def limits(self, view):
        return Limits(max_tokens=0)


def test_a_policy_that_lets_nobody_run_is_named_once(caplog):
    run = make_run(policy=Idles())
    run.add(make_request("a", PROMPT, 4))
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 4)
    assert [record.getMessage()[:28] for record in caplog.records] == [
        "Idles.limits scheduled no re"
    ]


def test_weights_that_nobody_looks_at_are_told(caplog):
    choose(SchedulerConfig(user_weights={"ann": 2.0}))
    choose(SchedulerConfig(user_weights={"ann": 2.0}, scheduling_policy="vtc"))
    (record,) = caplog.records
    assert record.getMessage().startswith("user_weights has no effect: policy FCFS ignores it")
