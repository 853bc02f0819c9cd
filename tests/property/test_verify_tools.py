"""The tools of verification find what is broken, make it small and say where it is."""

import contextlib
import io
import logging
import random
import re
from importlib.metadata import entry_points
from itertools import pairwise

import pytest

from engine.cli.main import main
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, PolicyError
from engine.messages.step import StepPlan
from engine.sched import Admission, Defer, Refuse
from engine.sched.policies import FCFS
from engine.sched.scheduler import Scheduler
from policylab.verify.case import Abort, Add, Case, Setup, from_json, to_json
from policylab.verify.draw import draw_case
from policylab.verify.shrink import Clocked, shrink
from policylab.verify.simulation import Simulation
from policylab.verify.starvation import Outcome, wait_in_overload
from policylab.verify.swarm import Broken, FoundCase, Swarm, reproduction, smallest
from policylab.verify.testing import NotShown, check_policy

pytest_plugins = ["pytester"]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


class Good(FCFS):
    """Order of arrival, by a policy that the engine does not ship."""


class Raises(FCFS):
    """Cannot rank a second request."""

    def rank(self, req, view):
        return (1 // (1 - len(view.waiting)), req.arrival)


class Dices(FCFS):
    """Asks the world's dice instead of the engine's."""

    def admit(self, req, view):
        return Admission.SKIP if random.random() < 0.5 else super().admit(req, view)


class Starves(FCFS):
    """Shortest first, for ever."""

    def rank(self, req, view):
        return (req.num_prompt, req.arrival)


class Thrashes(FCFS):
    """Evicts everybody in every other step."""

    def evict(self, view):
        return list(view.running) if view.step.index % 2 else ()


def test_a_good_policy_passes() -> None:
    tally = check_policy(Good, steps=1000)
    assert tally.num_steps >= 1000 and tally.steps_by_policy["Good"] == tally.num_steps
    assert tally.steps_by_windows.total() == tally.num_steps and len(tally.steps_by_windows) > 1


@pytest.mark.parametrize(
    ("policy", "steps", "message"),
    [
        (
            Raises,
            4000,
            r"Raises, seed \d+: faults of plug-ins: \['Raises.rank, request [^:]+: Zero",
        ),
        (Dices, 4000, "the same case gives different plans"),
        (Starves, 100, "Starves: a request was not served in 1000 steps while better-ranked ones"),
        (Thrashes, 4000, r"was preempted \d+ times without a token|unfinished after"),
    ],
)
def test_a_bad_policy_is_named_with_hook_seed_and_request(policy, steps, message) -> None:
    with pytest.raises(PolicyError, match=message):
        check_policy(policy, steps=steps)


@pytest.mark.parametrize(
    ("policy", "how", "message"),
    [
        (Good, {"steps": 0}, "steps is 0, must be at least 1"),
        (Good, {"steps": "many"}, "steps is 'many' .str., must be a whole number"),
        (Good, {"seed": -1}, "seed is -1, must be at least 0"),
        (Good, {"max_wait": 0}, "max_wait is 0, must be at least 1"),
        (Good, {"options": {"busy": 1}}, "cannot be created with policy_options .*'busy'; its opt"),
        ("fcsf", {}, "did you mean 'fcfs'"),
    ],
)
def test_what_cannot_be_checked_is_refused(policy: object, how: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_policy(policy, **how)


def test_a_bad_policy_is_told_once_and_with_the_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "engine")
    with pytest.raises(PolicyError, match=r"ZeroDivisionError: .* \(test_verify_tools\.py:\d+\)"):
        check_policy(Raises, steps=4000)
    assert not caplog.messages and logging.getLogger("engine").level == logging.INFO


class RefusesAll(FCFS):
    """Takes nobody."""

    def on_add(self, req, view):
        return Refuse("closed")


class RefusesLong(FCFS):
    """Takes nobody with a prompt like that of the request which is to be served."""

    def on_add(self, req, view):
        return Refuse("too long") if req.num_prompt >= 20 else None


class RefusesShort(FCFS):
    """Takes the request which is to be served, and none of those that keep coming."""

    def on_add(self, req, view):
        return Refuse("too short") if req.num_prompt < 20 else None


class RefusesLate(FCFS):
    """Takes nobody who wants an answer within two seconds, as all that keep coming do."""

    def on_add(self, req, view):
        late = req.deadline is not None and req.deadline < view.now + 2
        return Refuse("too late") if late else None


class RefusesVictim(FCFS):
    """Takes everybody but the user who was served most, once he has six requests."""

    def __init__(self):
        self.num_taken = 0

    def on_add(self, req, view):
        self.num_taken += req.user == "greedy"
        return Refuse("had enough") if req.user == "greedy" and self.num_taken > 6 else None


class DefersAll(FCFS):
    """Keeps everybody out of the queue for an hour."""

    def on_add(self, req, view):
        return Defer(view.now + 3600)


class DefersForEver(FCFS):
    """Keeps everybody out of the queue until a time that does not come."""

    def on_add(self, req, view):
        return Defer(1e15)


class RefusesAtFirst(FCFS):
    """Has room for the request once it has seen a hundred."""

    def __init__(self):
        self.num_seen = 0

    def on_add(self, req, view):
        self.num_seen += 1
        return Refuse("later") if req.num_prompt >= 20 and self.num_seen < 100 else None


def test_the_check_of_a_policy_that_refuses_everybody_ends() -> None:
    """It went on adding requests for ever."""
    with pytest.warns(NotShown) as told:
        report = check_policy(RefusesAll, steps=100)
    assert report.waited is not None and report.waited.outcome is Outcome.REFUSED
    first, second = (str(each.message) for each in told)
    assert re.match(r"RefusesAll: it accepted no request in \d+ random engines, so only", first)
    assert "was refused, which shows nothing about starvation (it was refused 1000" in second


@pytest.mark.parametrize("policy", [RefusesLong, RefusesVictim])
def test_a_refused_victim_was_not_served(policy) -> None:
    assert wait_in_overload(policy, {}, 50) == (Outcome.REFUSED, None, 50)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [RefusesLong, RefusesVictim])
