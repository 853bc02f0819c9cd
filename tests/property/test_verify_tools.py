"""The tools of verification find what is broken, make it small and say where it is."""

import contextlib
import io
import logging
import random
import re
from importlib.metadata import entry_points

import pytest

from engine.cli.main import main
from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, PolicyError
from engine.messages.step import StepPlan
from engine.sched import Admission, Defer, Refuse
from engine.sched.policies import FCFS
from engine.sched.scheduler import Scheduler
from engine.verify.case import Abort, Add, Case, Setup, from_json, to_json
from engine.verify.draw import draw_case
from engine.verify.simulation import Simulation
from engine.verify.swarm import Broken, Found, Swarm, reproduction, smallest
from engine.verify.testing import check_policy

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
    tally = check_policy(Good, steps=3000)
    assert tally.num_steps >= 3000 and tally.steps_by_policy["Good"] == tally.num_steps
    assert check_policy(Good(), steps=500).num_runs
    assert check_policy("priority", options={"preempt_for_waiting": True}, steps=500, max_wait=None)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Raises, r"Raises, seed \d+: faults of plug-ins: \['Raises.rank, request \d+: ZeroDiv"),
        (Dices, "the same case gives other plans"),
        (Starves, "Starves: a request was not served in 1000 steps while better ones kept coming"),
        (Thrashes, "was preempted 13 times without a token|no end after"),
    ],
)
def test_a_bad_policy_is_named_with_hook_seed_and_request(policy, message) -> None:
    with pytest.raises(PolicyError, match=message):
        check_policy(policy, steps=4000)


@pytest.mark.parametrize(
    ("policy", "how", "message"),
    [
        (Good, {"steps": 0}, "steps is 0, must be at least 1"),
        (Good, {"steps": "many"}, "steps is 'many' .str., must be a whole number"),
        (Good, {"seed": -1}, "seed is -1, must be at least 0"),
        (Good, {"max_wait": 0}, "max_wait is 0, must be at least 1"),
        (Good, {"options": {"busy": 1}}, "cannot be made with policy_options .*'busy'; its opt"),
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


class DefersAll(FCFS):
    """Keeps everybody out of the queue for an hour."""

    def on_add(self, req, view):
        return Defer(view.now + 3600)


class RefusesAtFirst(FCFS):
    """Has room for the request once it has seen a hundred."""

    def __init__(self):
        self.num_seen = 0

    def on_add(self, req, view):
        self.num_seen += 1
        return Refuse("later") if req.num_prompt >= 20 and self.num_seen < 100 else None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", [RefusesAll, RefusesLong])
def test_a_policy_that_refuses_comes_to_an_end_and_has_served_nobody(policy) -> None:
    """The first went on adding requests for ever; the second was said to have served the one it
    had refused."""
    with pytest.raises(PolicyError, match=r"was refused \d+ times in 50 steps"):
        check_policy(policy, steps=200, max_wait=50)


@pytest.mark.timeout(60)
def test_a_policy_that_defers_everybody_comes_to_an_end() -> None:
    with pytest.raises(PolicyError, match="was not served in 50 steps"):
        check_policy(DefersAll, steps=200, max_wait=50)


@pytest.mark.timeout(60)
def test_a_policy_that_refuses_what_keeps_coming_is_checked_to_the_end() -> None:
    assert check_policy(RefusesShort, steps=200, max_wait=200).num_steps >= 200


def test_a_refused_request_comes_again_and_may_be_served_then() -> None:
    assert check_policy(RefusesAtFirst, steps=200, max_wait=200).num_steps >= 200


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
    small = smallest(Found(0, case, broken))
    assert len(small.events) <= 3 < len(case.events), reproduction(small)
    program = reproduction(small).replace(f"import {LosesOne.__module__}\n", "")
    program = program.replace(f"{LosesOne.__module__}.LosesOne", "LosesOne")
    with pytest.raises(AssertionError, match=re.escape(broken.message.splitlines()[0])):
        exec(program, {"LosesOne": LosesOne})


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
    assert main(["verify", "--steps", "2000", "--policy", "fcfs", "--seed", "7"]) == 0
    assert "violations: 0" in capsys.readouterr().out
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert main(["verify", "--policy", "nobody"]) == 2
    assert "'nobody' is not known" in told.getvalue()
    with contextlib.redirect_stderr(io.StringIO()) as told:
        assert main(["verify", "--steps", "0"]) == 2
    assert "--steps is 0, must be at least 1" in told.getvalue()


def test_the_command_prints_the_smallest_program(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "test_verify_tools", __import__(__name__))
    policy = f"{Raises.__module__}.Raises"
    assert main(["verify", "--steps", "2000", "--policy", policy]) == 1
    out = capsys.readouterr().out
    assert "violations: 1" in out and "Raises.rank" in out and "print(Simulation(" in out


def test_the_plugin_checks_policies(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from engine.sched.policies import FCFS

        class Bad(FCFS):
            def admit(self, req, view):
                return None

        @pytest.mark.metronome_policy(steps=500)
        def test_good(metronome_policy):
            assert metronome_policy(FCFS).num_steps >= 500

        def test_bad(metronome_policy):
            metronome_policy(Bad, steps=500)
        """
    )
    installed = {entry.name for entry in entry_points(group="pytest11")}
    plugin = () if "metronome" in installed else ("-p", "engine.verify.pytest_plugin")
    result = pytester.runpytest_subprocess("-q", "--strict-markers", *plugin)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*PolicyError: Bad, seed 0:*Bad.admit*"])
