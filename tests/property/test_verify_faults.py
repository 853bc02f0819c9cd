"""What `metronome verify` and `check_policy` find in policies with one fault each, and do not find
in those that ship."""

from __future__ import annotations

import logging
import re

import pytest
from support import faulty_policies
from support.faulty_policies import FURTHER, LAB

from engine.cli.main import main
from engine.errors import ConfigError, PolicyError
from engine.sched.policies import FCFS, POLICIES
from policylab.verify.shrink import Clocked
from policylab.verify.testing import NotShown, check_policy
from policylab.verify.trials import run_trials

EXAMPLES = tuple(
    f"examples.policies.{name}"
    for name in (
        *("fair_share.FairShare", "shortest_first.ShortestFirst", "deadlines.EarliestDeadline"),
        *("tiers.TieredDeadlines", "level_fair.LevelFair", "cautious_srpt.CautiousSRPT"),
        "pressure_chunk.PressureChunk",
    )
)
PATH = faulty_policies.__name__
NAMED = {
    "WallClock": "plans",
    "Dice": "plans|starves",
    "WritesPriority": "no setter",
    "BooksOfTheClass": "two engines run in one process|the same case gives different plans",
    "NaNLater": "holds a NaN",
    "VictimOfItsOwn": "which is no candidate",
    "DoorShut": "starves a waiting request",
    "PausesLongest": "starves a running request",
    "KeepsAll": r"keeps data that grows: KeepsAll\.known",
    "HashOfString": "hashes of strings|starves",
    "Address": "plans|starves",
    "OrderOfSet": "plans|runs no request",  # by addresses, of which some idle in a crowd
    "TimeOfDay": "clocks|starves",
    "Environment": "reads 'SHORTEST' of the environment",
    "EnvironmentOnce": "environment variables",
    "ProcessNumber": "number of the process",
    "MutableDefault": r"MutableDefault\.numbers",
    "StateOfModule": "two engines run in one process|the same case gives different plans",
    "StarvesUser": "user 'bob'|runs no request",
    "StarvesLastUser": "requests of user 'u4' take",
    "Idles": "runs no request",
    "HalfSteps": "computes 32.0 tokens per step",
    "OneSeat": "tokens per step",
    "NestedBooks": r"NestedBooks\.books\.by_user grows",
    "BooksOfModule": r"faulty_policies\.SEEN grows",
    "InClosure": "__closure__ grows",
    "Cached": r"Cached\.cost grows",
    "Log": r"Log\.text grows",
    "SampledBooks": r"SampledBooks\.sample grows",
    "RaisesRarely": "RuntimeError: a rare one",
    "Flips": "throughput|was preempted",
    "WritesHints": "its hints were changed",
    "ReadsOthers": "two engines|the same case gives different plans|starves",
    "Forgets": "runs no request|starves",
}
SHORT = ("DoorShut", "StateOfModule", "NestedBooks")
"""Faults that each run of the tests looks for."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "engine")


@pytest.mark.parametrize(
    "name",
    [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in NAMED],
)
def test_a_trial_names_the_fault(name: str) -> None:
    trials = run_trials(f"{PATH}.{name}", goes_on=Clocked(0.0))
    found = " ".join(each.message for each in trials.failures)
    assert re.search(NAMED[name], found), found


def test_each_fault_has_its_words() -> None:
    assert {*NAMED, "RefusesMost"} == {policy.__name__ for policy in (*LAB, *FURTHER)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RefusesMost", "PausesLongest"])
def test_the_command_fails(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "--policy", f"{PATH}.{name}", "--steps", "500", "--shrink-seconds", "1"]
    assert main(command) == 1
    out = capsys.readouterr().out
    wanted = NAMED.get(name, "serves 0.11 of fcfs's throughput .below 0.5.; it refused 9")
    assert "failure:" in out and re.search(wanted, out), out
    assert ("standard load (" in out) == (name == "RefusesMost"), out


@pytest.mark.parametrize("name", ["OrderOfSet", pytest.param("DoorShut", marks=pytest.mark.slow)])
def test_a_test_of_the_author_fails(name: str) -> None:
    with pytest.raises(PolicyError, match=NAMED[name]):
        check_policy(getattr(faulty_policies, name), steps=100)


@pytest.mark.slow
@pytest.mark.parametrize("policy", (*sorted(POLICIES), *EXAMPLES))
def test_shipped_policies_pass(policy: str) -> None:
    trials = run_trials(policy)
    assert not trials.failures and not trials.not_shown


class LastComesFirst(FCFS):
    """Starves by design."""

    by_design = {"starvation": "who comes last goes first"}  # noqa: RUF012

    def rank(self, req, view):
        return (-req.arrival,)


class StatesNothing(FCFS):
    by_design = {"starvation": ""}  # noqa: RUF012


class StatesWhatIsNotKnown(FCFS):
    by_design = {"starving": "so it is"}  # noqa: RUF012


def test_what_a_policy_states_is_no_fault_of_it_and_is_shown() -> None:
    trials = run_trials(LastComesFirst)
    assert not trials.failures
    assert any("By design, it states: who comes last goes" in each for each in trials.by_design)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (StatesNothing, r"by_design\['starvation'\] of StatesNothing is '', must be the reason"),
        (StatesWhatIsNotKnown, "has the key 'starving', must be one of: starvation, throughput, r"),
    ],
)
def test_a_statement_that_means_nothing_is_refused(policy: type, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_trials(policy)


def test_a_class_that_no_other_process_finds_is_named() -> None:
    class Local(FCFS):
        pass

    with pytest.warns(NotShown, match=r"are the same in other processes.*Local is defined"):
        check_policy(Local, steps=100)


class Object(FCFS):
    """An object of it goes to other processes as it is."""

    def __init__(self, by: int = 0) -> None:
        self.by = by

    def rank(self, req, view):
        return (req.arrival // (1 + self.by),)


def test_an_object_is_tried_as_it_is() -> None:
    trials = run_trials(Object(3))
    assert not trials.failures and not trials.not_shown


class Predictor:
    name = "mine"

    def __init__(self, lengths):
        pass


class PredictsNothing(Predictor):
    def predict(self, req):
        return float("nan")


class PredictsBelowZero(Predictor):
    def predict(self, req):
        return -5


class PredictsWords(Predictor):
    def predict(self, req):
        return "long"


class PredictsAnything(Predictor):
    def predict(self, req):
        return 1e30 if req.num_prompt % 2 else 0


@pytest.mark.parametrize(
    ("predictor", "message"),
    [
        pytest.param(
            PredictsNothing, "length predictor mine, request .*ValueError", marks=pytest.mark.slow
        ),
        (PredictsBelowZero, "length predictor mine predicts -5 output tokens"),
        pytest.param(PredictsWords, "length predictor mine, .*TypeError", marks=pytest.mark.slow),
    ],
)
def test_a_predictor_that_predicts_no_length_fails(predictor: type, message: str) -> None:
    trials = run_trials("ltr", predictor=predictor, goes_on=Clocked(0.0))
    assert re.search(message, trials.failures[0].message)


@pytest.mark.slow
def test_a_predictor_may_answer_any_number_from_0_on() -> None:
    assert not run_trials("residual-sjf", predictor=PredictsAnything).failures
