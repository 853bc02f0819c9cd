"""How attention is cut for a GPU that is not here, and what that is expected to take."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from shapes import SHAPES, Step

from kernels.meta import AttentionMeta
from kernels.reference import Variant
from kernels.triton.attention import launches
from kernels.triton.launch import Launch
from tools.compiled import Pipeline, hot_loop, loops_of, pipelines_of
from tools.device_gate import DEVICES, compiling_for
from tools.gpu_estimate import BLOCK, CARDS, MEASURED, Estimator, tiles_of

PROCESSORS = 132
HEADS = ((8, 8), (16, 8), (32, 8), (28, 4), (64, 8), (16, 16))  # of queries, of keys
LEAST_TILES = 4  # of a program, which it is not worth to share


def as_recorded(meta: AttentionMeta, num_tokens: int) -> AttentionMeta:
    """As many sequences as there may be, of any length; those behind the last have no tokens."""
    num_more = num_tokens - len(meta.seq_lens)
    end, tables = meta.query_start[-1:], meta.block_tables
    return dataclasses.replace(
        meta,
        query_start=torch.cat((meta.query_start, end.expand(num_more))),
        seq_lens=torch.cat((meta.seq_lens, meta.seq_lens.new_zeros(num_more))),
        block_tables=torch.cat((tables, tables.new_zeros(num_more, tables.shape[1]))),
        num_decodes=0,
        max_query_len=num_tokens,
        max_seq_len=131_072,
        is_mixed=True,
    )


def attention(
    sequences: list[tuple[int, int]], heads: tuple[int, int], *, recorded: bool = False
) -> list[Launch]:
    step = Step(sequences, BLOCK)
    meta = step.meta()
    if recorded:
        meta = as_recorded(meta, step.num_tokens)
    q = torch.empty(step.num_tokens, heads[0], 128, dtype=torch.bfloat16)
    kv = torch.empty(2, 2, heads[1], BLOCK, 128, dtype=torch.bfloat16)
    with compiling_for(DEVICES["sm_90"]):
        found = launches(q, kv, meta, Variant(0.1), torch.empty_like(q))
    return [launch for launch in found if "S" in launch.args]


def is_even(launch: Launch) -> bool:
    """Whether the longest program has at most four times what an even cut would give each."""
    tiles = tiles_of(launch)
    return bool(tiles.max() <= 4 * max(tiles.sum() / PROCESSORS, LEAST_TILES))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_no_program_of_decodes_is_waited_for(heads: tuple[int, int]) -> None:
    for batch, context in itertools.product((1, 4, 16, 33, 64, 200), (100, 1000, 8000, 100_000)):
        for longest in (context, 100_000):
            sequences = [(1, longest), *[(1, context)] * (batch - 1)]
            (launch,) = attention(sequences, heads)
            assert is_even(launch), (batch, context, longest)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_no_program_of_prompts_is_waited_for(heads: tuple[int, int]) -> None:
    for chunk, context in itertools.product((16, 64, 256, 2048), (0, 8000, 100_000)):
        for batch in (1, 4):
            (launch,) = attention([(chunk, context)] * batch, heads)
            assert is_even(launch), (batch, chunk, context)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_no_program_of_prompts_is_waited_for_in_recorded_steps(heads: tuple[int, int]) -> None:
    """Many of their programs may find no chunk: those that do are as many as they have to be."""
    for chunk, context in itertools.product((16, 64, 256, 2048), (0, 8000, 100_000)):
        found = attention([(chunk, context)], heads, recorded=True)
        (launch,) = (launch for launch in found if "work" in launch.args)
        assert is_even(launch), (chunk, context)


def test_the_estimate_is_near_what_an_h100_took() -> None:
    """Within a quarter, for whatever the kernel is since as it was then."""
    estimator = Estimator(CARDS["h100"])
    for label in ("decode of 64 behind 1,024", "prompt of 4,096", "2,048 behind 8,192"):
        sequences, measured = MEASURED[label]
        found = 1e6 * estimator.attention(SHAPES["llama-3.1-8b"], sequences)
        assert found == pytest.approx(measured, rel=0.25), label


def test_a_short_turn_behind_a_long_context_takes_six_milliseconds() -> None:
    """Of an H200, for the attention of all layers."""
    shape = SHAPES["llama-3.1-8b"]
    layer = Estimator(CARDS["h200"]).attention(shape, [(64, 100_000)])
    assert shape.layers * layer <= 6e-3


def test_a_loop_that_waits_for_all_its_copies_is_not_ahead() -> None:
    text = """
    %k = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x128xbf16, #shared, #smem, mutable>
    %r:2 = scf.for %i = %a to %b step %c iter_args(%x = %y) -> (i32)  : i32 {{
      %w = ttg.async_wait %t {{num = {num} : i32}}
      %p = ttng.warp_group_dot %q, %w, %z
    }}
"""
    assert pipelines_of(text.format(buffers=3, num=2)) == [Pipeline([3], [2])]
    for buffers, num in ((1, 0), (2, 0), (1, 1)):
        (found,) = pipelines_of(text.format(buffers=buffers, num=num))
        assert not found.is_ahead, (buffers, num)


def test_the_loop_that_works_is_the_shortest_that_multiplies() -> None:
    def loop(begin: int, filler: int) -> str:
        code = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4]", *["FADD R1, R2, R3"] * filler]
        lines = [f"/*{begin + 16 * i:04x}*/ {line} ;" for i, line in enumerate(code)]
        return "\n".join([*lines, f"/*{begin + 16 * len(code):04x}*/ @P1 BRA 0x{begin:x} ;"])

    text = "\n".join([loop(0x100, 30), loop(0x1000, 5), "/*2000*/ BRA 0x2000;"])
    found = hot_loop(loops_of(text))
    assert found is not None and found.instructions == 7 and found.warpgroup_products == 1
