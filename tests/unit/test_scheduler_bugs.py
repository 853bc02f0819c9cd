"""Mistakes that were found once, each in its smallest form."""

from __future__ import annotations

import itertools

import pytest
from support.simulate import expected, make_request, make_run, make_scheduler

from engine.sched.policies import FCFS, FastServe
from engine.sched.policy import Admission
from engine.sched.resource import Fit, OnRefuse, Resource
from engine.sched.scheduler import Scheduler
from engine.sched.table import SERIAL, WATCHED
from policylab.verify.fake import DigestWorker

PROMPT = list(range(100, 140))


class Skips(FCFS):
    """Passes over the requests of one user."""

    def admit(self, req, view):
        return Admission.SKIP if req.user == "later" else super().admit(req, view)


def test_a_skipped_request_does_not_close_admission():
    scheduler = make_scheduler(policy=Skips())
    scheduler.add_request(make_request("a", PROMPT, user="later"))
    scheduler.add_request(make_request("b", PROMPT))
    scheduler.schedule()
    assert [req.request_id for req in scheduler.roster.running] == ["b"]


class OneUser(Resource):
    """Serves one user at a time."""

    def __init__(self, on_refuse=OnRefuse.SKIP):
        self.on_refuse = on_refuse

    def fit(self, req, num_tokens, step):
        return Fit(num_tokens if req.user == "now" else 0, "user")


@pytest.mark.parametrize(
    ("on_refuse", "running", "parked"),
    [(OnRefuse.SKIP, ["b"], []), (OnRefuse.CLOSE, [], []), (OnRefuse.PARK, ["b"], ["a"])],
)
def test_a_refusal_means_what_the_resource_says_of_itself(on_refuse, running, parked):
    scheduler = make_scheduler(resources=[OneUser(on_refuse)])
    scheduler.add_request(make_request("a", PROMPT, user="later"))
    scheduler.add_request(make_request("b", PROMPT, user="now"))
    scheduler.schedule()
    assert [req.request_id for req in scheduler.roster.running] == running
    assert list(scheduler.roster.parked) == parked


class HalfAtMost(Resource):
    """Cuts every grant, and would let others pass."""

    def fit(self, req, num_tokens, step):
        return Fit(min(num_tokens, 8), "half", OnRefuse.SKIP)


def test_nobody_overtakes_a_request_that_lacks_blocks_though_a_resource_cut_it():
    scheduler = make_scheduler(num_blocks=6, resources=[HalfAtMost()])
    for name, length in [("a", 40), ("b", 70), ("c", 10)]:
        scheduler.add_request(make_request(name, [ord(name)] * length, 2))
    scheduler.schedule()
    assert [req.request_id for req in scheduler.roster.running] == ["a"]


def test_the_cap_on_long_prompts_cannot_block_where_prompts_are_not_cut():
    """Two prompts above the cap waited for each other for ever."""
    run = make_run(
        max_num_batched_tokens=64,
        max_model_len=64,
        max_num_seqs=4,
        long_prefill_token_threshold=10,
        enable_chunked_prefill=False,
    )
    for name in "ab":
        run.add(make_request(name, [ord(name)] * 40, 3))
    run.drain()
    assert {end for end, _ in run.finished.values()} == {"length"}


class Endless(FCFS):
    """Names the head of the queue until it is taken."""

    def next_waiting(self, view):
        return view.waiting[0] if len(view.waiting) else None


@pytest.mark.parametrize("num_running", [0, 20])
def test_an_order_without_end_ends(num_running):
    run = make_run(num_blocks=1 + 3 * 20 + 3, policy=Endless(), max_num_seqs=32)
    for index in range(num_running):
        run.add(make_request(str(index), [index] * 33, 10))
    run.step()
    for name in "ab":
        run.add(make_request(name, [ord(name)] * 47, 2))
    run.drain()
    assert run.outputs["b"] == expected([ord("b")] * 47, 2)


class Fussy(FCFS):
    """Cannot take every request."""

    def rank(self, req, view):
        view.kv.lookup(req)
        return (req.hints["weight"], req.arrival)


@pytest.mark.parametrize("hints", [None, {"weight": None}])
def test_a_request_the_policy_cannot_rank_goes_last(hints):
    run = make_run(policy=Fussy())
    run.add(make_request("a", PROMPT, 2, hints={"weight": 1}))
    run.add(make_request("b", PROMPT[::-1], 2, hints=hints))
    run.add(make_request("c", PROMPT, 2, hints={"weight": 2}))
    assert [req.request_id for req in run.scheduler.roster.waiting] == ["a", "c", "b"]
    run.drain()
    assert run.outputs["b"] == expected(PROMPT[::-1], 2)
    (message,) = run.scheduler.guard.faults.messages
    assert message.startswith("Fussy.rank, request b: ")


