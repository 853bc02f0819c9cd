"""How layers that keep different things share one pool of KV blocks."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from engine.errors import ConfigError
from engine.kv.layout import (
    KVLayout,
    LayerCache,
    NoCache,
    PagedKV,
    PagedLatent,
    RecurrentState,
    SharedKV,
    StateTensor,
    make_layout,
    one_group,
    padding,
    part_of_layout,
    state_bytes,
)
from engine.worker.memory import make_kv_cache


def zeros(shape, dtype):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.behaviour(80)
def test_layers_that_keep_different_amounts_share_one_pool():
    """A block holds more layers of the kind that keeps less. Every layer has bytes of its own in
    each block of its group."""
    full, local = {"num_kv_heads": 4, "head_dim": 192}, {"num_kv_heads": 8, "head_dim": 192}
    layers = [PagedKV(**full), *[PagedKV(**local, window=128) for _ in range(5)]] * 8
    layers[3] = SharedKV(source=2)
    sizes = {"block_size": 16, "max_num_batched_tokens": 512, "max_model_len": 32768}
    layout = make_layout(layers, **sizes)
    assert layout.windows == (0, *[128] * (len(layout.groups) - 1))
    assert layout.parts_of[0] == 2 * layout.parts_of[1] == 8 and layout.is_interleaved
    assert layout.block_bytes == 8 * 2 * 4 * 192 * 4 * 16
    assert 0 < padding(layers, layout, 16) < 0.1
    kv = make_kv_cache(layers, layout, 5, 16, dtype=torch.float32, zeros=zeros)
    assert kv[3].data_ptr() == kv[2].data_ptr()
    base, taken = kv[0].untyped_storage().data_ptr(), set()
    for layer, (group, part) in enumerate(zip(layout.group_of, layout.parts, strict=True)):
        for block in range(5):
            held = kv[layer][block * layout.scales[group]]
            begin = held.data_ptr() - base
            assert block == begin // layout.block_bytes
            assert block == (begin + held.nbytes - 1) // layout.block_bytes
            assert layer == 3 or (group, begin, held.nbytes) not in taken
            taken.add((group, begin, held.nbytes))
            assert begin % layout.block_bytes == part * held.nbytes


@pytest.mark.parametrize("layer", [PagedLatent(latent_dim=64)])
def test_what_no_layer_may_keep_yet_is_named(layer):
    layers = [PagedKV(num_kv_heads=1, head_dim=8), layer]
    with pytest.raises(ConfigError, match=rf"layer 1 .*{type(layer).__name__}.* not supported"):
        one_group(layers, 16)


def test_layers_that_keep_nothing_take_no_memory():
    layers = [NoCache(), PagedKV(num_kv_heads=1, head_dim=8), SharedKV(source=1)]
    layout = one_group(layers, 16)
    assert layout.block_bytes == 2 * 8 * 4 * 16 and layout.parts == (0, 0, 0)
    kv = make_kv_cache(layers, layout, 3, 16, dtype=torch.float32, zeros=zeros)
    assert [one.numel() for one in kv] == [0, 3 * 256, 3 * 256]
    with pytest.raises(ConfigError, match="no layer of the model keeps keys and values"):
        one_group([NoCache()], 16)


def test_recurrent_states_take_no_part_of_a_block():
    state = RecurrentState(
        tensors=(StateTensor((2, 64), "bfloat16"), StateTensor((4, 8, 8), "float32"))
    )
    with_kv = PagedKV(num_kv_heads=1, head_dim=8)
    assert one_group([state, with_kv, state], 16) == one_group([NoCache(), with_kv, NoCache()], 16)
    assert state_bytes([state, with_kv, state]) == 2 * (2 * 64 * 2 + 4 * 8 * 8 * 4)
    assert state_bytes([with_kv]) == 0


def test_layers_of_different_sizes_without_windows_need_no_padding():
    layers = [PagedKV(num_kv_heads=heads, head_dim=64) for heads in (8, 5, 2)]
    layout = one_group(layers, 16)
    assert not layout.is_interleaved and padding(layers, layout, 16) == 0
    assert make_layout(layers, block_size=16, max_num_batched_tokens=8, max_model_len=99) == layout


def test_windows_as_long_as_the_longest_request_are_full_attention():
    """Nothing ever leaves them, so all layers share one block table."""
    sizes = {"block_size": 16, "max_num_batched_tokens": 8}
    layers = [PagedKV(num_kv_heads=1, head_dim=64, window=window) for window in (64, 99, 0)]
    chunks = [PagedKV(num_kv_heads=1, head_dim=64, window=64, is_chunked=True), *layers[1:]]
    for each in (layers, chunks):
        assert make_layout(each, **sizes, max_model_len=64) == one_group(each, 16)
        assert make_layout(each, **sizes, max_model_len=80).windows == (0, 64)


def test_stages_have_the_same_groups_and_keep_their_own_layers(seed: int) -> None:
    """Random layers and stages: what a layer keeps is in a group of its kind, apart from others."""
    draw = random.Random(seed)
    for _ in range(60):
        kinds = [
            PagedKV(
                num_kv_heads=draw.choice((1, 2, 4)), head_dim=8, window=draw.choice((0, 32, 64))
            )
            for _ in range(draw.randint(1, 3))
        ]
        state = RecurrentState(tensors=(StateTensor((4,), "float32"),))
        layers = [draw.choice([*kinds, state]) for _ in range(draw.randint(2, 20))] + kinds[:1]
        sizes = {"max_num_batched_tokens": 64, "max_model_len": draw.choice((48, 512))}
        whole = make_layout(layers, block_size=16, **sizes)
        cut = draw.randrange(1, len(layers))
        for mine in (layers[:cut], layers[cut:]):
            if not any(isinstance(layer, PagedKV) for layer in mine):
                mine = [*mine, kinds[0]]
            own = part_of_layout(whole, layers, mine, 16)
            assert own.groups == whole.groups and own.block_bytes <= whole.block_bytes
            assert_apart(own, mine)
            of_kind = {
                layer: whole.groups[group]
                for layer, group in zip(layers, whole.group_of, strict=True)
            }
            for layer, group in zip(mine, own.group_of, strict=True):
                assert not isinstance(layer, PagedKV) or own.groups[group] == of_kind[layer]


def assert_apart(layout: KVLayout, layers: list[LayerCache]) -> None:
    """No two layers of a group share bytes, and a block of each layer is where its number says."""
    kv = make_kv_cache(layers, layout, 3, 16, dtype=torch.float32, zeros=zeros)
    taken = Counter[tuple[int, int]]()
    for nth, group in enumerate(layout.group_of):
        if isinstance(layers[nth], PagedKV):
            kv[nth][2 * layout.scales[group]] = 1
            taken.update(
                (group, kv[nth][block * layout.scales[group]].data_ptr()) for block in range(3)
            )
            assert kv[nth].count_nonzero() >= kv[nth][0].numel()
    assert max(taken.values()) == 1
    used = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in kv if len(one)
    }
    assert sum(used.values()) == 3 * layout.block_bytes


def test_blocks_of_a_stage_have_room_for_its_layers_only():
    local, full = (PagedKV(num_kv_heads=2, head_dim=8, window=window) for window in (32, 0))
    layers = [*[local] * 5, full] * 4
    whole = make_layout(layers, block_size=16, max_num_batched_tokens=64, max_model_len=4096)
    own = part_of_layout(whole, layers, layers[12:], 16)
    assert own.groups == whole.groups and len(whole.groups) > 2
    assert own.block_bytes * 2 == whole.block_bytes
