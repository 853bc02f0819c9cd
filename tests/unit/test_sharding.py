"""Ranks have parts of a model that together are the whole."""

from __future__ import annotations

import random
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.models.checkpoint import LEAST_SEGMENT, Checkpoint
from engine.models.families import FAMILIES
from engine.models.quant.fields import Region
from engine.models.quant.fp8 import Fp8
from engine.models.quant.gptq import Gptq
from engine.models.quant.modules import QuantizedModules
from engine.models.sharding import DecoderSlice, Shard, check_size
from engine.models.spec import DecoderSpec
from engine.models.targets import Cut, Target, TargetPart, cut_target, targets, whole
from engine.models.weights import RandomWeights

HF = {
    "vocab_size": 301,
    "hidden_size": 48,
    "intermediate_size": 104,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def spec_of(family: str = "Llama", **options: object) -> DecoderSpec:
    return FAMILIES[f"{family}ForCausalLM"]({**HF, **options})


def test_parts_are_adjacent_and_equal_within_a_unit(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        size, unit = draw.randint(1, 9), draw.choice([1, 1, 8, 128])
        count = unit * draw.randint(size, 400)
        parts = [Shard(rank, size).part(count, unit) for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(count))
        assert all(part.start % unit == 0 and len(part) for part in parts)
        if count % (size * unit) == 0:
            assert len({len(part) for part in parts}) == 1
        else:
            assert max(map(len, parts)) - min(map(len, parts)) <= max(unit, 32 * unit)


def test_heads_fewer_than_ranks_are_shared_by_adjacent_ranks() -> None:
    assert [list(Shard(rank, 4).share(2)) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [list(Shard(rank, 2).share(4)) for rank in range(2)] == [[0, 1], [2, 3]]


def test_a_size_that_does_not_divide_the_heads_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"size is 4.*6 attention heads.*do: 1, 2, 6"):
        check_size(spec_of(), 4)
    with pytest.raises(ConfigError, match="2 heads of keys and values"):
        check_size(spec_of(), 3)
    with pytest.raises(ConfigError, match="5 columns in its experts"):
        moe = spec_of("Qwen3Moe", num_experts=4, moe_intermediate_size=5)
        check_size(moe, 6)
    with pytest.raises(ConfigError, match=r"512 columns in its MLPs in blocks of 256; .*: 1, 2"):
        check_size(spec_of(intermediate_size=512), 6, {"mlp": 256})
    check_size(spec_of(), 6)


def numbered(target: Target) -> torch.Tensor:
    """What the checkpoint has at the elements of a target: different numbers everywhere."""
    parts = []
    for part in target.parts_of(target.ways[0]):
        base = sum(map(ord, part.name)) * 1e7
        flat = torch.arange(part.start, part.start + part.size, dtype=torch.float64) + base
        if part.columns is not None:
            rows = flat.view(-1, part.shape[-1])
            flat = rows[:, part.columns.start : part.columns.stop].flatten()
        parts.append(flat)
    return torch.cat(parts).view(target.shape)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "Lfm2", "Qwen3Next", "Phi3"])
def test_the_parts_of_a_target_are_the_rows_and_columns_of_the_whole(family: str) -> None:
    spec = spec_of(family, num_experts=2, conv_bias=True, attention_bias=True)
    wholes = {target.name: numbered(target) for target in targets(spec)}
    for size in (2, 6) if spec.gated_delta is None else (2,):
        for rank in range(size):
            mine = DecoderSlice(spec, Shard(rank, size))
            own = {target.name: target.shape for target in targets(mine.spec)}
            for target in mine.targets():
                rows, columns = target.cut
                expected = wholes[target.name]
                if rows is not None:
                    expected = torch.cat([expected[part.start : part.stop] for part in rows])
                if columns is not None:
                    expected = expected[:, columns.start : columns.stop]
                assert torch.equal(numbered(target), expected), target.name
                if target.name not in ("embed", "head"):
                    assert target.shape == own[target.name]


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "Lfm2"])
def test_a_rank_has_its_share_of_the_weights(family: str) -> None:
    spec = spec_of(family, num_experts=2, moe_intermediate_size=48)
    whole = sum(prod(target.shape) for target in targets(spec))
    for rank in range(2):
        mine = sum(prod(one.shape) for one in DecoderSlice(spec, Shard(rank, 2)).targets())
        assert 0.5 <= mine / whole < 0.51


def test_made_up_weights_of_ranks_are_parts_of_the_same_tensors() -> None:
    spec, weights = spec_of(), RandomWeights(1)
    wholes = {one.name: weights.load(one, torch.float32) for one in targets(spec)}
    for rank in range(2):
        for target in DecoderSlice(spec, Shard(rank, 2)).targets():
            expected, (rows, columns) = wholes[target.name], target.cut
            if rows is not None:
                expected = torch.cat([expected[part.start : part.stop] for part in rows])
            if columns is not None:
                expected = expected[:, columns.start : columns.stop]
            assert torch.equal(weights.load(target, torch.float32), expected), target.name