class Float(FCFS):
    def chunk(self, req, num_tokens, view):
        return num_tokens / 2 + 0.5


def test_a_chunk_may_be_a_float():
    run = make_run(policy=Float())
    run.add(make_request("a", PROMPT, 3))
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 3)


class EvictsAnybody(FCFS):
    def evict(self, view):
        return list(view.waiting)


class TakesAnybody(FCFS):
    def victim(self, candidates, req, view):
        return req


def test_illegal_answers_are_named_and_answered_by_default():
    run = make_run(policy=EvictsAnybody())
    run.add(make_request("a", PROMPT, 3))
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 3)
    assert "EvictsAnybody.evict: returns Request('a'" in run.scheduler.guard.faults.messages[0]
    run = make_run(num_blocks=7, caching=False, policy=TakesAnybody())
    for name in "ab":
        run.add(make_request(name, [ord(name)] * 48, 9))
    run.drain()
    assert run.outputs["a"] == expected([ord("a")] * 48, 9)
    assert "TakesAnybody.victim, request a: returns Req" in run.scheduler.guard.faults.messages[0]


def poisoned(depth, **options):
    """A run in which the whole prompt of request "bad" is rubbish."""
    run = make_run(depth=depth, block_size=4, **options)
    pool = run.scheduler.kv.pool
    run.worker = DigestWorker(
        pool.num_blocks,
        4,
        fail=lambda seq, position: "poison" if seq.request_id == "bad" else None,
    )
    return run


def test_what_a_request_wrote_leaves_the_cache_if_it_fails_after_its_abort():
    run = poisoned(depth=2)
    run.add(make_request("bad", PROMPT, 20))
    run.launch()
    run.scheduler.finish_requests("bad")
    run.finished["bad"] = ("abort", None)
    run.add(make_request("a", PROMPT, 5))  # adopts it before the failure is known
    run.drain()
    run.add(make_request("b", [*PROMPT, 1, 2, 3, 4], 5))
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 5)
    assert run.outputs["b"] == expected([*PROMPT, 1, 2, 3, 4], 5)


def test_what_a_request_wrote_leaves_the_cache_if_it_fails_after_its_preemption():
    run = poisoned(depth=2, num_blocks=23)
    run.add(make_request("first", [7] * 40, 20))
    run.add(make_request("bad", PROMPT, 20))
    run.launch()
    step = run.scheduler.begin_step()
    run.scheduler.preempt(run.scheduler.roster.by_id["bad"], step)
    plan = run.scheduler.seal(step)
    run.flight.append((plan, run.worker.launch(plan)))
    run.settle()
    assert run.finished["bad"] == ("error", None)
    run.add(make_request("a", PROMPT, 5))
    run.drain()
    assert run.outputs["a"] == expected(PROMPT, 5)


def test_what_was_made_of_rubbish_leaves_the_cache_though_its_writer_was_aborted():
    longer = [*PROMPT, *range(8)]
    run = poisoned(depth=3)
    run.add(make_request("bad", PROMPT, 20))
    run.launch()
    run.add(make_request("aborted", longer, 5))
    run.launch()  # adopts the prompt, publishes two blocks more
    run.scheduler.finish_requests("aborted")
    run.finished["aborted"] = ("abort", None)
    run.settle()
    run.add(make_request("a", PROMPT, 1))
    run.drain()  # the prompt is in the cache again, and right
    run.add(make_request("b", [*longer, 9], 5))
    run.drain()
    assert run.outputs["b"] == expected([*longer, 9], 5)


def test_a_late_token_made_of_rubbish_does_not_count():
    """Its request adopted the rubbish and gave its blocks back before the failure was known."""
    run = poisoned(depth=2)
    run.add(make_request("bad", PROMPT, 20))
    run.launch()
    run.add(make_request("a", PROMPT, 5))
    run.launch()
    step = run.scheduler.begin_step()
    run.scheduler.preempt(run.scheduler.roster.by_id["a"], step)
    plan = run.scheduler.seal(step)
    run.flight.append((plan, run.worker.launch(plan)))
    run.drain()
    assert run.finished["bad"] == ("error", None)
    assert run.outputs["a"] == expected(PROMPT, 5)


class EveryOther(Scheduler):
    """After the prompt, odd and even requests take turns."""

    def tokens_for(self, req, step):
        fit = super().tokens_for(req, step)
        return fit if req.is_waiting else fit._replace(num_tokens=(req.arrival + step.index) % 2)


def test_a_scheduler_with_parts_of_its_own_is_asked_about_everybody():
    run = make_run(scheduler_cls=EveryOther, max_num_seqs=32)
    for index in range(32):
        run.add(make_request(str(index), [index] * 4, 5))
    run.step()
    run.step()
    run.step()
    assert [len(plan) for plan in run.plans] == [32, 16, 16]


