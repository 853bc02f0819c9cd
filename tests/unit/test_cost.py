"""The cost model: sensible before it knows anything, right once it has seen steps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.sched import LinearCost, StepShape

TRUE = np.array([2e-3, 5e-6, 1.5e-5, 3e-8, 4e-10])


def shape_of(num_decodes: int, context: int, num_prompt: int, seconds=None) -> StepShape:
    """Decodes with so much in the cache, and a prompt that starts; timed by TRUE."""
    num_seqs = num_decodes + (num_prompt > 0)
    num_tokens = num_decodes + num_prompt
    attention = context + num_decodes + num_prompt * (num_prompt + 1) // 2
    sizes = (num_seqs, num_tokens, context, attention)
    if seconds is None:
        seconds = float(TRUE @ (1, *sizes))
    return StepShape(num_seqs, num_tokens, num_decodes, context, attention, seconds)


def random_shape(rng: random.Random) -> StepShape:
    num_decodes = rng.randint(0, 128)
    context = sum(rng.randint(1, 2000) for _ in range(num_decodes))
    num_prompt = rng.choice([0, 0, rng.randint(1, 2000)])
    return shape_of(num_decodes, context, num_prompt or int(num_decodes == 0))


def predicted(cost: LinearCost, shape: StepShape) -> float:
    return cost.step_seconds(shape.num_seqs, shape.num_tokens, shape.context, shape.attention)


def test_before_any_step_more_work_takes_longer():
    cost = LinearCost()
    assert 0 < cost.step_seconds(1, 1) < cost.step_seconds(1, 100) < cost.step_seconds(100, 100)
    assert cost.prefill_seconds(100) < cost.prefill_seconds(100, context=10_000)
    assert 1e-3 < cost.step_seconds(1, 1) < 1e-1


def test_it_learns_the_true_coefficients_through_noise(seed):
    rng = random.Random(seed)
    cost = LinearCost()
    for _ in range(2000):
        shape = random_shape(rng)
        cost.observe(shape._replace(seconds=shape.seconds * rng.uniform(0.9, 1.1)))
    held_out = [random_shape(rng) for _ in range(300)]
    ratios = np.array([predicted(cost, shape) / shape.seconds for shape in held_out])
    assert abs(ratios.mean() - 1) < 0.01
    assert np.abs(ratios - 1).max() < 0.1
    assert min(cost.coefficients) >= 0


def test_the_same_steps_give_the_same_model(seed):
    models = []
    for _ in range(2):
        rng, cost = random.Random(seed), LinearCost()
        for _ in range(100):
            cost.observe(random_shape(rng))
        models.append(cost.coefficients)
    assert models[0] == models[1]


def test_one_step_sets_the_level_and_steps_of_one_shape_are_learnt():
    cost = LinearCost()
    cost.observe(shape_of(1, 100, 0, seconds=0.5))
    assert predicted(cost, shape_of(1, 100, 0)) == pytest.approx(0.5)
    assert cost.prefill_seconds(1000) > 1.0, "its proportions are still the prior's"
    for _ in range(200):
        cost.observe(shape_of(8, 800, 0, seconds=0.25))
    assert predicted(cost, shape_of(8, 800, 0)) == pytest.approx(0.25, rel=0.02)
    assert np.isfinite(cost.coefficients).all()


def test_it_forgets_a_machine_that_has_become_slower(seed):
    rng, cost = random.Random(seed), LinearCost(memory=200)
    for slower in (1.0, 3.0):
        for _ in range(1000):
            shape = random_shape(rng)
            cost.observe(shape._replace(seconds=slower * shape.seconds))
    probe = shape_of(32, 32_000, 500)
    assert predicted(cost, probe) == pytest.approx(3 * probe.seconds, rel=0.05)


def test_a_hiccup_is_not_learnt(seed):
    rng, cost = random.Random(seed), LinearCost()
    for index in range(500):
        shape = random_shape(rng)
        cost.observe(shape._replace(seconds=60.0) if index == 400 else shape)
    probe = shape_of(32, 32_000, 500)
    assert predicted(cost, probe) == pytest.approx(probe.seconds, rel=0.05)


def test_steps_that_were_not_measured_teach_nothing():
    cost, fresh = LinearCost(), LinearCost()
    for _ in range(100):
        cost.observe(shape_of(4, 40, 0, seconds=0.0))
    cost.observe(StepShape(0, 0, 0, 0, 0, 1.0))
    assert cost.coefficients == fresh.coefficients
    assert cost.num_observed == 0


@pytest.mark.parametrize("num_decodes, context", [(0, 0), (1, 10), (64, 100_000)])
@pytest.mark.parametrize("seconds", [0.02, 0.1, 1.0])
@pytest.mark.parametrize("learned", [False, True])
def test_max_tokens_is_the_inverse(num_decodes, context, seconds, learned):
    cost = LinearCost()
    rng = random.Random(1)
    for _ in range(200 if learned else 0):
        cost.observe(random_shape(rng))
    most = cost.max_tokens(seconds, num_decodes, context)
    assert most > num_decodes

    def seconds_of(num_tokens: int) -> float:
        num_prompt = num_tokens - num_decodes
        attention = context + num_decodes + num_prompt * (num_prompt + 1) // 2
        return cost.step_seconds(num_decodes, num_tokens, context, attention)

    assert seconds_of(most) <= seconds * (1 + 1e-9) < seconds_of(most + 1) * (1 + 2e-9)


def test_no_tokens_fit_into_too_little_time():
    cost = LinearCost()
    assert cost.max_tokens(1e-4) == 0
    assert cost.max_tokens(cost.step_seconds(50, 50, 0, 50) * 0.99, 50, 0) == 0
