"""The page of shipped policies says what docstrings, claims and kept figures say, no more and no
less."""

from __future__ import annotations

from typing import Any

import pytest

from policylab.sim.estimate import chance, corrected, mean_over
from tools import policies_table
from tools.policies_claims import CLAIMS
from tools.policies_figures import read
from tools.policies_measure import NUM_SEEDS


def kept_figures() -> dict[str, Any]:
    return read(policies_table.RESULTS)


def test_the_page_is_what_is_written_of_the_kept_figures() -> None:
    page = policies_table.TARGET.read_text(encoding="utf-8")
    assert page == policies_table.written_page(), "run: python tools/policies_table.py"


def test_each_policy_does_what_is_claimed_of_it_or_is_said_to_lack_something() -> None:
    kept = kept_figures()
    if kept["seeds"] < NUM_SEEDS:
        pytest.skip(f"{kept['seeds']} seeds are kept, of {NUM_SEEDS}: chance would decide")
    for policy, claims in CLAIMS.items():
        found = [(policies_table.of_claim(kept, policy, each), each) for each in claims.claims]
        is_seen = any(policies_table.verdict(*each) == "as claimed" for each in found)
        assert is_seen or claims.lacks, policy


def test_a_chance_is_that_of_students_interval() -> None:
    """An interval that just holds 0 is a chance of 1 in 20."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    touching = [value - mean_over(values).low for value in values]
    assert chance(touching) == pytest.approx(0.05, abs=1e-6)
    assert chance([1.0, -1.0]) == pytest.approx(1.0)
    assert chance([0.0, 0.0]) == 1.0 and chance([2.0]) == 1.0 and chance([2.0, 2.0]) == 0.0
    assert chance([10.0, 10.1, 9.9, 10.0]) == pytest.approx(1.5e-7, rel=0.01)


def test_chances_are_corrected_for_their_number() -> None:
    assert corrected([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert corrected([0.6, 0.7]) == [1.0, 1.0] and corrected([]) == []
