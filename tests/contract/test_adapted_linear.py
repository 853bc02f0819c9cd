"""Linear layers with adapters: many rows at once, and padding after them."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.layers.adapted_linear import AdaptedLinear, StepAdapters
from engine.layers.linear import make_linear
from kernels.low_rank import LowRankProduct, in_panels

NUM_IN, WIDTH = 64, 128


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return 0.1 * torch.randn(shape, generator=rng).bfloat16()


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize(("num", "padding"), [(2, 0), (129, 15), (424, 0)])
def test_gates_of_many_rows(
    num: int, padding: int, quantization: str | None, rng: torch.Generator
) -> None:
    """Each row has the bits that it has alone, and without an adapter those of the base."""
    base: Any = make_linear(random(rng, 2 * WIDTH, NUM_IN), quantization=quantization)
    if not hasattr(base, "gated"):
        pytest.skip("this processor has no such product")
    step, layer = StepAdapters(512), AdaptedLinear(base)
    layer.attach(2, step)
    for slot, rank in enumerate((3, 8)):
        products = [
            LowRankProduct(at, WIDTH, random(rng, rank, NUM_IN), in_panels(b), 30.0)
            for at in (0, WIDTH)
            if (b := random(rng, WIDTH, rank)) is not None
        ]
        layer.put(slot, products)
    x, slots = random(rng, num + padding, NUM_IN), np.arange(num) % 3 - 1
    step.fill(slots, None, num_threads=2)
    together = layer.gated(x, "silu")
    assert together is not None and together.shape == (num + padding, WIDTH)
    plain = base.gated(x, "silu")
    assert torch.equal(together[:num][slots < 0], plain[:num][slots < 0])
    for n in {0, 1, num - 1, min(num, 128) - 1, min(num - 1, 128)}:
        step.fill(slots[n : n + 1], None, num_threads=1)
        alone = layer.gated(x[n : n + 1], "silu")
        assert alone is not None and torch.equal(alone[0], together[n])
        assert torch.equal(alone[0], plain[n]) == (slots[n] < 0)


def test_other_numbers_of_rows_are_refused(rng: torch.Generator) -> None:
    step, layer = StepAdapters(8), AdaptedLinear(make_linear(random(rng, WIDTH, NUM_IN)))
    layer.attach(1, step)
    step.fill(np.zeros(6, np.int64), np.array([1, 5]), num_threads=1)
    assert len(layer(random(rng, 2, NUM_IN))) == 2
    with pytest.raises(RuntimeError, match="a layer with adapters has 3 rows in a step of 6"):
        layer(random(rng, 3, NUM_IN))
