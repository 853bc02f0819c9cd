"""Utilities by name: the same answers and the same errors, wherever the core is."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from support.core_clients import drain, read
from support.patience import WAIT_SECONDS
from support.simulate import expected, make_request
from support.spawned import FakeBuild, ScriptedWorker, fake_config

from engine.core.control import Utilities
from engine.core.engine_core import EngineCore
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError, EngineError, RequestTypeError
from engine.messages.stats import SchedulerStats
from engine.messages.watch import WatchedCore
from engine.sched import Scheduler
from engine.sched.interface import PauseState

pytestmark = pytest.mark.usefixtures("place")

SLOW = FakeBuild(step_seconds=0.002)


class Recorder:
    """The method ``profile`` of a worker; records nothing."""

    def __init__(self) -> None:
        self.is_running = False

    def __call__(self, what: str) -> list[str] | None:
        if what not in ("start", "stop"):
            raise ConfigError(f"profile {what!r} is not known; there are: start, stop")
        if self.is_running == (what == "start"):
            is_running = "a profile is being recorded already"
            raise ConfigError(is_running if self.is_running else "no profile is being recorded")
        self.is_running = what == "start"
        return None if self.is_running else ["trace"]


class ProfiledWorker(ScriptedWorker):
    def __init__(self, script: ProfiledBuild) -> None:
        super().__init__(script)
        self.methods = script.methods
        self._record = Recorder()

    def call(self, name: str, *args: Any) -> Any:
        return {"profile": self._record}[name](*args)


@dataclass(frozen=True)
class ProfiledBuild(FakeBuild):
    """A fake core whose worker has a profiler."""

    methods: tuple[str, ...] = ("profile",)

    def make_worker(self) -> ScriptedWorker:
        return ProfiledWorker(self)


def test_a_method_of_a_worker_does_not_take_the_place_of_a_utility() -> None:
    with pytest.raises(ConfigError, match="the worker's method 'pause' has the name"):
        ProfiledBuild(methods=("profile", "pause"))(fake_config())


class TooEarly(ConfigError):
    """An error of a scheduler of one's own, made in a way of its own."""

    def __init__(self, what: str, when: int) -> None:
        super().__init__(f"{what} at {when}")


class Restless(Scheduler):
    """Cannot be paused, and forgets nothing."""

    def set_pause_state(self, state: PauseState) -> None:
        raise NotImplementedError("no rest")

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if reset_running:
            raise TooEarly("reset", 5)
        raise ZeroDivisionError("of nothing")


@pytest.mark.behaviour(107)
def test_what_a_scheduler_of_ones_own_raises_is_reported_with_the_utility(
    kind: str, opened: Any
) -> None:
    client = opened(kind, FakeBuild(options={"scheduler_cls": Restless}))
    told = r"^Call to pause method failed: this engine's scheduler cannot pause: no rest$"
    with pytest.raises(ConfigError, match=told):
        client.call("pause", "all")
    told = r"^Call to reset_prefix_cache method failed: ZeroDivisionError: of nothing$"
    with pytest.raises(EngineError, match=told):
        client.call("reset_prefix_cache")
    with pytest.raises(ConfigError, match="Call to reset_prefix_cache method failed: reset at 5"):
        client.call("reset_prefix_cache", True)
    client.add(make_request("a", [1], 3))
    assert drain(client)[0] == {"a": expected([1], 3)}


def test_the_prefix_cache_is_reset_when_nobody_uses_it_or_running_requests_start_again(
    kind: str, opened: Any
) -> None:
    client = opened(kind, SLOW)
    client.add_all([make_request(str(i), [i + 1] * 40, 60) for i in range(4)])
    tokens: dict[str, list[int]] = {}
    while len(tokens) < 4:
        for batch in client.step():
            read(batch, tokens, {})
    assert client.call("reset_prefix_cache") is False
    assert client.call("reset_prefix_cache", True) is True
    more, ends = drain(client)
    assert {name: ids + more[name] for name, ids in tokens.items()} == {
        str(i): expected([i + 1] * 40, 60) for i in range(4)
    }
    assert len(ends) == 4
    stats = client.call("stats")
    assert stats.num_cache_resets and stats.num_preemptions
    assert client.call("reset_prefix_cache") is True


def test_statistics_are_those_of_all_cores_together(kind: str, opened: Any) -> None:
    client = opened(kind)
    assert isinstance(client.call("stats"), SchedulerStats)
    client.add_all([make_request(str(i), [i + 1] * 4, 5) for i in range(6)])
    drain(client)
    stats = client.call("stats")
    assert client.stats().num_scheduled_tokens == stats.num_scheduled_tokens
    assert stats.num_scheduled_tokens == 6 * (4 + 5 - 1) and stats.kv_usage == 0.0


class Uncounted(Scheduler):
    """Keeps no statistics."""

    def make_stats(self) -> None:
        return None


def test_a_core_that_keeps_no_statistics_says_so(kind: str, opened: Any) -> None:
    client = opened(kind, FakeBuild(options={"scheduler_cls": Uncounted}))
    assert client.call("stats") is None and client.stats() is None


