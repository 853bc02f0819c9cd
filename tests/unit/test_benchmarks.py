"""The benchmarks measure what they say: workloads stay the same, figures follow from the times."""

import compare
import measure
import pytest
import workloads


def test_workloads_are_the_same_in_every_process_and_differ_by_repeat() -> None:
    assert workloads.make("W1", 1) == workloads.make("W1", 1)
    assert workloads.make("W1", 1) != workloads.make("W1", 2)
    # Recorded: figures of different days are comparable only while these do not move.
    assert workloads.make("W2")[0].prompt[:4] == [7841, 7080, 7774, 6965]
    assert workloads.make("W4")[-1].num_output == 86


@pytest.mark.parametrize(
    ("name", "count", "longest", "outputs"),
    [("W1", 32, 256, 64), ("W2", 1, 128, 128), ("W3", 32, 544, 32), ("D7", 7, 16, 160)],
)
def test_workload_shapes(name: str, count: int, longest: int, outputs: int) -> None:
    made = workloads.make(name)
    assert len(made) == count
    assert {len(arrival.prompt) for arrival in made} == {longest}
    assert {arrival.num_output for arrival in made} == {outputs}


def test_w3_shares_its_beginning_and_nothing_else() -> None:
    first, second, *_ = workloads.make("W3")
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:]


def test_unknown_workload_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="W1, W2, W3, W4"):
        workloads.make("X1")


def test_timeline_turns_times_into_figures() -> None:
    arrivals = [workloads.Arrival(0.0, [1] * 4, 20), workloads.Arrival(1.0, [1] * 6, 20)]
    timeline = measure.Timeline(arrivals, start=100.0)
    for count in range(1, 21):
        timeline.note(0, count, 100.0 + 0.1 * count)
        timeline.note(1, count, 101.0 + 0.1 * count)
    figures = timeline.summary()
    assert figures["wall_s"] == pytest.approx(3.0)
    assert figures["output_tok_s"] == pytest.approx(40 / 3, abs=0.01)
    assert figures["ttft_ms_p50"] == pytest.approx(100.0)
    assert figures["tpot_ms_p50"] == pytest.approx(100.0)
    # Both decode at once only from 101.1 to 102.0, and neither is steady in all of it.
    assert figures["steady_tok_s"] == 0.0


def test_an_engine_that_stops_early_is_not_taken_for_a_fast_one() -> None:
    timeline = measure.Timeline([workloads.Arrival(0.0, [1], 2)], start=0.0)
    timeline.note(0, 1, 0.5)
    with pytest.raises(ValueError, match=r"\[1\] tokens instead of \[2\]"):
        timeline.summary()


def run_of(rate: float, others: float) -> dict:
    figures = {"output_tok_s": rate, "wall_s": 10.0, "others_s": others, "steal_s": 0.0}
    return {"workloads": {"W2": figures}}


def test_figures_come_from_quiet_runs_if_there_are_any() -> None:
    quiet = [run_of(rate, others=0.1) for rate in (30.0, 10.0, 20.0)]
    busy = [run_of(rate, others=5.0) for rate in (1.0, 3.0)]
    best = compare.figure(quiet + busy, "W2", "output_tok_s")
    assert best == compare.Figure(20.0, 10.0, 30.0)
    worst = compare.figure(busy, "W2", "output_tok_s")
    assert str(worst).startswith("~2 ")


def test_ratios_over_one_mean_ours_is_better() -> None:
    figures = {compare.OURS: compare.Figure.of([4.0]), "peer": compare.Figure.of([2.0])}
    assert compare.Row("tokens a second", True, figures).ratio("peer") == "2.00"
    assert compare.Row("milliseconds", False, figures).ratio("peer") == "0.50"
    assert compare.Row("milliseconds", False, figures).ratio("absent") == ""


def test_process_accounting_sees_this_process() -> None:
    assert measure.memory()["peak_rss_mib"] > 1
    before = measure.cpu_seconds()
    sum(i * i for i in range(3_000_000))
    assert measure.cpu_seconds() > before
