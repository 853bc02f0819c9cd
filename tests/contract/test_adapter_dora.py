"""DoRA's scales of outputs, computed from the rows of layers in every form that the CPU has."""

import pytest
import torch

from engine.layers.linear import make_linear
from engine.lora.dora import output_changes
from engine.lora.placing import Slice

OUTS, INS, FIRST, ROWS = 700, 128, 40, 600


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.float32, None),
        (torch.bfloat16, None),
        (torch.float32, "int8"),
        (torch.bfloat16, "int8"),
        (torch.bfloat16, "int4"),
    ],
)
def test_outputs_as_with_changed_weights(
    dtype: torch.dtype, quantization: str | None, has_bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    bias = torch.randn(OUTS) if has_bias else None
    weight = torch.randn(OUTS, INS).to(dtype)
    linear = make_linear(
        weight, bias if bias is None else bias.to(dtype), quantization=quantization
    )
    one = Slice(
        FIRST, torch.randn(3, INS), torch.randn(ROWS, 3), 0.5, magnitude=torch.rand(ROWS) + 0.5
    )
    factors, added = output_changes(one, linear, dtype)
    assert factors is not None and (added is not None) == has_bias
    held = linear.rows(torch.arange(FIRST, FIRST + ROWS)).double()
    changed = held + one.scale * (one.b.double() @ one.a.double())
    assert one.magnitude is not None
    changed *= (one.magnitude.double() / changed.norm(dim=1))[:, None]
    x = torch.randn(5, INS).double()
    product = one.scale * (x @ one.a.double().T) @ one.b.double().T
    found = factors * (x @ held.T + product)
    expected = x @ changed.T
    if bias is not None and added is not None:
        own = bias[FIRST : FIRST + ROWS].to(dtype).double()
        found, expected = found + factors * own + added, expected + own
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5 if dtype is torch.float32 else 2e-2
    )


def test_outputs_of_plain_products_are_not_scaled() -> None:
    linear = make_linear(torch.randn(8, 16))
    one = Slice(0, torch.randn(3, 16), torch.randn(8, 3), 0.5)
    assert output_changes(one, linear, torch.float32) == (None, None)
    factors, added = output_changes(one._replace(bias=torch.ones(8)), linear, torch.float32)
    assert factors is None and added is not None and added.tolist() == [1.0] * 8
