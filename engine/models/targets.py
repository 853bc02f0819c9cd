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

    @property
    def num_rows(self) -> int:
        return self.size // self.shape[-1]


class Target(NamedTuple):
    """One tensor of the decoder."""

    name: str
    shape: Shape
    ways: tuple[tuple[TargetPart, ...], ...]  # alternatives; the parts of each fill the target
    is_float32: bool = False  # loaded as float32 instead of in the compute dtype


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
    table = whole(f"{spec.names.prefix}embed_tokens.weight", *size)
    head = whole("lm_head.weight", *size)
    yield target("embed", size, *(((table,), (head,)) if spec.tied else ((table,),)))
    if not spec.tied:
        yield target("head", size, (head,))
    for index in range(len(spec.layers)):
        yield from layer_targets(spec, index)
    yield simple("norm", f"{spec.names.prefix}{spec.norm.final}.weight", spec.hidden_size)


def layer_targets(spec: DecoderSpec, index: int) -> Iterator[Target]:
    ours, theirs = f"{index}.", f"{spec.names.prefix}layers.{index}."
    norm = spec.norm
    for role in ("attention_in", "attention_out", "mlp_in", "mlp_out"):
        source = getattr(norm, role)
        if source is not None:
            yield simple(f"{ours}{role}", f"{theirs}{source}.weight", spec.hidden_size)
    if spec.layers[index].mixer == "short_conv":
        yield from short_conv_targets(spec, ours, theirs + "conv.")
    elif spec.layers[index].mixer == "gated_delta":
        yield from gated_delta_targets(spec, ours, theirs + "linear_attn.")
    else:
        yield from attention_targets(spec, ours, theirs + "self_attn.")
    if spec.layers[index].is_moe:
        yield from moe_targets(spec, ours, theirs)
    else:
        yield from mlp_targets(spec, ours, f"{theirs}{spec.names.mlp}.")


def short_conv_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    conv, hidden = spec.short_conv, spec.hidden_size
    assert conv is not None
    yield simple(f"{ours}in", f"{theirs}in_proj.weight", 3 * hidden, hidden)
    if conv.bias:
        yield simple(f"{ours}in_bias", f"{theirs}in_proj.bias", 3 * hidden)
    yield simple(f"{ours}conv", f"{theirs}conv.weight", hidden, 1, conv.taps)
    if conv.bias:
        yield simple(f"{ours}conv_bias", f"{theirs}conv.bias", hidden)
    yield simple(f"{ours}out", f"{theirs}out_proj.weight", hidden, hidden)
    if conv.bias:
        yield simple(f"{ours}out_bias", f"{theirs}out_proj.bias", hidden)


def gated_delta_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    """The tensors of a gated delta rule. Qwen3-Next stores two input projections, whose outputs are
    ordered by key head, Qwen3.5 four."""
    delta, hidden = spec.gated_delta, spec.hidden_size
    assert delta is not None
    heads, group = delta.value_heads, delta.value_heads // delta.key_heads
    values = group * delta.value_dim
    rows = delta.conv_width + delta.value_width
    yield target(
        f"{ours}in",
        (rows, hidden),
        (
            whole(f"{theirs}in_proj_qkv.weight", delta.conv_width, hidden),
            whole(f"{theirs}in_proj_z.weight", delta.value_width, hidden),
        ),
        by_kind(
            whole(f"{theirs}in_proj_qkvz.weight", rows, hidden),
            (delta.key_dim, delta.key_dim, values, values),
        ),
    )
    yield target(
        f"{ours}gates",
        (2 * heads, hidden),
        tuple(whole(f"{theirs}in_proj_{letter}.weight", heads, hidden) for letter in "ba"),
        by_kind(whole(f"{theirs}in_proj_ba.weight", 2 * heads, hidden), (group, group)),
    )
    yield simple(f"{ours}conv", f"{theirs}conv1d.weight", delta.conv_width, 1, delta.taps)
    for name, source in (("rate", "A_log"), ("decay_bias", "dt_bias")):
        yield simple(f"{ours}{name}", theirs + source, heads)._replace(is_float32=True)
    yield simple(f"{ours}head_norm", f"{theirs}norm.weight", delta.value_dim)
    yield simple(f"{ours}out", f"{theirs}out_proj.weight", hidden, delta.value_width)


def by_kind(matrix: TargetPart, sizes: tuple[int, ...]) -> tuple[TargetPart, ...]:
    """The parts of a matrix whose rows repeat a pattern, reordered by kind. sizes: number of
    adjacent rows of each kind in the pattern."""
    rows, width = matrix.shape
    starts = range(0, rows, sum(sizes))
    firsts = [sum(sizes[:kind]) for kind in range(len(sizes))]
    return tuple(
        TargetPart(matrix.name, matrix.shape, (start + first) * width, size * width)
        for first, size in zip(firsts, sizes, strict=True)
        for start in starts
    )


