"""Selective scans of a CPU against plain torch in float64."""

import pytest
import torch
from support import scan_checks
from support.state_steps import KEPT, STEPS, Part, meta_of

import kernels
from kernels.cpu.threads import num_threads, set_threads

DTYPES = (torch.float32, torch.bfloat16)
# Heads, groups, state size, head width; the last one has no compiled loops.
HEADS = ((4, 2, 16, 16), (6, 1, 128, 64), (3, 3, 12, 48), (4, 1, 6, 10))
# A kernel is compiled for each dtype, and for heads of one vector and of more. The default tier
# tests each of the two with one dtype.
USUAL = [(shape, torch.bfloat16 if shape[3] == 64 else torch.float32) for shape in HEADS[:3]]
SHAPES = [
    pytest.param(shape, dtype, marks=[pytest.mark.slow] * ((shape, dtype) not in USUAL))
    for shape in HEADS[:3]
    for dtype in DTYPES
]
PLAIN = [(shape, torch.float16) for shape in HEADS] + [(HEADS[3], dtype) for dtype in DTYPES]
CHANNELS = ((16, 64), (8, 80), (5, 24))  # state size, channels


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@pytest.mark.isa
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("shape", "dtype"), [*SHAPES, *PLAIN])
def test_scan_by_heads(shape: scan_checks.Shape, step: str, dtype: torch.dtype) -> None:
    scan_checks.check_heads(kernels.head_scan, dtype, step, shape)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("shape", CHANNELS)
def test_scan_by_channels(shape: tuple[int, int], step: str, dtype: torch.dtype) -> None:
    scan_checks.check_channels(kernels.channel_scan, dtype, step, shape)


@pytest.mark.parametrize(("shape", "dtype"), SHAPES)
def test_a_prompt_in_parts_gives_the_same_bits_by_heads(
    shape: scan_checks.Shape, dtype: torch.dtype
) -> None:
    scan_checks.check_cuts_of_heads(kernels.head_scan, dtype, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CHANNELS[:2])
def test_a_prompt_in_parts_gives_the_same_bits_by_channels(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    scan_checks.check_cuts_of_channels(kernels.channel_scan, dtype, shape)


@pytest.mark.isa
@pytest.mark.parametrize("kept", KEPT)
def test_states_of_16_bits(kept: torch.dtype) -> None:
    dtype = torch.bfloat16
    for step in STEPS:
        scan_checks.check_heads(kernels.head_scan, dtype, step, HEADS[1], kept)
        scan_checks.check_channels(kernels.channel_scan, dtype, step, CHANNELS[1], kept)
    scan_checks.check_cuts_of_heads(kernels.head_scan, dtype, HEADS[1], kept)
    scan_checks.check_cuts_of_channels(kernels.channel_scan, dtype, CHANNELS[1], kept)


def test_threads_and_neighbours_change_no_bit() -> None:
    parts, shape = [Part(1, True)] * 5 + [Part(40), Part(5, True, 2)], HEADS[1]
    meta, layer = meta_of(parts), scan_checks.head_layer(shape[0])
    xbc, dt = scan_checks.head_inputs(50, shape, torch.bfloat16)
    state = torch.randn(len(parts) * 5, shape[0], *shape[2:])
    before, results = num_threads(), []
    try:
        for threads in (1, 3):
            set_threads(threads)
            results.append(kernels.head_scan(xbc, dt, layer, state.clone(), meta))
    finally:
        set_threads(before)
    assert torch.equal(*results)
    got = kernels.head_scan(xbc[5:45], dt[5:45], layer, state.clone(), meta_of(parts[5:6]))
    assert torch.equal(got, results[0][5:45])


def test_large_and_missing_numbers_stay_what_they_are() -> None:
    shape = HEADS[0]
    xbc, dt = scan_checks.head_inputs(3, shape, torch.float32)
    layer, state = scan_checks.head_layer(shape[0]), torch.zeros(15, 4, 16, 16)
    dt[0] = 300.0  # softplus(dt) is dt; the old state decays to nothing
    dt[1], xbc[2, 0] = -300.0, torch.nan
    got = kernels.head_scan(xbc, dt, layer, state, meta_of([Part(1), Part(1), Part(1)]))
    assert got[:2].isfinite().all() and got[2].isnan().sum() == 1