def test_the_check_says_that_a_victim_was_refused(policy) -> None:
    with pytest.warns(NotShown, match="was refused, which shows nothing about starvation"):
        report = check_policy(policy, steps=200, max_wait=50)
    assert report.waited == (Outcome.REFUSED, None, 50)


@pytest.mark.parametrize(
    ("policy", "outcome"),
    [
        (RefusesShort, Outcome.ALONE),
        (RefusesLate, Outcome.ALONE),
        (DefersAll, Outcome.DEFERRED),
        (DefersForEver, Outcome.DEFERRED),
    ],
)
def test_an_overload_that_shows_nothing_comes_to_an_end(policy, outcome) -> None:
    waited = wait_in_overload(policy, {}, 50)
    assert waited.outcome is outcome and waited.num_refusals == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", [RefusesShort, RefusesLate])
def test_the_check_says_that_nobody_came_before_the_victim(policy) -> None:
    with pytest.warns(
        NotShown, match="served, but all later requests were refused, which shows noth"
    ):
        report = check_policy(policy, steps=100, max_wait=200)
    assert report.num_steps >= 100 and report.waited is not None
    assert report.waited.outcome is Outcome.ALONE and report.waited.num_refusals == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", [DefersAll, DefersForEver])
def test_a_policy_that_defers_everybody_comes_to_an_end(policy) -> None:
    message = (
        r"a request was not served in 50 steps, since on_add keeps it out of the queue \(Defer"
    )
    with pytest.raises(PolicyError, match=message):
        check_policy(policy, steps=100, max_wait=50)


def test_a_refused_request_comes_again_and_may_be_served_then() -> None:
    waited = wait_in_overload(RefusesAtFirst, {}, 200)
    assert waited.outcome is Outcome.SERVED
    assert waited.num_refusals > 0 and waited.num_steps is not None


class RefusesThenStarves(RefusesAtFirst):
    """Takes the request late, and then prefers all others."""

    def rank(self, req, view):
        return (req.num_prompt, req.arrival)


def test_a_request_that_was_refused_taken_and_not_served_has_starved() -> None:
    waited = wait_in_overload(RefusesThenStarves, {}, 300)
    assert waited.outcome is Outcome.STARVED and waited.num_refusals > 0