def bytes_read() -> int:
    """Bytes that this thread has read from files so far."""
    return int(Path("/proc/thread-self/io").read_text().split()[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rank_reads_only_its_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = torch.randn(24, 4 * LEAST_SEGMENT).bfloat16()
    save_file({"w": stored}, tmp_path / "model.safetensors")
    full = Target("w", tuple(stored.shape), ((whole("w", *stored.shape),),))
    columns = range(LEAST_SEGMENT, 2 * LEAST_SEGMENT)
    with Checkpoint(tmp_path) as checkpoint:
        for cut, expected, share in (
            (
                Cut((range(2, 5), range(20, 22))),
                torch.cat([stored[2:5], stored[20:22]]),
                5 / 24,
            ),
            (Cut(None, columns), stored[:, LEAST_SEGMENT : 2 * LEAST_SEGMENT], 1 / 4),
        ):
            target, filled = cut_target(full, cut), 0
            out = torch.empty(target.shape, dtype=dtype)
            before = bytes_read()
            for part in target.parts_of(target.ways[0]):
                checkpoint.read_part(part, out[filled : filled + part.num_rows])
                filled += part.num_rows
            read = bytes_read() - before
            assert torch.equal(out, expected.to(dtype))
            assert 0 <= read - share * stored.nbytes < 1000  # those of the count itself


def test_short_columns_are_cut_from_whole_rows(tmp_path: Path) -> None:
    stored = torch.randn(50, 30)
    save_file({"w": stored}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        out = torch.empty(10, 7)
        checkpoint.read_part(TargetPart("w", (50, 30), 20 * 30, 10 * 30, range(3, 10)), out)
    assert torch.equal(out, stored[20:30, 3:10])


def test_one_rank_has_the_whole() -> None:
    spec = spec_of()
    mine = DecoderSlice(spec)
    assert mine.spec is spec
    assert list(mine.targets()) == list(targets(spec))
    assert replace(mine).vocabulary == range(301)


def test_a_region_of_packed_numbers_is_read_from_whole_entries() -> None:
    fields = Gptq.of({"bits": 3, "group_size": 64}).fields("m", (64, 256))
    mine = Region(range(40, 48), range(100, 130))
    wide = mine.around(fields, (64, 256))
    assert wide == (range(32, 64), range(64, 192))
    qweight, qzeros, scales, order = (wide.of(one.axes, one.shapes[0]) for one in fields)
    assert qweight == (range(6, 18), range(32, 64))  # 32 inputs of 3 bits are 3 entries
    assert qzeros == (range(1, 3), range(3, 6))
    assert scales == (range(1, 3), range(32, 64))
    assert order == (range(64, 192),)


def test_inputs_in_any_order_need_the_scales_of_all_groups() -> None:
    fields = Gptq.of({"bits": 4, "group_size": 64, "desc_act": True}).fields("m", (64, 256))
    mine = Region(range(8, 16), range(64, 128))
    scales = next(one for one in fields if one.suffixes == ("scales",))
    assert mine.around(fields, (64, 256)) == mine
    assert mine.of(scales.axes, scales.shapes[0]) == (range(4), range(8, 16))


def test_one_scale_is_that_of_every_part() -> None:
    scale = Fp8.of({}).fields("m", (64, 256))[1]
    mine = Region(range(8, 16), range(64, 128))
    assert mine.of(scale.axes, ()) == () and mine.of(scale.axes, (1,)) == (range(1),)
    assert mine.of(scale.axes, (64, 1)) == (range(8, 16), range(1))


@pytest.mark.parametrize("columns", [None, range(2048, 4096)])
def test_a_rank_reads_only_its_bytes_of_a_quantised_module(
    tmp_path: Path, columns: range | None
) -> None:
    form, shape = Gptq.of({"bits": 4, "group_size": 128}), (4096, 4096)
    tensors = {
        f"m.{field.suffixes[0]}": torch.zeros(
            field.shapes[0], dtype=torch.int32 if field.dtypes == ("I32",) else torch.float16
        )
        for field in form.fields("m", shape)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        modules = QuantizedModules(checkpoint, form)
        part = whole("m.weight", *shape)._replace(columns=columns)
        rows = range(2048, 4096) if columns is None else range(4096)
        before = bytes_read()
        read = modules.read(part, rows, torch.float32)
        share = (bytes_read() - before) / sum(one.nbytes for one in tensors.values())
    assert read.shape == (len(rows), 4096 if columns is None else 2048)
    assert 0.49 < share < 0.51
