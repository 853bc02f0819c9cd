"""A policy is made once, before the model is loaded, and is the one that schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.simulate import make_request, make_run

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, PolicyError
from engine.kv.manager import KVManager
from engine.sched import Fit, Policy, Resource, Scheduler
from engine.sched.plugins.find import choose, make_scheduler
from engine.sched.policies import POLICIES
from engine.sched.policies.fcfs import FCFS


class Counted(FCFS):
    num_made = 0

    def __init__(self) -> None:
        type(self).num_made += 1


def test_what_was_chosen_is_not_made_again():
    config = SchedulerConfig(scheduling_policy=Counted)
    chosen = choose(config)
    scheduler = make_scheduler(config, KVManager(8, 4), clock=lambda: 0.0, chosen=chosen)
    assert scheduler.policy is chosen.policy
    assert Counted.num_made == 1


def test_a_module_that_cannot_be_imported_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_module.py").write_text("class A(\n")
    (tmp_path / "my_raising_module.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for path, error in (
        ("my_broken_module.A", "SyntaxError"),
        ("my_raising_module.A", "ZeroDivisionError"),
        ("my_missing_module.A", "ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=f"cannot load '{path}': {error}"):
            choose(SchedulerConfig(scheduling_policy=path))
        with pytest.raises(ConfigError, match=f"length_predictor: cannot load '{path}': {error}"):
            choose(SchedulerConfig(length_predictor=path))


def test_a_script_that_ends_the_program_when_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_script.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot load 'my_script\.A': SystemExit: 3"):
        choose(SchedulerConfig(scheduling_policy="my_script.A"))


@pytest.mark.parametrize("path", [".", "..", "a.", ".a", "os."])
def test_what_is_no_dotted_path_is_said_to_be_none(path: str) -> None:
    with pytest.raises(ConfigError, match=r"scheduling_policy: .* is not a dotted path"):
        choose(SchedulerConfig(scheduling_policy=path))


# What is wrong with a class is said when it is found, not in the middle of serving.


class Ranks(Policy):
    def rank(self, req, view):
        return (req.arrival,)


class LacksRank(Policy):
    pass


class WantsArguments(Ranks):
    def __init__(self, size: int, factor=1.0) -> None:
        self.size = size


class Falls(Ranks):
    def __init__(self) -> None:
        raise KeyError("oops")


class RankOfRequest(Policy):
    def rank(self, req):
        return (req.arrival,)


class ChunkWithoutTokens(Ranks):
    def chunk(self, req, view):
        return 5


class AsyncRank(Policy):
    async def rank(self, req, view):
        return (req.arrival,)


class NoMethod(Policy):
    rank = None


class Older(Ranks):
    api_version = "1"


class Newer(Ranks):
    api_version = 2


class Fits(Resource):
    def fit(self, req, num_tokens):
        return Fit(num_tokens)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (LacksRank, "LacksRank lacks rank"),
        (WantsArguments, "missing a required argument: 'size'; its options are: size: "),
        (Falls, r"Falls cannot be created with policy_options {}: KeyError: 'oops'"),
        (RankOfRequest, r"RankOfRequest\.rank\(self, req\) must take \(self, req, view\)"),
        (ChunkWithoutTokens, r"chunk\(self, req, view\) must take \(self, req, num_tokens, view"),
        (AsyncRank, r"AsyncRank\.rank is async"),
        (NoMethod, r"NoMethod\.rank is None, must be a method with arguments \(req, view\)"),
        (Older, "API version '1', this engine has API version 1; set api_version to a number"),
        (Newer, "was written for API version 2, .* install the release that fits"),
        (choose, "is not a subclass of engine.Policy"),
        (
            Path,
            "is not a subclass of engine.Policy; give such a class, its name or its dotted path",
        ),
        (Resource, "not a subclass of engine.Policy; it is a resource: give it in resources"),
        ("fcsf", "'fcsf' is not known; there are: adapter-clustering, .*; did you mean 'fcfs'"),
        ("qqqq", r"e\.g\. my_module\.MyClass\)$"),
        ("mine.py:Mine", r"did you mean 'mine\.Mine'"),
        (f"{__name__}.LackRank", f"did you mean '{__name__}.LacksRank'"),
        (f"{__name__}.py", "its classes are: Counted, "),
        (
            "no_such_module.Mine",
            "start the command in the directory of the module, or set PYTHONPATH",
        ),
        (Scheduler, "not a subclass of engine.Policy; it is a scheduler: give it as scheduler_cls"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(wrong: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(SchedulerConfig(scheduling_policy=wrong))


def test_an_object_of_two_engines_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def make(policy: object) -> object:
        config = SchedulerConfig(scheduling_policy=policy)
        return make_scheduler(config, KVManager(8, 4), clock=lambda: 0.0)

    one = Ranks()
    schedulers = [make(one), make(Ranks()), make(Ranks), make(Ranks)]
    assert not caplog.messages
    schedulers.append(make(one))
    assert ["two engines use the same Ranks object" in m for m in caplog.messages] == [True]


class WantsSize(Resource):
    def __init__(self, size: int) -> None:
        self.size = size


def test_a_resource_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"missing .*'size'.*to pass options, give an object"):
        choose(SchedulerConfig(resources=(WantsSize,)))
    with pytest.raises(ConfigError, match=r"engine\.Resource; it is a policy: give"):
        choose(SchedulerConfig(resources=(Ranks,)))
    with pytest.raises(ConfigError, match="SchedulerInterface; it is a policy: give it as schedul"):
        choose(SchedulerConfig(scheduler_cls=Ranks))
    for wrong in (Fits, Fits()):
        with pytest.raises(ConfigError, match=r"Fits\.fit\(self, req, num_tokens\) must take"):
            choose(SchedulerConfig(resources=(wrong,)))


class Loose(Policy):
    """Hooks may be written in other ways."""

    @staticmethod
    def rank(req, view):
        return (req.arrival,)

    @classmethod
    def chunk(cls, req, num_tokens, view):
        return num_tokens

    def admit(self, *args):
        return super().admit(*args)

    def on_step(self, shape, view=None, **more):
        pass


def test_hooks_may_be_written_in_any_way_that_can_be_called() -> None:
    run = make_run(policy=choose(SchedulerConfig(scheduling_policy=Loose)).policy)
    run.add(make_request("a", [1] * 8, 2))
    run.drain()
    assert not run.scheduler.guard.faults.messages


class SaysDynamik(Ranks):
    dynamik = True


class Finnish(Ranks):
    def on_finnish(self, req, view):
        """What it uses itself is no reason to call it."""
        return view.due


class BuildsOnSlip(Finnish):
    pass


class Ranked(POLICIES["fcfs"]):
    """Has fcfs's order under a name of its own."""

    def rnak(self, req, view):
        return (-req.arrival,)