class Idles(FCFS):
    """Never offers anything, and keeps count of what was granted."""

    def __init__(self):
        self.granted = {}

    def order(self, view):
        return iter(())

    def on_grant(self, req, num_tokens, view):
        self.granted[req.request_id] = self.granted.get(req.request_id, 0) + num_tokens


def test_a_policy_hears_of_what_was_granted_in_its_place():
    policy = Idles()
    run = make_run(policy=policy)
    run.add(make_request("a", PROMPT, 3))
    run.drain()
    assert policy.granted == {"a": len(PROMPT) + 2}


def test_a_row_may_fail_among_many_while_another_starts():
    """In columns nobody kept the places in the plan; the row that failed had one."""
    run = make_run(
        num_blocks=200,
        max_num_seqs=32,
        fail=lambda seq, position: "poison" if seq.request_id == "5" else None,
    )
    for index in range(20):
        run.add(make_request(str(index), [index] * 4, 5))
    run.drain()
    assert run.finished["5"] == ("error", None)
    assert run.outputs["6"] == expected([6] * 4, 5)


def test_those_who_were_lifted_do_not_evict_each_other_for_ever():
    """FastServe evicted at the last token of a prompt, and nobody ever came to its first token."""
    now = itertools.count()
    run = make_run(
        policy=FastServe(quantum=0.01, max_wait=0.25),
        num_blocks=9,
        block_size=2,
        caching=False,
        max_num_batched_tokens=1,
        max_num_seqs=1,
        clock=lambda: next(now) / 64,
    )
    for name, length in [("a", 13), ("b", 12), ("c", 13), ("d", 8)]:
        run.add(make_request(name, [ord(name)] * length, 1))
    run.drain(limit=400)
    assert run.outputs["c"] == expected([ord("c")] * 13, 1)


def test_a_deadline_in_a_step_of_many_rows_that_end():
    """The one that expires joins columns whose members share their lists."""
    now = [0.0]
    run = make_run(depth=2, clock=lambda: now[0], max_num_seqs=32)
    for index in range(30):
        run.add(make_request(str(index), [index + 1], 3))
    run.step()
    run.add(make_request("late", PROMPT, 9, end_deadline=1.0))
    run.launch()
    now[0] = 2.0
    run.drain()
    assert run.finished["late"] == ("deadline", None)
    assert all(run.outputs[str(i)] == expected([i + 1], 3) for i in range(30))


class Forgets(OneUser):
    """Parks everybody and fails to remember the first."""

    asked = 0

    def fit(self, req, num_tokens, step):
        return Fit(num_tokens if self.asked > 1 else 0, "user")

    def parked(self, req):
        self.asked += 1
        if self.asked == 1:
            raise KeyError(req.request_id)
        self.scheduler.wake(req.request_id)

    def attach(self, scheduler):
        self.scheduler = scheduler


def test_a_request_whose_resource_failed_to_park_it_is_asked_about_again():
    run = make_run(resources=[Forgets(OnRefuse.PARK)])
    run.add(make_request("a", PROMPT, 3))
    for _ in range(9):
        run.step()
    assert run.outputs["a"] == expected(PROMPT, 3)


class Looks(Resource):
    """Has a say in each step, and nothing to say; watches as it is told."""

    def __init__(self, *, serial=False):
        self.wish = False
        self.serial = serial

    def attach(self, scheduler):
        self.scheduler = scheduler

    def watches(self, req):
        return self.wish

    def serializes(self, req):
        return self.serial

    def fit(self, req, num_tokens, step):
        return Fit(num_tokens)


@pytest.mark.parametrize("num_requests", [2, 20])  # granted one by one, and in columns
def test_a_flag_that_says_something_else_makes_no_request_serial(num_requests):
    """Flags were compared by order, so any third one stood for SERIAL too."""
    other = 4
    run = make_run(depth=2, max_num_seqs=num_requests, resources=[Looks()])
    for index in range(num_requests):
        run.add(make_request(str(index), [index + 1] * 4, 8))
        run.scheduler.roster.by_id[str(index)].table.flags.at[index] |= other
    run.step()
    assert [len(plan) for plan in run.plans] == [num_requests] * 2
    req = run.scheduler.roster.by_id["0"]
    assert not req.is_serial


def test_watching_again_changes_no_other_flag():
    looks, other = Looks(serial=True), 4
    run = make_run(resources=[looks])
    run.add(make_request("0", [1] * 4, 8))
    req = run.scheduler.roster.by_id["0"]
    req.table.flags.at[req.row] |= other
    for looks.wish, flags in ((True, WATCHED | SERIAL | other), (False, SERIAL | other)):
        run.scheduler.watch_again(req)
        assert req.table.flags.at[req.row] == flags
