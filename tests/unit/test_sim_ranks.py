"""Estimates of models that are divided among devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rank_estimates import LAYOUTS, ROWS

from engine.errors import ConfigError
from engine.sched.predict.cost import StepShape
from policylab.sim.datasheet import DEVICES, LAUNCH, MODELS, Sizes, estimate, from_datasheet
from policylab.sim.ranks import Link, cycle, last_end

LLAMA = Sizes.of(MODELS["llama-70b"])
H100 = DEVICES["h100"]
FREE = Link(bandwidth=1e30, latency=0.0)
DECODE = StepShape(32, 32, 32, 32 * 1000, 32 * 1001, 0.0)
PROMPT = StepShape(1, 2048, 0, 0, 2048 * 2049 // 2, 0.0)


@pytest.mark.parametrize("shape", [DECODE, PROMPT])
def test_ranks_divide_what_is_read_and_computed(shape: StepShape) -> None:
    one = estimate("one", LLAMA, H100).seconds(shape) - LAUNCH
    four = estimate("four", LLAMA, H100, 4, FREE).seconds(shape) - LAUNCH
    assert four == pytest.approx(one / 4, rel=0.01)


def test_all_reduces_cost_latency_and_bytes() -> None:
    """Two per layer, in which each of four ranks sends 3/4 of the hidden states twice."""
    free = estimate("free", LLAMA, H100, 4, FREE)
    slow = estimate("slow", LLAMA, H100, 4, Link(bandwidth=50e9, latency=20e-6))
    for shape in (DECODE, PROMPT):
        sent = 1.5 * shape.num_tokens * 8192 * 2
        expected = 160 * (20e-6 + sent / 50e9)
        assert slow.seconds(shape) - free.seconds(shape) == pytest.approx(expected, rel=1e-6)


def test_ranks_that_outnumber_kv_heads_read_the_same_ones() -> None:
    few = replace(LLAMA, num_kv_heads=2)
    assert few.kv_bytes(1) == 2 * few.kv_bytes(2) == 2 * few.kv_bytes(8)


def test_stages_overlap() -> None:
    assert last_end([[1.0, 2.0]]) == 3.0
    assert last_end([[1.0, 2.0]] * 3) == 7.0  # the second stage is always busy
    assert cycle([[1.0, 2.0]]) == 3.0  # a single sequence waits for both stages
    assert cycle([[1.0, 2.0]] * 2) == 4.0
    assert cycle([[1.0, 1.0]] * 4) == 4.0


def test_a_profile_by_name_counts_its_devices() -> None:
    by_name = from_datasheet("llama-70b@8xh100")
    assert by_name.seconds(DECODE) == estimate("", LLAMA, H100, 8).seconds(DECODE)
    with pytest.raises(ConfigError, match="llama-70b has 64 attention heads: name at most"):
        from_datasheet("llama-70b@65xh100")


def test_the_table_orders_layouts_as_their_links_do() -> None:
    one_host, stages, stages_apart, across = LAYOUTS
    for num in ROWS:
        assert one_host.decode(num) < stages.decode(num) <= stages_apart.decode(num)
        assert one_host.decode(num) < across.decode(num)
    assert one_host.prompt() < stages.prompt() < stages_apart.prompt() < across.prompt()
    # 140 GB of weights and 320 KB of keys and values per token, divided by eight.
    for layout in LAYOUTS:
        assert 17e9 < layout.weights() < 18e9
        assert layout.kv_tokens() == pytest.approx((69e9 - layout.weights()) / 40960, rel=0.01)
