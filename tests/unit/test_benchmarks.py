"""The benchmarks measure what they say: workloads stay the same, figures follow from the times."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import compare
import measure
import pytest
import roofline
import scheduler
import start
import workloads
from peers.metronome_scheduler import Ours
from peers.scheduler_driver import MEASURES, Figures
from scheduler_loads import LOADS, OURS_ONLY
from shapes import SHAPES


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


def runs_of(rates: dict[str, list[float]], others: list[float]) -> compare.Runs:
    """Engines' tokens a second in W2, by round, and how much others used meanwhile."""
    figures = {"ttft_ms_p50": 1.0, "itl_ms_p50": 2.0, "wall_s": 10.0, "steal_s": 0.0}
    rest = {"startup": {"first_token_s": 3.0}, "memory": {"pss_mib": 100.0}}
    return {
        name: [
            {"workloads": {"W2": {**figures, "output_tok_s": rate, "others_s": busy}}, **rest}
            for rate, busy in zip(found, others, strict=True)
        ]
        for name, found in rates.items()
    }


def test_figures_come_from_quiet_rounds_if_there_are_any() -> None:
    rates = {compare.OURS: [30.0, 1.0, 10.0, 20.0], "peer": [10.0, 9.0, 10.0, 5.0]}
    row = compare.rows(runs_of(rates, [0.1, 5.0, 0.1, 0.1]), ["W2"])[0]
    assert row.figures[compare.OURS] == compare.Figure(20.0, 10.0, 30.0)
    assert row.ratios["peer"] is not None and row.ratios["peer"].value == pytest.approx(3.0)
    busy = compare.rows(runs_of(rates, [5.0] * 4), ["W2"])[0]
    assert busy.cell("peer").startswith("~9.5 ")


def test_ratios_are_medians_over_the_rounds_and_over_one_if_ours_is_better() -> None:
    """Each round is compared with itself: a machine that slows down changes no ratio."""
    ours, theirs = [4.0, 2.0, 1.0], [2.0, 1.0, 0.5]
    more = compare.Ratio.of(ours, theirs, is_more_better=True)
    less = compare.Ratio.of(ours, theirs, is_more_better=False)
    assert str(more) == "2.00 (2.00 - 2.00)" and str(less) == "0.50 (0.50 - 0.50)"
    mixed = compare.Ratio.of([4.0, 2.0, 3.0, 5.0], [2.0] * 4, is_more_better=True)
    assert mixed is not None and mixed.least < mixed.value < mixed.most
    assert compare.Ratio.of([0.0], [1.0], is_more_better=True) is None


def test_shares_are_of_what_the_machine_allows(tmp_path: Path) -> None:
    shape = SHAPES["mid"]
    config = shape.hf_config(2048)
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = roofline.Model.of(tmp_path)
    slow = roofline.Ceilings(threads=1, bytes=1e9, float32=1e20, bfloat16=1.0)
    floors = compare.Floors(model, slow, {compare.OURS: "bfloat16", "peer": "q8_0"})
    phases = roofline.phases(model, slow, "bfloat16", "W2")
    assert phases is not None
    rates = {compare.OURS: [phases.of("output_tok_s") / 2], "peer": [1.0]}
    rate, _, itl = compare.rows(runs_of(rates, [0.0]), ["W2"], floors)[:3]
    assert rate.shares == {compare.OURS: pytest.approx(0.5)}
    assert itl.shares == {compare.OURS: pytest.approx(1e3 * phases.step / 2.0)}
    assert rate.cell(compare.OURS).endswith(", 50%") and "%" not in rate.cell("peer")


def test_arrivals_at_a_share_of_a_peers_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"workloads": {"W1": {"output_tok_s": 100.0}}}
    monkeypatch.setattr(compare, "run_once", lambda peer, repeat, asked: told)
    peer = compare.Peer("peer", "peers.none", "python", "model", ["W4"])
    rate = compare.rate_at_share(0.6, peer, compare.parse(["model"]))
    asked = sum(arrival.num_output for arrival in workloads.make("W4")) / 24
    assert rate * asked == pytest.approx(60.0)


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


def scheduler_runs(**engines: float) -> scheduler.Runs:
    """One round in which a step with 256 running took so many microseconds."""
    quiet = {"wall_s": 1.0, "others_s": 0.0, "steal_s": 0.0}
    return {
        engine.replace("_", "-"): [{"workloads": {"decode_256": {"both_us": took, **quiet}}}]
        for engine, took in engines.items()
    }


def test_scheduler_targets_are_ratios_to_the_peer() -> None:
    row = next(row for row in scheduler.table_rows() if row.load == "decode_256")
    assert row.is_met(scheduler_runs(metronome=100.0, vllm_cpu=2100.0)) is True
    assert row.is_met(scheduler_runs(metronome=100.0, vllm_cpu=1900.0)) is False
    assert row.is_met(scheduler_runs(metronome=100.0)) is None


def test_every_scheduler_load_is_in_the_table_and_has_a_peer() -> None:
    rows = scheduler.table_rows()
    assert {row.load for row in rows} == LOADS.keys()
    assert not {row.peer_load or row.load for row in rows} & OURS_ONLY


def test_a_start_is_allowed_weights_pool_and_a_margin(tmp_path: Path) -> None:
    shape = SHAPES["mid"]
    (tmp_path / "config.json").write_text(json.dumps(shape.hf_config(2048)))
    asked = argparse.Namespace(model=tmp_path)
    told = start.allowed(asked, {"dtype": "bfloat16", "kv_pool_tokens": 1024})
    table = shape.vocab * shape.hidden
    assert told["weights"] == pytest.approx(2 * (shape.num_read + table) / 2**20, rel=1e-3)
    assert told["pool"] == shape.kv_bytes(2) / 1024
    assert told["allowed"] == told["weights"] + told["pool"] + 400
