"""Cache policies decide which free KV blocks keep their content longest."""

from __future__ import annotations

import math
import random

import pytest
from support.simulate import Run, expected, make_request, make_run, random_requests

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, PolicyError
from engine.kv.manager import KVManager
from engine.sched import CachePolicy, Keep, Policy, SchedulerInterface
from engine.sched.cache_policies import LRU, Shares
from engine.sched.plugins.find import CACHE_POLICIES, choose, find_cache_policy, make_scheduler
from engine.sched.policies import POLICIES
from engine.sched.policies.continuum import Continuum, Programs
from policylab.sim.run import Engine, run

PROMPT = [(7 * k) % 991 for k in range(3000)]
OTHER = [(11 * k + 5) % 983 for k in range(3000)]
FCFS = POLICIES["fcfs"]()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Answers(CachePolicy):
    """Keeps the blocks of each request as the test says, by the request's id."""

    def __init__(self, max_pinned: float = 1.0, **answers: object) -> None:
        self.max_pinned = max_pinned
        self.answers = answers
        self.calls: list[tuple[str, bool]] = []

    def keep(self, req, has_ended, view):
        self.calls.append((req.request_id, has_ended))
        answer = self.answers.get(req.request_id)
        if isinstance(answer, Exception):
            raise answer
        return answer


def serve(run: Run, name: str, prompt: list[int], max_tokens: int = 4, **fields: object) -> int:
    """Serve one request alone, check its tokens, and return how many came from the cache."""
    run.add(make_request(name, prompt, max_tokens, **fields))
    run.drain()
    assert run.outputs[name] == expected(prompt, max_tokens)
    return run.starts[name][0].num_cached_tokens


def flush(run: Run, name: str = "flush", num_blocks: int = 20) -> None:
    """Serve a request of its own content that needs this many blocks."""
    rng = random.Random(name)
    serve(run, name, [rng.randrange(1000) for _ in range(16 * num_blocks - 4)], 1)


# -- order and pins


def test_blocks_of_a_lower_priority_are_taken_first():
    answers = Answers(a=Keep(1.0), b=Keep(-1.0))
    run = make_run(num_blocks=31, cache_policy=answers)
    for name, prompt in (("a", PROMPT[:100]), ("b", OTHER[:100]), ("c", PROMPT[200:300])):
        serve(run, name, prompt)
    flush(run)  # 13 blocks without content, 6 of b, 1 of c
    assert serve(run, "a again", PROMPT[:100]) == 96
    assert serve(run, "b again", OTHER[:100]) == 0


def test_pinned_content_outlives_what_was_used_later_and_no_longer_than_its_time():
    hits = {}
    for cache_policy in (None, Answers(a=Keep(until=10.0))):
        for later in (9.0, 10.0):
            clock = Clock()
            run = make_run(num_blocks=31, cache_policy=cache_policy, clock=clock)
            serve(run, "a", PROMPT[:100])
            clock.now = later
            for number in range(3):
                flush(run, f"{number}", 24)
                assert run.scheduler.kv.num_pinned == 6 * bool(cache_policy and later < 10.0)
            hits[cache_policy is not None, later] = serve(run, "b", PROMPT[:100])
    assert hits == {(False, 9.0): 0, (False, 10.0): 0, (True, 9.0): 96, (True, 10.0): 0}


def test_pins_make_no_request_wait():
    """A pool that is pinned for ever serves a request that needs all of it."""
    run = make_run(num_blocks=31, cache_policy=Answers(a=Keep(until=math.inf)))
    serve(run, "a", PROMPT[:470])
    assert run.scheduler.kv.num_pinned == run.scheduler.kv.num_free - 1 == 29
    flush(run, num_blocks=30)
    assert run.scheduler.kv.num_pinned == 0
    assert not run.scheduler.make_stats().num_preemptions


def test_a_prefix_is_pinned_up_to_the_cap():
    run = make_run(num_blocks=41, cache_policy=Answers(max_pinned=0.1, a=Keep(until=9.0)))
    serve(run, "a", PROMPT[:200])
    assert run.scheduler.kv.num_pinned == 4
    flush(run, num_blocks=36)
    assert serve(run, "b", PROMPT[:200]) == 4 * 16


def test_a_pin_is_not_shortened_by_requests_of_others_but_by_its_owner():
    others = {"b": None, "c": Keep(owner="c"), "d": Keep(until=5.0, owner="d")}
    run = make_run(num_blocks=41, cache_policy=Answers(a=Keep(until=9.0, owner="a"), **others))
    serve(run, "a", PROMPT[:100])
    for name in others:
        assert serve(run, name, PROMPT[:100]) == 96
        assert run.scheduler.kv.num_pinned == 6
    run = make_run(num_blocks=41, cache_policy=Answers(a=Keep(until=9.0), b=Keep()))
    serve(run, "a", PROMPT[:100])
    serve(run, "b", PROMPT[:100])
    assert run.scheduler.kv.num_pinned == 0


