"""The tensors of a decoder, and the checkpoint tensors that fill them. Does not import torch.

Query, key and value projections form one matrix, gate and up projections another. A checkpoint may
store their parts under different names, or fused; each target lists the alternatives.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from engine.models.spec import AttentionSpec, DecoderSpec

Shape = tuple[int, ...]


class TargetPart(NamedTuple):
    """A range of elements of one checkpoint tensor."""

    name: str
    shape: Shape  # of the whole tensor
    start: int
    size: int


class Target(NamedTuple):
    """One tensor of the decoder."""

    name: str
    shape: Shape
    ways: tuple[tuple[TargetPart, ...], ...]  # alternatives; the parts of each fill the target


def whole(name: str, *shape: int) -> TargetPart:
    return TargetPart(name, shape, 0, prod(shape))


def target(name: str, shape: Shape, *ways: tuple[TargetPart, ...]) -> Target:
    return Target(name, shape, ways)


def simple(name: str, source: str, *shape: int) -> Target:
    """A target that is filled by one whole checkpoint tensor, ``source``."""
    return Target(name, shape, ((whole(source, *shape),),))


def targets(spec: DecoderSpec) -> Iterator[Target]:
    """All tensors of a decoder, in the order in which it is built.

    The largest come first, while there is memory for a second copy, which packing needs.
    """
    size = (spec.vocab_size, spec.hidden_size)
    table = whole("model.embed_tokens.weight", *size)
    head = whole("lm_head.weight", *size)
    yield target("embed", size, *(((table,), (head,)) if spec.tied else ((table,),)))
    if not spec.tied:
        yield target("head", size, (head,))
    for index in range(len(spec.layers)):
        yield from layer_targets(spec, index)
    yield simple("norm", "model.norm.weight", spec.hidden_size)


def layer_targets(spec: DecoderSpec, index: int) -> Iterator[Target]:
    ours, theirs = f"{index}.", f"model.layers.{index}."
    norm = spec.norm
    for role in ("attention_in", "attention_out", "mlp_in", "mlp_out"):
        source = getattr(norm, role)
        if source is not None:
            yield simple(f"{ours}{role}", f"{theirs}{source}.weight", spec.hidden_size)
    yield from attention_targets(spec, ours, theirs + "self_attn.")
    if spec.layers[index].is_moe:
        yield from moe_targets(spec, ours, theirs)
    else:
        yield from mlp_targets(spec, ours, theirs + "mlp.")


def attention_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    a, hidden = spec.attention, spec.hidden_size
    rows = a.q_width + 2 * a.kv_width
    yield target(
        f"{ours}qkv",
        (rows, hidden),
        tuple(
            whole(f"{theirs}{letter}_proj.weight", width, hidden)
            for letter, width in zip("qkv", (a.q_width, a.kv_width, a.kv_width), strict=True)
        ),
        (whole(f"{theirs}qkv_proj.weight", rows, hidden),),
    )
    if a.qkv_bias:
        yield target(
            f"{ours}qkv_bias",
            (rows,),
            tuple(
                whole(f"{theirs}{letter}_proj.bias", width)
                for letter, width in zip("qkv", (a.q_width, a.kv_width, a.kv_width), strict=True)
            ),
        )
    yield simple(f"{ours}out", f"{theirs}o_proj.weight", hidden, a.q_width)
    if a.out_bias:
        yield simple(f"{ours}out_bias", f"{theirs}o_proj.bias", hidden)
    if a.qk_norm != "none":
        q_size, k_size = qk_norm_sizes(a)
        yield simple(f"{ours}q_norm", f"{theirs}q_norm.weight", q_size)
        yield simple(f"{ours}k_norm", f"{theirs}k_norm.weight", k_size)


def qk_norm_sizes(a: AttentionSpec) -> tuple[int, int]:
    return (a.head_dim, a.head_dim) if a.qk_norm == "head" else (a.q_width, a.kv_width)


def mlp_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    size, hidden = spec.mlp.intermediate_size, spec.hidden_size
    yield target(
        f"{ours}gate_up",
        (2 * size, hidden),
        tuple(whole(f"{theirs}{half}_proj.weight", size, hidden) for half in ("gate", "up")),
        (whole(f"{theirs}gate_up_proj.weight", 2 * size, hidden),),
    )
    yield simple(f"{ours}down", f"{theirs}down_proj.weight", hidden, size)
    if spec.mlp.bias:
        parts = tuple(whole(f"{theirs}{half}_proj.bias", size) for half in ("gate", "up"))
        yield target(f"{ours}gate_up_bias", (2 * size,), parts)
        yield simple(f"{ours}down_bias", f"{theirs}down_proj.bias", hidden)


def moe_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    """The tensors of a layer's router and experts, under all names that checkpoints use. ours,
    theirs: prefix of the names in the decoder and in the checkpoint."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    blocks = (f"{theirs}mlp.", f"{theirs}block_sparse_moe.")
    router = tuple((whole(f"{block}gate.weight", moe.num_experts, hidden),) for block in blocks)
    yield target(f"{ours}router", (moe.num_experts, hidden), *router)
    rows = 2 * moe.intermediate_size
    for e in range(moe.num_experts):
        yield target(
            f"{ours}{e}.gate_up",
            (rows, hidden),
            *(expert_parts(spec, block, e, halves) for block in blocks for halves in GATE_UP),
            *(stacked(f"{block}experts.gate_up_proj", spec, e, (rows, hidden)) for block in blocks),
            *(
                (
                    *stacked(f"{block}experts.gate_proj.weight", spec, e, (rows // 2, hidden)),
                    *stacked(f"{block}experts.up_proj.weight", spec, e, (rows // 2, hidden)),
                )
                for block in blocks
            ),
        )
        down = (hidden, moe.intermediate_size)
        yield target(
            f"{ours}{e}.down",
            down,
            *((whole(f"{b}experts.{e}.{n}.weight", *down),) for b in blocks for n in DOWN),
            *(stacked(f"{b}experts.{n}", spec, e, down) for b in blocks for n in STACKED_DOWN),
        )


GATE_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
DOWN = ("down_proj", "w2")
STACKED_DOWN = ("down_proj", "down_proj.weight")


def expert_parts(
    spec: DecoderSpec, block: str, expert: int, halves: tuple[str, str]
) -> tuple[TargetPart, ...]:
    assert spec.moe is not None
    size = spec.moe.intermediate_size
    return tuple(
        whole(f"{block}experts.{expert}.{half}.weight", size, spec.hidden_size) for half in halves
    )


def stacked(name: str, spec: DecoderSpec, expert: int, shape: Shape) -> tuple[TargetPart, ...]:
    """The range of one expert's matrix in a checkpoint tensor that stacks the matrices of all
    experts."""
    assert spec.moe is not None
    size = prod(shape)
    return (TargetPart(name, (spec.moe.num_experts, *shape), expert * size, size),)
