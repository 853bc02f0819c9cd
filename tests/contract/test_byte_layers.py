"""Layers with weights that checkpoints store in 8 bits, one scale an output."""

from __future__ import annotations

import torch

from engine.layers.linear import make_linear
from engine.layers.quantized import QuantizedWeight
from kernels.quantized import Quantized


def test_stored_bytes_are_multiplied_as_they_are(seed: int) -> None:
    """Weights of W8A8 checkpoints are not rounded again, -128 among them."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 100, (70, 50), generator=rng, dtype=torch.uint8)
    scales = torch.rand(70, 1, generator=rng) + 0.5
    matrix = Quantized(values, scales, bits=8, group_size=50)
    x = torch.randint(-127, 128, (9, 50), generator=rng).float()
    x[:, 0] = 127  # so that the scale of a row is 1
    wanted = (x.double() @ ((values.double() - 128) * scales).T).float()
    weight = QuantizedWeight(matrix=matrix, dtype=torch.bfloat16, quantizes_inputs=True)
    layer = make_linear(weight, keeps_float32=True)
    torch.testing.assert_close(layer(x.bfloat16()), wanted, rtol=1e-5, atol=1e-5)
    ids = torch.tensor([3, 69])
    torch.testing.assert_close(layer.rows(ids).float(), (values[ids].float() - 128) * scales[ids])
    # A layer that keeps its inputs rounds its dequantised weights to bfloat16.
    exact = make_linear(weight, keeps_float32=True, quantize_activations=False)
    assert (exact(x.bfloat16()) - wanted).norm() < 0.01 * wanted.norm()