def test_a_policy_learns_whether_a_request_was_preempted():
    answers = Answers()
    run = make_run(num_blocks=11, cache_policy=answers)
    run.add(make_request("a", PROMPT[:60], 90))
    run.add(make_request("b", OTHER[:60], 90))
    run.drain()
    assert answers.calls == [("b", False), ("a", True), ("b", True)]


def test_a_reset_of_the_cache_ends_all_pins():
    run = make_run(num_blocks=31, cache_policy=Answers(a=Keep(until=9.0)))
    serve(run, "a", PROMPT[:100])
    assert run.scheduler.reset_prefix_cache()
    assert run.scheduler.kv.num_pinned == 0
    assert serve(run, "b", PROMPT[:100]) == 0


def test_snapshots_of_states_are_kept_with_the_kv_before_them():
    hits = []
    for cache_policy in (None, Answers(a=Keep(until=9.0))):
        run = make_run(num_blocks=41, snapshot_blocks=2, cache_policy=cache_policy)
        serve(run, "a", PROMPT[:100])
        flush(run, "1", 24)
        flush(run, "2", 24)
        hits.append(serve(run, "b", PROMPT[:100]))
    assert hits == [0, 96]


# -- shipped policies


def test_a_program_finds_its_kv_after_a_tool_call_however_much_others_need():
    hits = []
    for cache_policy in (None, Programs()):
        run = make_run(num_blocks=41, cache_policy=cache_policy)
        serve(run, "a", PROMPT[:160], hints={"program": "p"})
        for number in range(4):
            flush(run, f"other {number}")
        next_prompt = [*PROMPT[:160], *run.outputs["a"], *OTHER[:20]]
        hits.append(serve(run, "b", next_prompt, hints={"program": "p"}))
    assert hits == [0, 160]


def test_programs_keep_for_as_long_as_their_returns_are_worth():
    clock = Clock()
    policy = Programs(price=0.001)
    run = make_run(num_blocks=41, cache_policy=policy, clock=clock)

    def call(name: str, program: str, after: float) -> float:
        """Serve a request; returns for how long its blocks are pinned, in seconds."""
        clock.now += after
        begun = clock.now
        fields = {"hints": {"program": program}, "arrival_time": clock.now}
        serve(run, name, PROMPT[:160], **fields)
        while run.scheduler.kv.num_pinned and clock.now < begun + 50.0:
            clock.now += 0.25
            run.scheduler.schedule()
        pinned, clock.now = clock.now - begun, begun
        return pinned

    assert call("first", "p", 0.0) == policy.first
    waits = [call(f"{n}", "p", 0.75) for n in range(9)]
    assert waits == [1.0] * 9  # nobody took longer
    far = [call(f"far {n}", "p", 40.0) for n in range(4)]
    assert far == [1.0] * 4  # those who take 40 s are not worth it
    ended = [call(f"end {n}", f"q{n}", 0.0) for n in range(200)]
    assert ended[-1] == 0.0  # hardly anyone returns


def test_continuum_goes_on_with_old_programs_and_spares_what_it_keeps_for_them():
    clock, policy = Clock(), Continuum()
    run = make_run(num_blocks=41, policy=policy, cache_policy=policy, clock=clock)
    of = {name: {"hints": {"program": name}} for name in ("old", "new", "large")}
    serve(run, "old 1", PROMPT[:160], **of["old"])
    run.add(make_request("busy", [*range(160)], 60))
    run.step()
    clock.now = 1.0
    large = make_request("large", OTHER[:340], 4, arrival_time=1.0, **of["large"])
    run.add(large)  # 22 blocks, of 30 free ones of which 10 are pinned
    run.step()
    assert run.scheduler.get_request_counts().waiting == 1
    follower = make_request("old 2", [*PROMPT[:160], 5, 6], 4, arrival_time=1.0, **of["old"])
    run.add(follower)
    run.step()
    assert [req.request_id for req in run.scheduler.view.waiting] == ["large"]
    run.drain()
    assert run.starts["old 2"][0].num_cached_tokens == 160


def test_a_user_keeps_no_more_than_a_share():
    hits = []
    for cache_policy in (None, Shares(0.5)):
        run = make_run(num_blocks=41, cache_policy=cache_policy)
        serve(run, "ann", PROMPT[:160], user="ann")
        for number in range(8):
            prompt = [number * 100 + k for k in range(100)]
            serve(run, f"bob {number}", prompt, user="bob")
        hits.append(serve(run, "ann again", PROMPT[:160], user="ann"))
    assert hits == [0, 144]


@pytest.mark.parametrize("seed", range(6))
def test_lru_plans_as_without_a_cache_policy(seed):
    rng = random.Random(seed)
    num_blocks = rng.randint(9, 20)
    requests = random_requests(rng, 25, longest=60)
    plans = []
    for cache_policy in (None, LRU(), Answers(**{req.request_id: Keep() for req in requests})):
        run = make_run(num_blocks=num_blocks, cache_policy=cache_policy, max_num_seqs=5)
        for req in requests:
            run.add(req)
            run.step()
        run.drain()
        plans.append((run.plans, run.scheduler.kv.pool.free_order()))
    assert plans[0] == plans[1] == plans[2], f"seed {seed}"