def attention_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    a, hidden, names = spec.attention, spec.hidden_size, spec.names
    rows = a.q_width + 2 * a.kv_width
    keys = tuple(whole(f"{theirs}{letter}_proj.weight", a.kv_width, hidden) for letter in "kv")
    queries: tuple[TargetPart, ...] = (whole(f"{theirs}q_proj.weight", a.q_width, hidden),)
    gates: tuple[TargetPart, ...] = ()
    if a.has_gate:
        both = whole(f"{theirs}q_proj.weight", 2 * a.q_width, hidden)
        parts = by_kind(both, (a.head_dim, a.head_dim))
        queries, gates = parts[: a.num_heads], parts[a.num_heads :]
    fused = (whole(f"{theirs}qkv_proj.weight", rows, hidden),)
    yield target(f"{ours}qkv", (rows, hidden), (*queries, *keys), fused)
    if a.qkv_bias:
        yield from qkv_bias_targets(a, ours, theirs)
    if a.has_gate:
        yield target(f"{ours}gate", (a.q_width, hidden), gates)
    yield simple(f"{ours}out", f"{theirs}{names.attention_out}.weight", hidden, a.q_width)
    if a.out_bias:
        yield simple(f"{ours}out_bias", f"{theirs}{names.attention_out}.bias", hidden)
    if a.qk_norm != "none":
        q_size, k_size = qk_norm_sizes(a)
        yield simple(f"{ours}q_norm", f"{theirs}{names.q_norm}.weight", q_size)
        yield simple(f"{ours}k_norm", f"{theirs}{names.k_norm}.weight", k_size)


def qkv_bias_targets(a: AttentionSpec, ours: str, theirs: str) -> Iterator[Target]:
    """The biases of queries, keys and values, and of the output's gate."""
    keys = tuple(whole(f"{theirs}{letter}_proj.bias", a.kv_width) for letter in "kv")
    queries: tuple[TargetPart, ...] = (whole(f"{theirs}q_proj.bias", a.q_width),)
    if a.has_gate:
        name, size = f"{theirs}q_proj.bias", 2 * a.q_width
        each = [TargetPart(name, (size,), at, a.head_dim) for at in range(0, size, a.head_dim)]
        queries = tuple(each[::2])
        yield target(f"{ours}gate_bias", (a.q_width,), tuple(each[1::2]))
    yield target(f"{ours}qkv_bias", (a.q_width + 2 * a.kv_width,), (*queries, *keys))


def qk_norm_sizes(a: AttentionSpec) -> tuple[int, int]:
    return (a.head_dim, a.head_dim) if a.qk_norm == "head" else (a.q_width, a.kv_width)


def mlp_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    size, hidden, names = spec.mlp.intermediate_size, spec.hidden_size, spec.names
    halves = (names.gate, names.up)
    yield target(
        f"{ours}gate_up",
        (2 * size, hidden),
        tuple(whole(f"{theirs}{half}.weight", size, hidden) for half in halves),
        (whole(f"{theirs}gate_up_proj.weight", 2 * size, hidden),),
    )
    yield simple(f"{ours}down", f"{theirs}{names.down}.weight", hidden, size)
    if spec.mlp.bias:
        parts = tuple(whole(f"{theirs}{half}.bias", size) for half in halves)
        yield target(f"{ours}gate_up_bias", (2 * size,), parts)
        yield simple(f"{ours}down_bias", f"{theirs}{names.down}.bias", hidden)


def moe_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    """The tensors of a layer's router and experts, under all names that checkpoints use. ours,
    theirs: prefix of the names in the decoder and in the checkpoint."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    blocks = tuple(f"{theirs}{block}." for block in ("mlp", "block_sparse_moe", "feed_forward"))
    router = tuple((whole(f"{block}gate.weight", moe.num_experts, hidden),) for block in blocks)
    yield target(f"{ours}router", (moe.num_experts, hidden), *router)
    if moe.has_bias:
        biases = tuple((whole(f"{block}expert_bias", moe.num_experts),) for block in blocks)
        yield target(f"{ours}router_bias", (moe.num_experts,), *biases)
    if moe.shared_size:
        yield from shared_expert_targets(spec, ours, f"{theirs}mlp.shared_expert")
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


def shared_expert_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    assert spec.moe is not None
    size, hidden = spec.moe.shared_size, spec.hidden_size
    halves = tuple(whole(f"{theirs}.{half}.weight", size, hidden) for half in GATE_UP[0])
    yield target(f"{ours}shared_gate_up", (2 * size, hidden), halves)
    yield simple(f"{ours}shared_down", f"{theirs}.down_proj.weight", hidden, size)
    yield simple(f"{ours}shared_gate", f"{theirs}_gate.weight", 1, hidden)


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
