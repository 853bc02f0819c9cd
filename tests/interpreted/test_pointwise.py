"""Norms and gated activations of every body against plain torch in float64."""

import pytest
import torch
from torch.testing import assert_close

from kernels import cpu, reference
from kernels.triton import activation, layer_norms, norm

# NumPy warns of infinities, devices do not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

NORMS = {"reference": reference, "cpu": cpu, "triton": norm}
ACTS = {"reference": reference, "cpu": cpu, "triton": activation}
LAYER_NORMS = {"reference": reference, "cpu": cpu, "triton": layer_norms}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SIZES = {torch.float32: (7, 96), torch.float16: (1, 1000), torch.bfloat16: (33, 64)}

by_body = pytest.mark.parametrize("body", NORMS)
by_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def random(*size: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(size) * scale).to(dtype)


def close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype is dtype and got.shape == wanted.shape
    assert_close(got.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def _seeded(seed: int) -> None:
    torch.manual_seed(seed)


@by_body
@by_dtype
@pytest.mark.parametrize("add_one", [False, True])
def test_norms(body: str, dtype: torch.dtype, add_one: bool) -> None:
    size = SIZES[dtype]
    x, residual = random(*size, dtype=dtype, scale=3), random(*size, dtype=dtype)
    weight = random(size[1], dtype=dtype)
    kept = x.clone(), residual.clone()
    got = NORMS[body].rms_norm(x, weight, 1e-5, add_one=add_one)
    close(got, reference.rms_norm(x.double(), weight.double(), 1e-5, add_one=add_one), dtype)
    got, total = NORMS[body].add_rms_norm(x, residual, weight, 1e-5, add_one=add_one)
    assert torch.equal(total, x + residual)
    wanted = reference.rms_norm(total.double(), weight.double(), 1e-5, add_one=add_one)
    close(got, wanted, dtype)
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("body", ["reference", "triton"])
def test_norms_round_where_hugging_face_does(body: str) -> None:
    """Bit for bit: before the weight in Llama's form, after it in Gemma's. The CPU's body rounds
    once, at the end."""
    x, weight = random(20, 128, dtype=torch.bfloat16), random(128, dtype=torch.bfloat16)
    for add_one in (False, True):
        got = NORMS[body].rms_norm(x, weight, 1e-6, add_one=add_one)
        wanted = reference.rms_norm(x, weight, 1e-6, add_one=add_one)
        differ = (got != wanted).sum()
        assert differ <= 4, f"{differ} of {got.numel()}"  # the sum's order moves a rounding edge


@by_body
def test_norm_of_views_heads_and_nothing(body: str) -> None:
    rms_norm = NORMS[body].rms_norm
    x, weight = random(3, 4, 32), random(32)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x.double(), weight.double(), 1e-6), x.dtype)
    wide = random(5, 96)
    wide[:, 32:] = torch.nan
    view = wide[:, :32]  # rows further apart than they are long
    wanted = reference.rms_norm(view.double(), weight.double(), 1e-6)
    close(rms_norm(view, weight, 1e-6), wanted, x.dtype)
    assert rms_norm(x[:0], weight, 1e-6).shape == (0, 4, 32)


@by_body
@by_dtype
@pytest.mark.parametrize("act", activation.ACTS)
def test_gated_activations(body: str, dtype: torch.dtype, act: str) -> None:
    gate_up = random(3, 2 * 1100, dtype=dtype, scale=6)
    wanted = reference.act_mul(gate_up.double(), act)
    close(ACTS[body].act_mul(gate_up, act), wanted, dtype)


@by_body
@by_dtype
@pytest.mark.parametrize(("group", "norm_first"), [(96, False), (32, True), (24, True), (0, False)])
def test_gated_norms(body: str, dtype: torch.dtype, group: int, norm_first: bool) -> None:
    rows = random(5, 200, dtype=dtype, scale=2)
    x, gate = rows[:, :96], rows[:, 100:196]
    weight = random(96, dtype=dtype) if group else None
    kind = {"group": group or 96, "norm_first": norm_first}
    wide = None if weight is None else weight.double()
    wanted = reference.grouped_gated_norm(x.double(), gate.double(), wide, 1e-5, **kind)
    got = NORMS[body].grouped_gated_norm(x, gate, weight, 1e-5, **kind)
    close(got, wanted, dtype)