# -- faults and options


WRONG = {
    "raises": RuntimeError("no"),
    "is a number": 3,
    "is NaN": Keep(math.nan),
    "ends never": Keep(until=math.nan),
    "is text": Keep("high"),
    "has no owner": Keep(owner=None),
    "is below 0": Keep(most=-1),
    "is half": Keep(most=1.5),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_reported_and_leaves_the_blocks_as_they_were(name, caplog):
    run = make_run(num_blocks=41, cache_policy=Answers(a=WRONG[name], b=Keep(until=9.0)))
    serve(run, "a", PROMPT[:100])
    stats = run.scheduler.make_stats()
    assert stats.num_policy_faults == 1
    assert "Answers.keep, request a: " in caplog.text
    serve(run, "b", PROMPT[:100])
    assert run.scheduler.kv.num_pinned == 6


def test_after_too_many_faults_the_policy_is_disabled_and_its_pins_end(caplog):
    answers = Answers(a=Keep(until=9.0), **{f"b{n}": RuntimeError("no") for n in range(9)})
    run = make_run(num_blocks=41, cache_policy=answers)
    serve(run, "a", PROMPT[:100])
    for number in range(9):
        serve(run, f"b{number}", OTHER[:20])
    assert len(answers.calls) == 5 and run.scheduler.kv.num_pinned == 0
    assert "cache policy Answers is disabled after 4 faults" in caplog.text


class Both(Policy, CachePolicy):
    def rank(self, req, view):
        return (req.arrival,)

    def keep(self, req, has_ended, view):
        return Keep(until=view.now + 1.0)


class Misspelt(CachePolicy):
    def keep(self, req, view):
        return None


class TooMuch(LRU):
    max_pinned = 2.0


class Cheap(Programs):
    """Keeps KV for longer than is worth it."""

    def __init__(self) -> None:
        super().__init__(price=0.1)


class OwnScheduler(SchedulerInterface):
    def __init__(self, *args, **kwargs):
        pass

    def no(self, *args, **kwargs):
        raise NotImplementedError

    add_request = schedule = update_from_output = finish_requests = no
    get_request_counts = has_finished_requests = no


def test_a_cache_policy_is_found_by_name_path_class_or_object_or_in_the_scheduling_policy():
    policy = Shares(0.5)
    for name in ("shares", "engine.sched.cache_policies.Shares", Shares):
        assert type(find_cache_policy(name, FCFS)) is Shares
    assert find_cache_policy(policy, FCFS) is policy
    assert find_cache_policy(None, FCFS) is None
    both = Both()
    assert find_cache_policy(None, both) is both
    assert type(find_cache_policy("lru", both)) is LRU
    assert choose(SchedulerConfig(scheduling_policy=both)).cache_policy is both
    assert {*CACHE_POLICIES} == {"lru", "programs", "shares"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("program", "did you mean 'programs'"),
        (FCFS, "it is a policy: give it as scheduling_policy"),
        (Misspelt, "must take"),
        (TooMuch, "TooMuch: max_pinned is 2.0, must be a number from 0 to 1"),
    ],
)
def test_a_wrong_option_is_refused(option, message):
    with pytest.raises((ConfigError, PolicyError), match=message):
        choose(SchedulerConfig(cache_policy=option))


def test_a_scheduler_without_a_view_takes_no_cache_policy():
    config = SchedulerConfig(cache_policy="programs", scheduler_cls=OwnScheduler)
    chosen = choose(config)
    with pytest.raises(ConfigError, match="is no subclass of it; leave one of them out"):
        make_scheduler(config, KVManager(chosen.pool(9), 4), clock=float, chosen=chosen)


def test_a_cache_policy_needs_its_pool():
    config = SchedulerConfig(scheduling_policy="continuum")
    with pytest.raises(
        ConfigError, match=r"Continuum needs .* choose\(config\).pool\(num_blocks\)"
    ):
        make_scheduler(config, KVManager(9, 4), clock=float)


# -- lab and replay


def test_the_lab_simulates_with_the_same_cache_policy():
    """With and without jumps over repeating steps."""
    workload, plans = "agents(num_requests=60, num_users=2)", {}
    for name in (None, "lru", Cheap, "shares"):
        for stretches in (True, False):
            engine = Engine(num_blocks=300, scheduler={"cache_policy": name}, stretches=stretches)
            made = run("fcfs", workload, engine, seed=3, rate=8.0)
            plans[name, stretches] = made.totals["decisions"]
        assert plans[name, True] == plans[name, False]
    assert plans[None, True] == plans["lru", True]
    assert len({*plans.values()}) == 3
