"""Steps have drafts where these bring more than having any costs, and next to never elsewhere."""

from __future__ import annotations

import random

import pytest

from engine.spec.payoff import DraftStepKind, Payoff


class Engine:
    """Steps of so many requests. plain, drafting: seconds of a step, of which one in twenty takes
    ten times as long."""

    def __init__(self, seed: int, num_seqs: int, plain: float, drafting: float) -> None:
        self.rng, self.payoff = random.Random(seed), Payoff()
        self.num_seqs, self.plain, self.drafting = num_seqs, plain, drafting
        self.now = 0.0

    def run(self, num: int, expected: float) -> int:
        """So many steps, each with drafts that are expected to bring so many tokens a request;
        how many had some."""
        num_drafting, load = 0, self.payoff.load(self.num_seqs)
        for _ in range(num):
            takes = load.may_draft() and load.is_worth(expected * self.num_seqs)
            slow = 10 if self.rng.random() < 0.05 else 1
            seconds = self.drafting if takes else self.plain
            self.now += seconds * self.rng.uniform(0.95, 1.05) * slow
            self.payoff.settled(self.num_seqs, self.now, DraftStepKind(takes), is_busy=True)
            num_drafting += takes
        return num_drafting


@pytest.mark.parametrize("num_seqs", [1, 8, 200])
def test_drafts_that_pay_are_made_nearly_always(num_seqs: int, seed: int) -> None:
    assert Engine(seed, num_seqs, 1.0, 1.3).run(1000, expected=1.0) > 950


@pytest.mark.parametrize("expected", [0.0, 0.2])
def test_drafts_that_cost_more_than_they_bring_lose_a_hundredth(expected: float, seed: int) -> None:
    engine = Engine(seed, 8, 1.0, 2.0)
    engine.run(200, expected)
    num = engine.run(4000, expected)
    assert 0 < num * (1.0 - expected) < 0.012 * 4000


def test_what_begins_to_pay_is_made_at_once(seed: int) -> None:
    engine = Engine(seed, 8, 1.0, 1.5)
    engine.run(1000, expected=0.1)
    assert engine.run(100, expected=1.0) > 80


def test_a_step_that_has_become_cheap_is_noticed(seed: int) -> None:
    engine = Engine(seed, 1, 1.0, 4.0)
    engine.run(1000, expected=0.5)
    engine.drafting = 1.2
    engine.run(8000, expected=0.5)
    assert engine.run(500, expected=0.5) > 400


def test_many_requests_and_few_are_judged_apart(seed: int) -> None:
    engine = Engine(seed, 1, 1.0, 1.2)
    for _ in range(20):
        engine.num_seqs, engine.drafting = 1, 1.2
        engine.run(50, expected=0.6)
        engine.num_seqs, engine.drafting = 64, 4.0
        engine.run(50, expected=0.6)
    assert engine.run(200, expected=0.6) < 20
    engine.num_seqs, engine.drafting = 1, 1.2
    assert engine.run(200, expected=0.6) > 150


def test_a_request_brings_leave_to_try(seed: int) -> None:
    """Nothing is left to try with; then there is, for one step."""
    load = Engine(seed, 1, 1.0, 2.0).payoff.load(1)
    for has_drafts in [False] * 8 + [True] * 8:
        load.add(2.0 if has_drafts else 1.0, DraftStepKind(has_drafts))
    while load.may_try():
        load.is_worth(0.0)
    load.add_credit(1.0)
    assert load.may_try() and load.is_worth(0.0) and not load.may_try()


def test_time_in_which_nothing_ran_does_not_count(seed: int) -> None:
    """An hour of nothing before each request, and an hour of a prompt."""
    payoff = Payoff()
    now, load = 0.0, payoff.load(1)
    for index in range(40):
        now += 2.0 if index % 2 else 1.0
        payoff.settled(1, now, DraftStepKind(index % 2 == 1), is_busy=False)
        now += 3600.0
        payoff.interrupted(now, is_busy=True)
    assert load.cost() == pytest.approx(1.0)


def test_a_cost_that_was_measured_on_a_bad_day_is_measured_again(seed: int) -> None:
    """The first steps with drafts took fifty times as long, as kernels were compiled in them."""
    engine = Engine(seed, 1, 1.0, 1.3)
    load = engine.payoff.load(1)
    for seconds, has_drafts in [(1.0, False)] * 8 + [(50.0, True)] * 4:
        load.add(seconds, DraftStepKind(has_drafts))
    assert load.cost() > 40
    engine.run(12_000, expected=1.0)
    assert engine.run(500, expected=1.0) > 450