@pytest.mark.slow
def test_the_check_says_how_often_the_starved_was_refused() -> None:
    with pytest.raises(PolicyError, match=r"accepted after \d+ refusals, was not served in 3"):
        check_policy(RefusesThenStarves, steps=100, max_wait=300)


@pytest.mark.slow
def test_a_policy_that_is_meant_to_starve_may() -> None:
    assert check_policy(Starves, steps=300, max_wait=None).num_steps >= 300


class LosesOne(Scheduler):
    """Forgets a block of who is preempted."""

    def preempt(self, req, step, by="its policy"):
        blocks = self.kv.held(req)
        if len(blocks) > 1:
            blocks.pop()
        super().preempt(req, step, by)


def losing(case: Case) -> Case:
    config = {**vars(case.setup.config), "scheduler_cls": LosesOne, "scheduling_policy": "fcfs"}
    setup = Setup(
        config=SchedulerConfig(**{**config, "policy_options": {}}),
        num_blocks=case.setup.num_blocks,
        block_size=case.setup.block_size,
        needs=case.setup.needs,
    )
    return Case(setup=setup, events=case.events)


def test_a_broken_case_becomes_small_and_its_program_shows_it() -> None:
    swarm = Swarm()
    cases = (losing(draw_case(seed)) for seed in range(300))
    case, broken = next((c, d) for c in cases if isinstance(d := swarm.judge(c), Broken))
    small = smallest(FoundCase(0, case, broken))
    assert len(small.events) <= 3 < len(case.events), reproduction(small)
    program = reproduction(small).replace(f"import {LosesOne.__module__}\n", "")
    program = program.replace(f"{LosesOne.__module__}.LosesOne", "LosesOne")
    with pytest.raises(AssertionError, match=re.escape(broken.message.splitlines()[0])):
        exec(program, {"LosesOne": LosesOne})


def test_shrinking_tells_how_far_it_is_and_ends_with_the_best_so_far() -> None:
    case = draw_case(3)
    now, told = [0.0], []

    def breaks(smaller: Case) -> bool:
        now[0] += 0.7
        return bool(smaller.events)

    clocked = Clocked(
        9.0, lambda tries, best, s: told.append((tries, best, s)), clock=lambda: now[0]
    )
    small = shrink(case, breaks, goes_on=clocked)
    assert clocked.is_over and clocked.best == small and now[0] < 9.0 + 0.7
    assert 0 < len(small.events) < len(case.events)
    tries, bests, seconds = zip(*told, strict=True)
    assert len(told) == 4 and list(tries) == sorted(set(tries))
    assert all(later - sooner >= 2.0 for sooner, later in pairwise(seconds))
    assert len(bests[-1].events) <= len(bests[0].events)

    patient = Clocked(1e9, clock=lambda: now[0])
    assert len(shrink(case, breaks, goes_on=patient).events) == 1 and not patient.is_over


def test_shrinking_may_be_left_out() -> None:
    case = losing(draw_case(0))
    found = FoundCase(0, case, Broken("any", "nowhere"))
    assert smallest(found, goes_on=Clocked(0.0)) is case


def test_cases_travel_as_json() -> None:
    for seed in range(50):
        case = draw_case(seed)
        assert from_json(to_json(case)) == case


def test_a_lost_end_is_missed() -> None:
    """A scheduler that loses a request, or an abort, does not pass."""

    class LosesAborts(Scheduler):
        def finish_requests(self, request_ids, reason="abort"):
            return []

    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=2, scheduler_cls=LosesAborts)
    add = next(e for e in draw_case(3).events if isinstance(e, Add))
    case = Case(
        setup=Setup(config=config, num_blocks=64, block_size=4),
        events=[add, Abort(at=0, request_ids=[add.request.request_id])],
    )
    with pytest.raises(AssertionError, match="abort of"):
        Simulation(case).run()


