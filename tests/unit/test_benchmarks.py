"""The benchmarks measure what they say: workloads stay the same, figures follow from the times."""

from dataclasses import replace

import compare
import measure
import pytest
import scheduler
import workloads
from peers.metronome_scheduler import Ours
from peers.scheduler_driver import MEASURES, Figures
from scheduler_loads import LOADS, OURS_ONLY


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


def test_scheduler_loads_share_what_they_say() -> None:
    one, other = LOADS["shared"].prompt(3), LOADS["shared"].prompt(4)
    assert one[:1536] == other[:1536]
    assert len({tuple(prompt[1536:]) for prompt in (one, other)}) == 2
    # Recorded: figures of different days are comparable only while these do not move.
    assert LOADS["chunked"].prompt(3)[:3] == [7767, 7798, 7829]


def few(name: str) -> Figures:
    """A load cut down to a moment."""
    load = LOADS[name]
    count = {"decode": load.requests, "drain": 12, "lookup": 2, "queue": 300}[load.kind]
    steps = min(load.steps, 3)
    return MEASURES[load.kind](Ours, replace(load, requests=count, steps=steps))


@pytest.mark.parametrize(
    "name", ["decode_1", "decode_32", "decode_256_hooks", "preempting", "hash_fast", "queue_static"]
)
def test_our_scheduler_runs_the_loads(name: str) -> None:
    assert few(name)  # what a step must have done is checked while it is measured


def runs_of(**engines: float) -> scheduler.Runs:
    """One round in which a step with 256 running took so many microseconds."""
    quiet = {"wall_s": 1.0, "others_s": 0.0, "steal_s": 0.0}
    return {
        engine.replace("_", "-"): [{"workloads": {"decode_256": {"both_us": took, **quiet}}}]
        for engine, took in engines.items()
    }


def test_scheduler_targets_are_ratios_to_the_peer() -> None:
    row = next(row for row in scheduler.table_rows() if row.load == "decode_256")
    assert row.is_met(runs_of(metronome=100.0, vllm_cpu=2100.0)) is True
    assert row.is_met(runs_of(metronome=100.0, vllm_cpu=1900.0)) is False
    assert row.is_met(runs_of(metronome=100.0)) is None


def test_every_scheduler_load_is_in_the_table_and_has_a_peer() -> None:
    rows = scheduler.table_rows()
    assert {row.load for row in rows} == LOADS.keys()
    assert not {row.peer_load or row.load for row in rows} & OURS_ONLY