@by_dtype
@pytest.mark.parametrize("body", ACTS)
@pytest.mark.parametrize("activation", ["", "sigmoid"])
@pytest.mark.parametrize("columns", [1, 1100])
def test_gates(body: str, dtype: torch.dtype, activation: str, columns: int) -> None:
    rows = random(9, 2300, dtype=dtype, scale=3)
    x, gate = rows[:, 3:1103], rows[:, 1150 : 1150 + columns]
    wanted = reference.apply_gate(x.double(), gate.double(), activation)
    close(ACTS[body].apply_gate(x, gate, activation), wanted, dtype)


@by_dtype
@pytest.mark.parametrize("body", ACTS)
def test_squares_of_positive_numbers(body: str, dtype: torch.dtype) -> None:
    x = random(3, 500, dtype=dtype)
    close(ACTS[body].relu_squared(x), reference.relu_squared(x.double()), dtype)


@by_dtype
def test_adding_in_place(dtype: torch.dtype) -> None:
    x, y = random(3, 500, dtype=dtype), random(3, 500, dtype=dtype)
    wanted = x + y
    assert torch.equal(cpu.add_in_place(x, y), wanted) and torch.equal(x, wanted)


@by_dtype
def test_scaling_in_place(dtype: torch.dtype) -> None:
    x = random(3, 500, dtype=dtype)
    wanted = x * 0.246
    assert torch.equal(cpu.scale_in_place(x, 0.246), wanted) and torch.equal(x, wanted)


@by_body
@by_dtype
@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norms(body: str, dtype: torch.dtype, has_bias: bool) -> None:
    size = SIZES[dtype]
    x, residual = random(*size, dtype=dtype, scale=3) + 2, random(*size, dtype=dtype)
    weight, bias = random(size[1]), random(size[1]) if has_bias else None
    exact = weight.double(), None if bias is None else bias.double(), 1e-5
    norms = LAYER_NORMS[body]
    close(norms.layer_norm(x, weight, bias, 1e-5), reference.layer_norm(x.double(), *exact), dtype)
    wanted = reference.layer_norm(x.double() + residual.double(), *exact)
    close(norms.layer_norm(x, weight, bias, 1e-5, residual), wanted, dtype)
    got, total = norms.add_layer_norm(x, residual, weight, bias, 1e-5)
    assert torch.equal(total, x + residual)
    close(got, reference.layer_norm(total.double(), *exact), dtype)


@by_dtype
@pytest.mark.parametrize("body", ACTS)
@pytest.mark.parametrize("act", activation.SINGLE_ACTS)
def test_activations(body: str, dtype: torch.dtype, act: str) -> None:
    x = random(3, 700, dtype=dtype, scale=3)
    x[0, :5] = torch.tensor([0.0, -0.0, 40.0, -40.0, -6.0])
    wanted = reference.activate(x.double(), act)
    close(ACTS[body].activate(x, act), wanted, dtype)
    if dtype is torch.float32:
        assert_close(ACTS[body].activate(x, act).double(), wanted, rtol=1e-6, atol=2e-6)


@by_body
def test_unknown_activation_is_named(body: str) -> None:
    with pytest.raises(ValueError, match="'swish'"):
        ACTS[body].act_mul(torch.zeros(1, 4), "swish")
    with pytest.raises(ValueError, match="'swish'"):
        ACTS[body].activate(torch.zeros(1, 4), "swish")


@by_body
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(body: str, bad: float) -> None:
    x = torch.ones(2, 8)
    x[0, 1] = bad
    for act in activation.ACTS:
        got = ACTS[body].act_mul(x, act)
        assert got[1].isfinite().all()
        assert not got[0, 1].isfinite() or bad < 0  # silu(-inf) may be a zero
    got = ACTS[body].activate(x, "gelu")
    assert got[1].isfinite().all() and (not got[0, 1].isfinite() or bad < 0)
    got = NORMS[body].rms_norm(x, torch.ones(8), 1e-6)
    assert not got[0].isfinite().all() and got[1].isfinite().all()
    got = LAYER_NORMS[body].layer_norm(x, torch.ones(8), None, 1e-6)
    assert not got[0].isfinite().all() and got[1].isfinite().all()