def test_a_plan_that_is_not_computed_is_missed() -> None:
    class Doubles(Scheduler):
        def seal(self, step) -> StepPlan:
            plan = super().seal(step)
            plan.counts = plan.counts * 2
            return plan

    config = SchedulerConfig(max_num_batched_tokens=8, max_num_seqs=2, scheduler_cls=Doubles)
    add = next(e for e in draw_case(3).events if isinstance(e, Add))
    case = Case(setup=Setup(config=config, num_blocks=64, block_size=4), events=[add])
    with pytest.raises(AssertionError, match="token budget"):
        Simulation(case).run()


def test_the_command_counts_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("--steps", "500", "--policy", "fcfs", "--seed", "7", "--no-load")
    assert main(["verify", *chosen]) == 0
    out = capsys.readouterr().out
    assert "violations: 0" in out and "warning" not in out and "standard load" not in out
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert main(["verify", "--policy", "nobody"]) == 2
    assert "'nobody' is not known" in told.getvalue()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert main(["verify", "--steps", "0"]) == 2
    assert "--steps is 0, must be at least 1" in told.getvalue()


@pytest.fixture
def by_path(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the policies of this file are found by name."""
    monkeypatch.setitem(__import__("sys").modules, "test_verify_tools", __import__(__name__))
    return Raises.__module__


class NewestFirst(FCFS):
    """Who comes last takes the blocks of who was there before."""

    by_design = {"starvation": "who comes last goes first"}  # noqa: RUF012
    waiting_may_preempt = True

    def rank(self, req, view):
        return (-req.arrival,)

    def victim(self, candidates, req, view):
        """The dearest one to compute again."""
        return max(candidates, key=lambda other: other.num_computed)


def test_the_command_warns_of_a_policy_that_collapses(
    by_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = f"{by_path}.NewestFirst"
    assert main(["verify", "--steps", "100", "--policy", policy]) == 0
    out = capsys.readouterr().out
    assert "By design, it states: who comes last goes first" in out
    assert "passed: all invariants" in out and "  crowds: equal shares of users" in out
    assert re.search(
        r"1000 requests at load 0.9.: \S+NewestFirst recomputes \S+ % of .* serves \d.\d\d of f",
        out,
    )
    *_, last = out.splitlines()
    start = f"warning: {policy} collapses on a standard load: it recomputes "
    assert last.startswith(start) and "% of its tokens (above 25 %)" in last


@pytest.mark.slow
def test_the_command_says_that_all_were_refused(
    by_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = f"{by_path}.RefusesAll"
    assert main(["verify", "--steps", "500", "--policy", policy]) == 1
    out = capsys.readouterr().out
    assert "warning: all requests were refused, so nothing else was tested" in out
    assert "serves 0.00 of fcfs's throughput (below 0.5); it refused 1000 requests" in out
    assert main(["verify", "--steps", "500", "--policy", policy, "--no-load"]) == 0
    assert "standard load" not in capsys.readouterr().out


def test_the_command_prints_the_smallest_program(
    by_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = f"{by_path}.Raises"
    assert main(["verify", "--steps", "2000", "--policy", policy]) == 1
    out = capsys.readouterr().out
    assert "violations: 1" in out and "Raises.rank" in out and "print(Simulation(" in out
    assert "standard load" not in out and "--shrink-seconds" not in out


def test_the_plugin_checks_policies(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from engine.sched import Refuse
        from engine.sched.policies import FCFS

        class Bad(FCFS):
            def admit(self, req, view):
                return None

        class Refuses(FCFS):
            def on_add(self, req, view):
                return Refuse("closed")

        @pytest.mark.metronome_policy(steps=123)
        def test_refuses(metronome_policy):
            report = metronome_policy(Refuses)
            assert 123 <= report.num_steps < 1000
            assert report.waited.outcome.name == "REFUSED"

        def test_bad(metronome_policy):
            metronome_policy(Bad, steps=500)
        """
    )
    installed = {entry.name for entry in entry_points(group="pytest11")}
    plugin = () if "metronome" in installed else ("-p", "policylab.verify.pytest_plugin")
    result = pytester.runpytest_subprocess("-q", "--strict-markers", *plugin)
    result.assert_outcomes(passed=1, failed=1, warnings=2)
    result.stdout.fnmatch_lines(["*PolicyError: Bad, seed 0:*Bad.admit*"])
    result.stdout.fnmatch_lines(["*NotShown: Refuses: *refused, which shows nothing about starv*"])