class Fitting(Resource):
    def fits(self, req, num_tokens, step):
        return Fit(0)


class Wakes(Resource):
    """Names near hooks that take other things, and attributes near others."""

    seeds = (1, 2)

    def wake(self):
        pass


@pytest.mark.parametrize(
    ("option", "cls", "message"),
    [
        (
            "scheduling_policy",
            SaysDynamik,
            "SaysDynamik.dynamik is never .* did you mean 'dynamic'",
        ),
        ("scheduling_policy", Finnish, "Finnish.on_finnish is never .* did you mean 'on_finish'"),
        ("scheduling_policy", BuildsOnSlip, "BuildsOnSlip.on_finnish .* did you mean 'on_finish'"),
        ("scheduling_policy", Ranked, r"Ranked\.rnak .* did you mean 'rank'.*, call it _rnak"),
        ("resources", Fitting, r"Fitting\.fits is never called.* did you mean 'fit'"),
    ],
)
def test_a_misspelt_hook_is_refused(option: str, cls: type, message: str) -> None:
    """What the class then does would pass for what it was written to do."""
    with pytest.raises(PolicyError, match=message):
        choose(SchedulerConfig(**{option: (cls,) if option == "resources" else cls}))


class Helpers(Ranks):
    """Names near those of hooks, each with a purpose of its own."""

    limit = 5
    due = 5

    @property
    def order_(self):
        return "by limit"

    def victims(self, view):
        return [req for req in view.running if req.num_output > self.limit]

    def rank_(self, req, view):
        return (req.arrival,)

    @classmethod
    def ranked(cls, req, view):
        return cls.rank_(req, view)

    def rank(self, req, view):
        return (len(self.victims(view)), *(self.ranked(each, view) for each in [req]))

    def on_finish(self, req, view):
        pass

    def on_finished(self, req, view):
        """Called by the test of its author."""


def test_names_near_those_of_hooks_that_may_have_a_purpose_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    choose(SchedulerConfig(scheduling_policy=Helpers, resources=(Wakes,)))
    said = [message.split(" ")[0].split(".")[1] for message in caplog.messages]
    assert "limit" not in said  # a number is no misspelt method
    assert "victims" in said and "on_finished" in said and "wake" in said
    assert all("is not used by the engine; did you mean" in each for each in caplog.messages)
    caplog.clear()
    for name in POLICIES:
        choose(SchedulerConfig(scheduling_policy=name))
    assert not caplog.messages
