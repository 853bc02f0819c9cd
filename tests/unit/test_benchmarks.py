"""Benchmarks run, and what they measure stays the same, so that days can be compared."""

from dataclasses import replace
from pathlib import Path

import pytest
import workloads
from hybrid_shapes import HYBRIDS, hybrid_config
from make_models import FORMS, write_directory, write_gguf
from measure import Timeline
from pairs import Pair, estimate_for, interval
from peers.metronome_scheduler import Ours
from peers.scheduler_driver import MEASURES
from scheduler_loads import LOADS
from shapes import SHAPES

from engine.config.model import read_model_info
from engine.gguf.header import read_gguf
from engine.models.load import native_spec
from engine.models.quant import format_of
from engine.models.work import Shapes


def test_workloads_and_loads_are_those_of_other_days() -> None:
    assert workloads.make("W1", 1) == workloads.make("W1", 1) != workloads.make("W1", 2)
    assert workloads.make("W2")[0].prompt[:4] == [7841, 7080, 7774, 6965]
    assert workloads.make("W4")[-1].num_output == 86
    assert LOADS["chunked"].prompt(3)[:3] == [7767, 7798, 7829]


@pytest.mark.parametrize("name", ["decode_256_hooks", "preempting", "hash_fast", "queue_static"])
def test_our_scheduler_runs_the_loads(name: str) -> None:
    """What a step must have done is checked while it is measured."""
    load = LOADS[name]
    count = {"decode": load.requests, "drain": 12, "lookup": 2, "queue": 300}[load.kind]
    few = replace(load, requests=count, steps=min(load.steps, 3))
    assert MEASURES[load.kind](Ours, few)


def test_two_checkouts_are_compared_by_turns_and_with_an_interval() -> None:
    rounds = [Pair([3.0, 1.0], [1.0, 1.0]), Pair([1.0, 2.0], [3.0]), Pair([9.0], [3.0])]
    assert estimate_for("workloads", "W1")(rounds) == pytest.approx(2.0)
    disturbed = [Pair([2.0, 2.0, 2.0], [1.0, 1.0, 50.0]) for _ in range(3)]
    assert estimate_for("trips", "process")(disturbed) == pytest.approx(2.0)
    estimate = estimate_for("workloads", "W1")
    mixed = [Pair([1.0 + number / 10], [1.0]) for number in range(12)]
    least, most = interval(mixed, estimate)
    assert 1.0 < least < estimate(mixed) < most < 2.1


def test_made_models_load_in_quantised_formats(tmp_path: Path) -> None:
    shape = SHAPES["tiny"]
    write_gguf(shape, FORMS["q4_0"], tmp_path / "tiny.gguf")
    tensors = read_gguf(tmp_path / "tiny.gguf").tensors
    assert tensors["token_embd.weight"].num_bytes == shape.vocab * shape.hidden // 32 * 18
    for form in ("bf16", "awq", "w8a8"):
        write_directory(shape, form, tmp_path / form)
        info = read_model_info(tmp_path / form)
        assert (format_of(info) is None) == (form == "bf16")


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrid_shapes_are_of_native_families_and_of_100_to_400_million_weights(
    name: str, tmp_path: Path
) -> None:
    hybrid_config(name).save_pretrained(tmp_path)
    spec = native_spec(read_model_info(tmp_path))
    assert spec is not None
    assert 1e8 < Shapes(spec).num_weights < 4e8


def test_steady_decode_begins_when_every_request_has_some_tokens() -> None:
    timeline = Timeline(workloads.make("D2"), 0.0)
    timeline.note(0, 160, 1.0)
    timeline.note_cpu()
    assert timeline.steady_cpu_rate() == 0.0
    timeline.note(1, 10, 1.0)
    timeline.note_cpu()
    timeline.note(1, 160, 2.0)
    timeline.note_cpu()
    assert timeline.steady_cpu is not None
    assert timeline.steady_cpu[0] == 170
    assert timeline.steady_cpu_rate() > 0.0
