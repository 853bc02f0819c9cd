"""While a request decodes, models with windows hold little more KV than their layers read."""

import kv_memory
import pytest
from transformers import MiMoV2FlashConfig

from policylab.sim.kv_groups import layers_of


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("model", ["Gemma-3-27B", "gpt-oss-20b", "Mistral-7B-v0.1"])
def test_a_request_of_32k_tokens_holds_what_its_layers_need(model: str, block_size: int) -> None:
    assert 0 <= kv_memory.measure(model, 32765, block_size).waste < 0.03


@pytest.mark.parametrize(("context", "factor"), [(8189, 4.4), (32765, 5.4)])
def test_a_small_model_with_windows_holds_a_fraction_of_all_tokens(
    context: int, factor: float
) -> None:
    held = kv_memory.measure("Gemma-3-270M", context)
    assert held.one_group >= factor * held.held


@pytest.mark.parametrize("model", sorted(kv_memory.GEOMETRIES))
def test_windows_and_chunks_of_every_model_are_freed_in_time(model: str) -> None:
    """MiMo-V2-Flash pads values to the size of keys, and has nine layers in places for ten."""
    held = kv_memory.measure(model, 8192, 16)
    assert held.waste < (0.4 if model == "MiMo-V2-Flash" else 0.07)


def test_the_simulator_knows_layers_with_twice_the_heads() -> None:
    kinds = ["sliding_attention" if index % 6 else "full_attention" for index in range(48)]
    config = MiMoV2FlashConfig(num_hidden_layers=48, layer_types=kinds, sliding_window=128)
    found, published = layers_of(config), kv_memory.GEOMETRIES["MiMo-V2-Flash"]
    for window in (0, 128):
        of_both = [[one for one in each if one.window == window] for each in (found, published)]
        assert of_both[0][0] == of_both[1][0]