def test_a_profile_is_started_once_and_stopped_once(kind: str, opened: Any) -> None:
    client = opened(kind, ProfiledBuild())
    with pytest.raises(ConfigError, match=r"^Call to profile method failed: no profile is being"):
        client.call("profile", "stop")
    assert client.call("profile", "start") is None
    with pytest.raises(ConfigError, match=r"^Call to profile method failed: a profile is being"):
        client.call("profile", "start")
    assert client.call("profile", "stop") == ["trace"] * (2 if kind == "two cores" else 1)


def test_a_worker_without_profiler_says_that_there_is_none(kind: str, opened: Any) -> None:
    client = opened(kind)
    with pytest.raises(ConfigError, match="utility 'profile' is not available; there are: echo, "):
        client.call("profile", "start")


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("profile", ("begin",), "Call to profile method failed: profile 'begin' is not known"),
        ("profile", ([],), "Call to profile method failed: profile .* is not known"),
        ("pause", ("new!",), "Call to pause method failed: pause 'new!' is not known; there"),
        ("pause", (["all"],), r"Call to pause method failed: pause \['all'\] is not known"),
        ("reset_prefix_cache", ("no",), "reset_running is 'no', must be True or False"),
        ("reset_prefix_cache", (1,), "reset_running is 1, must be True or False"),
    ],
)
def test_wrong_arguments_are_named_with_the_right_ones(
    kind: str, opened: Any, name: str, args: tuple[Any, ...], told: str
) -> None:
    client = opened(kind, ProfiledBuild())
    with pytest.raises(ConfigError, match=told):
        client.call(name, *args)
    assert client.call("echo", 1) == 1


@pytest.mark.parametrize(("name", "args"), [("echo", ()), ("resume", (1,)), ("profile", ())])
def test_too_many_arguments_or_too_few_are_an_error(
    kind: str, opened: Any, name: str, args: tuple[Any, ...]
) -> None:
    client = opened(kind, ProfiledBuild())
    with pytest.raises(EngineError, match=f"^Call to {name} method failed: TypeError"):
        client.call(name, *args)
    assert client.call("echo", 1) == 1


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.behaviour(109)
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (2**64, "does not fit into 64 bits"),
        ([{"a": -(2**63) - 1}], "does not fit into 64 bits"),
        ("half \ud800", "not valid Unicode"),
        ({"\udfff": 1}, "not valid Unicode"),
        (nested(65), "nested over 64 levels"),
        (nested(5000), "nested over 64 levels"),
    ],
)
def test_what_cannot_travel_is_refused_everywhere(
    kind: str, opened: Any, value: Any, told: str
) -> None:
    client = opened(kind)
    with pytest.raises(RequestTypeError, match=told):
        client.call("echo", value)
    assert client.call("echo", nested(64)) == nested(64)


def answers_of(client: Any, names: list[str]) -> dict[int, Any]:
    take = client.begin_each("watch", {}, 10, names)
    until = time.monotonic() + WAIT_SECONDS
    while (found := take()) is None:
        assert time.monotonic() < until, "a core does not answer"
    answers: dict[int, Any] = found
    return answers


def test_a_core_is_watched_wherever_it_is(kind: str, opened: Any) -> None:
    """Each core answers for itself, with its requests and what its steps computed."""
    client = opened(kind)
    for found in answers_of(client, []).values():
        assert msgspec.convert(found, WatchedCore).requests == []
    for name in ("a", "b", "c"):
        client.add(make_request(name, [1, 2, 3], 4))
    assert len(drain(client)[0]) == 3
    client.add(make_request("waits", [1], 3))
    answers = answers_of(client, ["nobody"])
    cores = [msgspec.convert(each, WatchedCore) for each in answers.values()]
    assert len({core.core_id for core in cores}) == len(answers) and 0 in answers
    assert sum(core.stats.num_steps for core in cores if core.stats) > 0
    steps = [(core, step) for core in cores for step in core.steps]
    assert {core.names[place] for core, step in steps for place in step.names} >= {"a", "b", "c"}
    assert sum(sum(step.tokens) + step.num_others for _, step in steps) >= 3 * (3 + 3)
    drain(client)


KNOWN = {"echo", "reset_prefix_cache", "reset_encoder_cache", "pause", "resume", "stats"}


@pytest.mark.behaviour(108)
def test_no_other_name_of_the_core_or_its_scheduler_is_a_utility(kind: str, opened: Any) -> None:
    client = opened(kind)
    names = {*dir(InprocClient), *dir(EngineCore), *dir(Scheduler), *dir(Utilities)} - KNOWN
    assert len(names) > 50
    for name in sorted(names):
        with pytest.raises(ConfigError, match="is not available; there are: echo, "):
            client.call(name)
    client.add(make_request("a", [1], 3))
    assert drain(client)[0] == {"a": expected([1], 3)}


def test_pause_and_resume_may_be_repeated(kind: str, opened: Any) -> None:
    client = opened(kind)
    for what in ("new", "all", "all", "new"):
        assert client.call("pause", what) is None
    client.add(make_request("a", [1], 3))
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        assert client.step() == []
    assert client.call("resume") is None and client.call("resume") is None
    assert drain(client)[0] == {"a": expected([1], 3)}
