"""Ratios of two checkouts that were measured in turn follow from the times."""

import json
from pathlib import Path

import against
import pytest
from pairs import Pair, estimate_for, in_order, interval


def test_workloads_are_compared_by_the_sums_of_a_round() -> None:
    rounds = [Pair([3.0, 1.0], [1.0, 1.0]), Pair([1.0, 2.0], [3.0]), Pair([9.0], [3.0])]
    assert estimate_for("workloads", "W1")(rounds) == pytest.approx(2.0)


def test_a_disturbed_trip_changes_no_ratio() -> None:
    turns = [Pair([2.0, 2.0, 2.0], [1.0, 1.0, 50.0]) for _ in range(3)]
    assert estimate_for("trips", "process")(turns) == pytest.approx(2.0)


def test_steps_of_a_load_to_its_end_are_compared_one_by_one() -> None:
    """In each turn another step is disturbed; the lower quartile of each was never."""
    disturbed = [[1.0] * 4 for _ in range(4)]
    for turn, steps in enumerate(disturbed):
        steps[turn] = 30.0
    turns = [Pair([2.0] * 4, steps) for steps in disturbed]
    assert estimate_for("loads", "pressure")(turns) == pytest.approx(2.0)
    # Other steps: nothing but the sums can be compared.
    assert estimate_for("loads", "pressure")([Pair([2.0, 2.0], [1.0])]) == pytest.approx(4.0)


def test_the_interval_holds_the_ratio_and_is_as_wide_as_the_pairs_differ() -> None:
    estimate = estimate_for("workloads", "W1")
    same = [Pair([2.0], [1.0])] * 12
    assert interval(same, estimate) == (2.0, 2.0)
    mixed = [Pair([1.0 + number / 10], [1.0]) for number in range(12)]
    least, most = interval(mixed, estimate)
    assert 1.0 < least < estimate(mixed) < most < 2.1
    assert interval(mixed, estimate) == (least, most), "the same pairs, the same interval"


def test_figures_say_times_and_ratios_of_both_sides() -> None:
    row = against.Row("trips", "process", [Pair([0.004], [0.002])], {"other": 0.2, "this": 0.1})
    figures = row.figures()
    assert figures["ratio"] == 2.0 and figures["ms"] == {"other": 4.0, "this": 2.0}
    assert figures["cpu_s"] == {"other": 0.2, "this": 0.1}
    json.dumps(figures)


def test_who_is_first_alternates() -> None:
    sides = {"other": 1, "this": 2}
    assert [next(iter(in_order(sides, turn))) for turn in range(3)] == [
        "other",
        "this",
        "other",
    ]


class Scripted:
    """A checkout that takes so many steps of a second, and asks who is next."""

    def __init__(self, side: str, num_steps: int, order: list[str]) -> None:
        self._told = [against.Told("W1", [1.0], 0.5) for _ in range(num_steps)]
        self._side, self._order = side, order

    def turn(self) -> against.Told | None:
        self._order.append(self._side)
        return self._told.pop() if self._told else None


def test_one_that_needs_more_steps_goes_on_alone() -> None:
    order: list[str] = []
    children = {"other": Scripted("other", 3, order), "this": Scripted("this", 1, order)}
    rows = {"W1": against.Row("workloads", "W1")}
    seconds = against.step_in_turn(children, rows)  # type: ignore[arg-type]
    assert seconds == {"other": {"W1": [1.0] * 3}, "this": {"W1": [1.0]}}
    assert order == ["other", "this", "this", "other", "other", "other"]
    assert rows["W1"].cpu == {"other": 1.5, "this": 0.5}


def test_nothing_to_measure_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["against.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        against.main()
    assert "give --model, --trips or --loads" in capsys.readouterr().err
