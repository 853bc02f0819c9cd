"""How many drafts are verified: as many as bring more than they cost, and next to none if none."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from engine.spec.worth import MOST_REST, Worth


@dataclass
class Text:
    """What of a request is looked at."""

    arrival: int
    num_tokens: int = 10


def write(worth: Worth, text: Text, chance: float, price: float, num: int, rng) -> tuple[int, int]:
    """Write tokens with four drafts each time it is asked; drafts verified, and those right."""
    verified = right = 0
    end = text.num_tokens + num
    while text.num_tokens < end:
        chosen = 0 if worth.is_resting(text) else worth.num_to_verify(text, [1, 2, 3, 4], price)
        good = 0
        while good < chosen and rng.random() < chance:
            good += 1
        if chosen:
            worth.count(text, chosen, good)
        verified, right = verified + chosen, right + good
        text.num_tokens += 1 + good
    return verified, right


@pytest.mark.parametrize("price", [0.02, 0.1, 0.3])
def test_drafts_that_are_mostly_right_are_all_verified(price: float, seed: int) -> None:
    rng, worth, text = random.Random(seed), Worth(4), Text(0)
    write(worth, text, 0.9, price, 200, rng)
    verified, right = write(worth, text, 0.9, price, 600, rng)
    assert right / 600 > 0.6, (verified, right)


def test_drafts_that_are_never_right_cost_next_to_nothing(seed: int) -> None:
    rng, worth, text = random.Random(seed), Worth(4), Text(0)
    write(worth, text, 0.0, 0.1, 300, rng)
    verified, _ = write(worth, text, 0.0, 0.1, 1000, rng)
    assert 0.1 * verified <= 0.005 * 1000


def test_the_more_a_draft_must_bring_the_fewer_are_verified(seed: int) -> None:
    rng = random.Random(seed)
    each = []
    for price in (0.05, 0.3, 0.7, 1.5):
        worth, text = Worth(4), Text(0)
        write(worth, text, 0.7, price, 300, rng)
        each.append(write(worth, text, 0.7, price, 1000, rng)[0])
    assert each[0] > each[1] > each[2] and each[3] == 0


def test_a_text_that_begins_to_repeat_itself_is_noticed(seed: int) -> None:
    rng, worth, text = random.Random(seed), Worth(4), Text(0)
    write(worth, text, 0.0, 0.1, 1000, rng)
    write(worth, text, 0.95, 0.1, 2 * MOST_REST + 60, rng)
    verified, right = write(worth, text, 0.95, 0.1, 300, rng)
    assert right > 150, (verified, right)


def test_another_request_begins_with_what_is_known_of_all(seed: int) -> None:
    rng, worth = random.Random(seed), Worth(4)
    for arrival in range(20):
        text = Text(arrival)
        write(worth, text, 0.0, 0.2, 60, rng)
        worth.release(text)
    verified, _ = write(worth, Text(99), 0.0, 0.2, 60, rng)
    assert verified <= 8
