"""What a policy says and keeps of many requests at once, and what it is told of their tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.simulate import make_request, make_run
from support.timed import timed_run

from engine.errors import ConfigError, RequestError
from engine.sched import Policy
from engine.sched.plugins.find import find_policy
from engine.sched.plugins.ranks import RankCheck
from engine.sched.policies.fcfs import FCFS
from engine.sched.table import Names
from policylab.verify.testing import PolicyError, check_policy


class LongestFirst(Policy):
    dynamic = True

    def ranks(self, reqs, view):
        return -view.columns(reqs).num_prompt


class ShortestAfterAll(LongestFirst):
    """The nearest of the two stands for both."""

    def rank(self, req, view):
        return (req.num_prompt,)


class Neither(Policy):
    pass


class SaysTwoThings(LongestFirst):
    def rank(self, req, view):
        return (req.num_prompt,)

    def ranks(self, reqs, view):
        return super().ranks(reqs, view)


def started(policy, **options) -> list[str]:
    run = timed_run(policy, max_num_seqs=1, **options)
    run.ask("busy", 4, 3)
    run.steps(1)
    for name, size in (("b", 5), ("c", 9), ("d", 9), ("a", 1)):
        run.ask(name, size, 2)
    run.drain()
    return run.ended


def test_ranks_alone_are_enough_and_ties_go_by_arrival():
    assert started(LongestFirst()) == ["busy", "c", "d", "b", "a"]
    assert started(ShortestAfterAll()) == ["busy", "a", "b", "c", "d"]
    with pytest.raises(ConfigError, match="lacks rank"):
        find_policy(Neither, {})


def test_who_says_0_for_false_is_told_what_to_write():
    with pytest.raises(ConfigError, match=r"is 0 \(int\), must be True or False: write False"):
        find_policy("priority", {"preempt_for_waiting": 0})


def test_a_policy_that_says_two_things_is_told_so():
    with pytest.raises(PolicyError, match=r"rank returns \(\d+,\), ranks returns \(-\d+,\)"):
        check_policy(SaysTwoThings, steps=500, max_wait=None)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda n: np.zeros(n + 1), "shape"),
        (lambda n: np.zeros((n, 2)), "shape"),
        (lambda n: (np.zeros(n), np.full(n, math.nan)), "with a NaN as part 1"),
        (lambda n: np.full(n, None), "must hold numbers"),
        (lambda n: [(1,)] * (n - 1), "must be arrays, or a list"),
        (lambda n: [(1, None)] * n, "must hold numbers and strings"),
    ],
)
def test_wrong_arrays_are_named_and_the_former_order_stays(answer, fault):
    class Wrong(Policy):
        dynamic = True

        def rank(self, req, view):
            return (req.num_prompt,)

        def ranks(self, reqs, view):
            return answer(len(reqs))

    run = timed_run(Wrong(), max_num_seqs=1, max_policy_faults=1000)
    for name, size in (("b", 5), ("a", 1)):
        run.ask(name, size, 2)
    while run.scheduler.has_requests():
        run.step()
    messages = run.scheduler.guard.faults.messages
    assert messages and all(each.startswith("Wrong.ranks") for each in messages)
    assert any(fault in each for each in messages)


def test_ranks_in_arrays_have_as_many_places_each_time():
    check = RankCheck()
    assert check.wrong_places(2) is None and check.wrong_places(2) is None
    assert "cannot be compared with earlier ranks" in check.wrong_places(1)
    named = RankCheck()
    assert named.wrong(("a", 1)) is None and "2 arrays" in named.wrong_places(2)


def test_columns_say_what_requests_say():
    run = timed_run(LongestFirst(), num_blocks=24, block_size=4, max_num_seqs=3)
    for index in range(8):
        fields = {"deadline": 3.0 * index} if index % 2 else {"tbt": 0.25, "priority": -index}
        run.ask(str(index), 6 + index, 9, user="ab"[index % 2], **fields)
    for _ in range(6):
        run.step()
        view = run.scheduler.view
        for reqs in (view.running, view.waiting, [*view.unfinished][::-1]):
            columns = view.columns(reqs)
            assert len(columns) == len(reqs) and columns.requests == list(reqs)
            for name in ("arrival", "arrival_time", "priority", "num_prompt", "num_tokens",
                         "num_output", "num_computed", "num_pending", "num_uncomputed",
                         "max_total", "num_preempted", "is_waiting"):  # fmt: skip
                assert getattr(columns, name).tolist() == [getattr(r, name) for r in reqs], name
            for name, none in (("deadline", math.inf), ("tbt", math.inf)):
                said = [getattr(r, name) for r in reqs]
                assert getattr(columns, name).tolist() == [none if s is None else s for s in said]
            for name in ("first_token_time", "last_token_time"):
                said = [getattr(r, name) for r in reqs]
                found = getattr(columns, name).tolist()
                assert [None if f != f else f for f in found] == said
            cached = [view.kv.cached_prefix(r) if r.is_waiting else 0 for r in reqs]
            assert columns.cached_prefix.tolist() == cached
            assert columns.predicted.tolist() == [view.predict(r) for r in reqs]
            heads = {}
            for req in reqs:
                heads.setdefault(req.user, req)
            assert list(columns.heads().values()) == list(heads.values())
    assert view.unoffered_columns.requests == view.unoffered
    run.drain()


def test_a_remembered_prefix_is_forgotten_with_the_cache_and_with_its_request():
    run = timed_run(FCFS(), num_blocks=32, block_size=4, max_num_seqs=1)
    shared = list(range(1, 17))
    run.ask("first", shared)
    run.drain()
    run.ask("busy", 4, 99)
    run.step()
    run.ask("same", [*shared, 0])
    view = run.scheduler.view

    def remembered() -> list[int]:
        return view.columns(view.waiting).cached_prefix.tolist()

    assert remembered() == [16]
    row = view.waiting[0].row
    run.scheduler.finish_requests(["same"], "abort")
    run.ask("other", [0, *shared])  # as long, in the same row
    assert view.waiting[0].row == row and remembered() == [0]
    run.ask("again", [*shared, 0])
    assert remembered() == [0, 16]
    run.scheduler.finish_requests(["busy"], "abort")
    assert run.scheduler.reset_prefix_cache() and remembered() == [0, 0]


def test_numbers_of_a_policy_begin_anew_with_each_request_of_a_row():
    class Marks(FCFS):
        def on_add(self, req, view):
            assert view.own("mark", 7.0)[req] == 7.0
            view.own("mark")[req] = req.arrival

    run = make_run(policy=Marks(), max_policy_faults=0)
    for index in range(200):
        run.add(make_request(str(index), [index], 1))
        if index % 3:
            run.step()
    marks = run.scheduler.view.columns(list(run.scheduler.view.unfinished)).own("mark")
    assert marks.tolist() == [req.arrival for req in run.scheduler.view.unfinished]
    run.drain()
    assert not run.scheduler.guard.faults.messages


class Told(FCFS):
    def __init__(self):
        self.tokens, self.lost = [], []

    def on_tokens(self, reqs, view):
        now = view.now
        assert all(req.last_token_time == now and req.num_output for req in reqs)
        self.tokens += [(req.request_id, req.num_output, req.first_token_time) for req in reqs]
        view.count("tokens", len(reqs))

    def on_preempt(self, req, view):
        self.lost.append((req.request_id, req.num_computed))
        view.count("preempted")


@pytest.mark.parametrize("num_requests", [3, 20])  # one by one, and in columns
def test_a_policy_is_told_of_tokens_and_of_what_is_lost(num_requests):
    policy = Told()
    run = timed_run(policy, num_blocks=9 * num_requests // 3, block_size=4, max_num_seqs=32)
    for index in range(num_requests):
        run.ask(f"r{index}", 8, 9)
    run.drain()
    by_name = {}
    for name, num_output, first in policy.tokens:
        by_name.setdefault(name, []).append(num_output)
        assert first is not None
    assert by_name == {f"r{i}": list(range(1, 10)) for i in range(num_requests)}
    stats = run.scheduler.make_stats()
    assert stats.num_preemptions == len(policy.lost) > 0
    assert all(num_computed > 0 for _, num_computed in policy.lost)
    assert stats.counters == {
        "policy.tokens": 9 * num_requests,
        "policy.preempted": len(policy.lost),
    }


def test_counters_are_whole_numbers_and_not_too_many():
    view = make_run().scheduler.view
    view.count("a")
    view.count("a", np.int64(4))
    assert view.counters == {"a": 5}
    for name, value in (("a", 0.5), ("a", -1), (3, 1), ("a", "x")):
        with pytest.raises(ValueError, match="an integer of at least 0"):
            view.count(name, value)
    for index in range(255):
        view.count(str(index), 0)
    with pytest.raises(ValueError, match="at most 256 names"):
        view.count("one too many")


class NeverEvicts(FCFS):
    """Evicts nobody by choice; ``makes_room``: but a running request gets its blocks by rank."""

    def __init__(self, makes_room):
        self.makes_room, self.asked = makes_room, []

    def outranks(self, req, other):
        return False

    def takes_blocks(self, req, other):
        self.asked.append(req.is_waiting)
        return self.makes_room and self.precedes(req, other)

    def order(self, view):
        yield from super().order(view)


def test_who_makes_room_is_another_question_than_who_may_be_evicted(caplog):
    for makes_room in (True, False):
        policy = NeverEvicts(makes_room)
        run = timed_run(policy, num_blocks=10, block_size=4)
        for name in "abc":
            run.ask(name, 8, 12)
        run.may_be_rescued = True
        run.drain()
        assert policy.asked and not any(policy.asked)
        stats = run.scheduler.make_stats()
        assert stats.num_preemptions and not stats.num_policy_faults
        if makes_room:
            assert not stats.num_rescued_steps and not caplog.records


def test_a_promise_per_token_must_be_a_time():
    run = make_run()
    run.add(make_request("a", [1], 1, tbt=0.5))
    assert run.scheduler.view.by_id["a"].tbt == 0.5
    for wrong in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(RequestError, match="tbt of request 'b' is"):
            run.add(make_request("b", [1], 1, tbt=wrong))


def test_users_have_small_numbers_while_they_have_requests():
    users = Names()
    assert [users.enter(name) for name in "abab"] == [0, 1, 0, 1]
    users.leave(0)
    assert users.enter("c") == 2
    users.leave(0)
    assert [users.enter(name) for name in "dae"] == [0, 3, 4] and len(users) == 5
