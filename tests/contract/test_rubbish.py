"""Policies and resources that raise or return rubbish are named, and nobody suffers for them.

Every hook, every kind of rubbish: each request gets exactly the tokens it would get from the best
of policies, nothing is left behind, and the fault says who, where and about whom.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable
from typing import Any

import pytest
from support.fakes import FakeClock
from support.simulate import Run, expected, make_request, make_run, random_requests

from engine.errors import RefusedError, RequestError
from engine.sched import (
    Admission,
    Defer,
    Fit,
    Limits,
    OnRefuse,
    Policy,
    Refuse,
    Resource,
    Scheduler,
)
from engine.sched.plugins.hooks import HOOKS
from engine.sched.request import Request
from engine.sched.table import Table

FOREIGN = Request(make_request("foreign", [1, 2, 3]), 0, Table(), max_model_len=64)


class Unruly:
    """Cannot be compared, counted, iterated over or even asked for its truth."""

    def __bool__(self) -> bool:
        raise RuntimeError("neither")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("nor that")

    __hash__ = None  # type: ignore[assignment]


def raising(*args: object) -> object:
    raise KeyError("a bug of mine")


def breaking_off(*args: object) -> object:
    yield FOREIGN
    raise KeyError("a bug of mine, later")


RUBBISH: dict[str, Any] = {
    "raises": raising,
    "breaks off": breaking_off,
    "none": lambda *args: None,
    "text": lambda *args: "rubbish",
    "zero": lambda *args: 0,
    "negative": lambda *args: -7,
    "huge": lambda *args: 10**30,
    "nan": lambda *args: float("nan"),
    "half": lambda *args: 0.5,
    "object": lambda *args: object(),
    "unruly": lambda *args: Unruly(),
    "unruly ones": lambda *args: [Unruly()],
    "a list": lambda *args: [1, 2],
    "a tuple of nan": lambda *args: (float("nan"),),
    "a tuple of objects": lambda *args: (object(), None),
    "a foreign request": lambda *args: FOREIGN,
    "foreign requests": lambda *args: [FOREIGN, None, 17],
    "foreign requests without end": lambda *args: itertools.repeat(FOREIGN),
    "itself": lambda *args: args[0],
    "limits of rubbish": lambda *args: Limits(max_tokens=-1, max_seqs="x"),  # type: ignore
    "no limits": lambda *args: Limits(max_tokens=10**30),
    "never": lambda *args: Admission.CLOSE,
    "deferred to nowhere": lambda *args: Defer("soon"),  # type: ignore
    "refused": lambda *args: Refuse(17),  # type: ignore
}

# What a hook may well answer. All else must be named as a fault where the hook is asked at all.
LEGAL = {
    "rank": {"limits of rubbish", "deferred to nowhere", "refused"},  # tuples all of them
    "limits": {"no limits"},
    "evict": set(),
    "order": set(),
    "next_waiting": {"none"},
    "admit": {"never"},
    "chunk": {"zero", "half"},
    "outranks": {"zero"},
    "takes_blocks": {"zero"},
    "victim": {"none"},
    "on_add": {"none", "refused"},
}
# Whatever these return is nobody's business.
NO_ANSWER = {"on_grant", "on_preempt", "on_tokens", "on_step", "on_finish"}


def unruly_policy(hook: str, answer: Any) -> Policy:
    class Rubbish(Policy):
        waiting_may_preempt = True
        dynamic = hook == "ranks"

        def rank(self, req, view):
            return (req.priority,)

    setattr(Rubbish, hook, lambda self, *args: answer(*args))
    return Rubbish()


def run_all(seed: int, **options: Any) -> tuple[Run, dict[str, list[int]]]:
    """Twenty requests that compete for seats and blocks; what each must say."""
    rng, clock = random.Random(seed), FakeClock(0.0)
    sizes = {
        "num_blocks": 16,
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "max_model_len": 48,
    }
    run = make_run(depth=2, clock=clock, **sizes, **options)
    wanted = {}
    for request in random_requests(rng, 20):
        run.add(request)
        wanted[request.request_id] = expected(request.prompt_token_ids, request.max_tokens)
        clock.now += 0.5
        run.step()
    for _ in range(3000):
        clock.now += 0.5
        if not (run.step() or run.scheduler.has_requests()):
            break
    run.drain()
    return run, wanted


def is_fault(hook: str, kind: str) -> bool:
    if hook in NO_ANSWER:
        return kind == "raises"
    return kind not in LEGAL.get(hook, set())


ALWAYS = ("raises", "none", "nan", "unruly")


def pairs(hooks: Iterable[str], kinds: Iterable[str], but: tuple[str, str]) -> list[Any]:
    """Each hook with ``ALWAYS`` and a third of the other kinds in turn; the rest is slow."""
    made = []
    for row, hook in enumerate(hooks):
        for column, kind in enumerate(kinds):
            is_short = kind in ALWAYS or (row + column) % 3 == 0
            if (hook, kind) != but:
                made.append(pytest.param(hook, kind, marks=[] if is_short else [pytest.mark.slow]))
    return made


CASES = pairs(HOOKS, RUBBISH, but=("on_add", "refused"))  # a refusal, whatever its reason


@pytest.mark.parametrize(("hook", "kind"), CASES)
def test_rubbish_of_a_policy_is_named_and_hurts_nobody(
    hook: str, kind: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="engine.sched"):
        run, wanted = run_all(seed, policy=unruly_policy(hook, RUBBISH[kind]))
    assert run.outputs == wanted
    faults, stats = run.scheduler.guard.faults, run.scheduler.make_stats()
    assert stats is not None and stats.num_policy_faults == faults.num_faults
    assert all(message.startswith(f"Rubbish.{hook}") for message in faults.messages)
    assert bool(faults.messages) == is_fault(hook, kind), faults.messages[:3]
    if faults.messages:
        assert faults.messages[0] in caplog.text
        assert faults.num_faults == 4, "left out after more than max_policy_faults"
        assert "policy Rubbish is disabled after 4 faults" in caplog.text


def test_a_refusal_is_one_whatever_its_reason() -> None:
    run = make_run(policy=unruly_policy("on_add", RUBBISH["refused"]))
    with pytest.raises(RefusedError, match="'a' was refused: 17"):
        run.add(make_request("a", [1], 1))
    assert not run.scheduler.guard.faults.messages


def test_one_fault_too_many_and_the_policy_is_left_out_for_good(seed: int) -> None:
    run, wanted = run_all(seed, policy=unruly_policy("rank", raising), max_policy_faults=0)
    assert run.outputs == wanted and run.scheduler.guard.faults.num_faults == 1
    assert run.scheduler.guard.is_left_out


def test_a_fault_names_the_request() -> None:
    def chunk(req, num_tokens, view):
        return "all" if req.request_id == "b" else num_tokens

    run = make_run(policy=unruly_policy("chunk", chunk), max_policy_faults=100)
    for name in "ab":
        run.add(make_request(name, [1] * 8, 2))
    run.drain()
    assert run.scheduler.guard.faults.messages[0].startswith("Rubbish.chunk, request b: returns")


# Resources

RESOURCE_HOOKS = (
    *("objection", "added", "watches", "begin_step", "extra", "fit", "take", "release"),
    *("describe", "settle"),
)
RESOURCE_RUBBISH = {name: RUBBISH[name] for name in list(RUBBISH)[:13] if name != "breaks off"} | {
    "fit below zero": lambda *args: Fit(-3),
    "fit of text": lambda *args: Fit("x"),  # type: ignore
    "fit of nan": lambda *args: Fit(float("nan")),  # type: ignore
    "fit of half a token": lambda *args: Fit(0.5),  # type: ignore
    "fit for too many": lambda *args: Fit(10**9),
    "fit with a strange refusal": lambda *args: Fit(0, "x", "later"),  # type: ignore
    "fit that holds less than nothing": lambda *args: Fit(0, "x", None, -4),
}
RESOURCE_LEGAL = {
    "objection": {"none", "text"},
    "watches": {"zero"},
    "extra": {"zero"},
}


def unruly_resource(hook: str, answer: Any) -> Resource:
    class Rubbish(Resource):
        name = "rubbish"

    setattr(Rubbish, hook, lambda self, *args: answer(*args))
    return Rubbish()


def is_resource_fault(hook: str, kind: str) -> bool:
    if hook in ("objection", "watches", "extra", "fit"):
        return kind not in RESOURCE_LEGAL.get(hook, set())
    return kind == "raises"


# An objection of text is one, whatever it says.
RESOURCE_CASES = pairs(RESOURCE_HOOKS, RESOURCE_RUBBISH, but=("objection", "text"))


@pytest.mark.parametrize(("hook", "kind"), RESOURCE_CASES)
def test_rubbish_of_a_resource_is_named_and_hurts_nobody(hook: str, kind: str, seed: int) -> None:
    resource = unruly_resource(hook, RESOURCE_RUBBISH[kind])
    run, wanted = run_all(seed, resources=(resource,))
    assert run.outputs == wanted
    faults, stats = run.scheduler.guard.faults, run.scheduler.make_stats()
    assert stats is not None and stats.num_policy_faults == faults.num_faults
    assert all(message.startswith(f"Rubbish.{hook}") for message in faults.messages)
    assert bool(faults.messages) == is_resource_fault(hook, kind), faults.messages[:3]
    if faults.messages:
        assert faults.messages[-1].endswith("resource rubbish is now disabled")
        assert len(faults.messages) == 5  # four, and that it is left out


@pytest.mark.parametrize(
    "answer", [None, 3, {"a": 0.5}, {"a": "x"}, {4: 5}, {"a": 1 << 64}, ["a"], {"a": None}]
)
def test_rubbish_as_counters_is_named_and_statistics_say_the_rest(answer: object) -> None:
    run = make_run(resources=(unruly_resource("counters", lambda *args: answer),))
    run.add(make_request("a", [1] * 8, 2))
    run.drain()
    stats = run.scheduler.make_stats()
    assert stats.counters == {} and stats.num_steps > 0 and stats.num_policy_faults >= 1
    assert run.scheduler.guard.faults.messages[0].startswith("Rubbish.counters: returns")


def test_an_objection_is_one_whatever_it_says() -> None:
    run = make_run(resources=(unruly_resource("objection", RESOURCE_RUBBISH["text"]),))
    with pytest.raises(RequestError, match="request 'a': rubbish"):
        run.add(make_request("a", [1], 1))


class ParksAndBreaks(Resource):
    """Parks everybody, and wakes nobody since it falls over before."""

    name = "broken"

    def begin_step(self, step):
        if step.index > 5:
            raise KeyError("a bug of mine")

    def fit(self, req, num_tokens, step):
        return Fit(0, on_refuse=OnRefuse.PARK)


def test_whom_a_resource_parked_runs_when_it_is_left_out() -> None:
    run = make_run(resources=(ParksAndBreaks(),))
    for name in "ab":
        run.add(make_request(name, [ord(name)] * 8, 4))
    for _ in range(12):
        run.step()
    run.drain()
    assert run.outputs == {name: expected([ord(name)] * 8, 4) for name in "ab"}


# Loops of one's own


class Idle(Scheduler):
    """Never grants anything to anybody."""

    def schedule(self):
        return self.seal(self.begin_step())


class Raises(Policy):
    """Everybody is refused everything, politely."""

    def rank(self, req, view):
        return (req.arrival,)

    def limits(self, view):
        return Limits(max_tokens=0)

    def order(self, view):
        yield from ()


@pytest.mark.parametrize("options", [{"scheduler_cls": Idle}, {"policy": Raises()}])
def test_who_never_grants_is_rescued(seed: int, options: dict[str, Any]) -> None:
    run, wanted = run_all(seed, **options)
    assert run.outputs == wanted
    stats = run.scheduler.make_stats()
    assert stats is not None and stats.num_rescued_steps > 0
