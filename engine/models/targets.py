"""The tensors of a decoder, and the checkpoint tensors that fill them. Does not import torch.

Query, key and value projections form one matrix, gate and up projections another. A checkpoint may
store their parts under different names, or fused; each target lists the alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from engine.models.spec import (
    AttentionSpec,
    ChannelMambaSpec,
    DecoderLayerSpec,
    DecoderSpec,
    HeadMambaSpec,
)

Shape = tuple[int, ...]


class TargetPart(NamedTuple):
    """A range of elements of one checkpoint tensor, or some columns of them."""

    name: str
    shape: Shape  # of the whole tensor
    start: int
    size: int
    columns: range | None = None  # of the rows in this range; None: all

    @property
    def num_rows(self) -> int:
        return self.size // self.shape[-1]

    @property
    def num_columns(self) -> int:
        return self.shape[-1] if self.columns is None else len(self.columns)


class Cut(NamedTuple):
    """The part of a tensor of the decoder that a rank has; see ``engine.models.sharding``."""

    rows: tuple[range, ...] | None  # adjacent in the part; None: all
    columns: range | None = None  # of a matrix; None: all


class Target(NamedTuple):
    """One tensor of the decoder, or a rank's part of it."""

    name: str
    shape: Shape
    ways: tuple[tuple[TargetPart, ...], ...]  # alternatives; the parts of each fill the whole
    is_float32: bool = False  # loaded as float32 instead of in the compute dtype
    cut: Cut = Cut(None)
    whole: Shape = ()  # shape before the cut; (): the same

    def parts_of(self, way: tuple[TargetPart, ...]) -> tuple[TargetPart, ...]:
        """The parts of a way that fill what the cut leaves."""
        return cut_way(way, prod(self.whole[1:]), self.cut) if self.whole else way


def whole(name: str, *shape: int) -> TargetPart:
    return TargetPart(name, shape, 0, prod(shape))


def target(name: str, shape: Shape, *ways: tuple[TargetPart, ...]) -> Target:
    return Target(name, shape, ways)


def simple(name: str, source: str, *shape: int) -> Target:
    """A target that is filled by one whole checkpoint tensor, ``source``."""
    return Target(name, shape, ((whole(source, *shape),),))


def cut_target(target: Target, cut: Cut) -> Target:
    """The part of a whole target that a rank has."""
    rows, inner = len_of(cut.rows, target.shape[0]), target.shape[1:]
    if cut.columns is not None:
        inner = (len(cut.columns),)
    return target._replace(shape=(rows, *inner), cut=cut, whole=target.shape)


def len_of(rows: tuple[range, ...] | None, count: int) -> int:
    """The number of rows in these ranges; ``count`` for ``None``."""
    return count if rows is None else sum(map(len, rows))


def cut_way(way: tuple[TargetPart, ...], width: int, cut: Cut) -> tuple[TargetPart, ...]:
    """The parts of ``way`` that fill some rows and columns of a target. width: elements of a
    row of the target."""
    if cut.rows is not None:
        found = list[TargetPart]()
        for rows in cut.rows:
            first = 0
            for part in way:
                num = part.size // width
                mine = range(max(rows.start, first), min(rows.stop, first + num))
                if len(mine):
                    start = part.start + (mine.start - first) * width
                    found.append(part._replace(start=start, size=len(mine) * width))
                first += num
        way = tuple(found)
    return tuple(part._replace(columns=cut.columns) for part in way)


def targets(spec: DecoderSpec) -> Iterator[Target]:
    """All tensors of a decoder, in the order in which it is built.

    The largest come first, while there is memory for a second copy, which packing needs.
    """
    roots = spec.names.roots
    for one in model_targets(spec):
        yield one if roots == ("model",) else one._replace(ways=renamed(one.ways, roots))


def renamed(
    ways: tuple[tuple[TargetPart, ...], ...], roots: tuple[str, ...]
) -> tuple[tuple[TargetPart, ...], ...]:
    """The ways to fill a target with each root in place of "model"; "": without a root."""
    prefixes = [f"{root}." if root else "" for root in roots]
    return tuple(
        tuple(part._replace(name=re.sub(r"^model\.", prefix, part.name)) for part in way)
        for way in ways
        for prefix in prefixes
    )


def model_targets(spec: DecoderSpec) -> Iterator[Target]:
    """The targets, with names of checkpoint tensors that begin with "model"."""
    size = (spec.vocab_size, spec.hidden_size)
    table = whole(f"{spec.names.prefix}{spec.names.embedding}.weight", *size)
    heads = [(whole(f"{name}.weight", *size),) for name in spec.names.heads]
    yield target("embed", size, (table,), *(heads if spec.tied else ()))
    if not spec.tied:
        yield target("head", size, *heads)
    for index in range(len(spec.layers)):
        yield from layer_targets(spec, index)
    yield simple("norm", f"{spec.names.prefix}{spec.norm.final}.weight", spec.hidden_size)


def layer_targets(spec: DecoderSpec, index: int) -> Iterator[Target]:
    layer = spec.layers[index]
    ours, theirs, names = f"{index}.", f"{spec.names.prefix}layers.{index}.", spec.names
    for role in norm_roles(layer):
        name = getattr(spec.norm, role)
        if name is not None:
            yield simple(f"{ours}{role}", f"{theirs}{name}.weight", spec.hidden_size)
    makers = {
        "attention": (attention_targets, names.attention),
        "short_conv": (short_conv_targets, "conv"),
        "gated_delta": (gated_delta_targets, "linear_attn"),
        "mamba": (mamba_targets, names.mamba),
    }
    for kind in layer.mixers:
        make, module = makers[kind]
        yield from make(spec, ours, f"{theirs}{module}.")
    if layer.is_moe:
        yield from moe_targets(spec, ours, theirs)
    elif layer.has_mlp:
        yield from mlp_targets(spec, ours, f"{theirs}{names.mlp}.")


def norm_roles(layer: DecoderLayerSpec) -> tuple[str, ...]:
    """The roles in ``NormSpec`` of the norms that a layer has."""
    of_mixer = ("attention_in", "attention_out") if layer.mixers else ()
    return of_mixer + (("mlp_in", "mlp_out") if layer.has_mlp else ())


def short_conv_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    conv, hidden = spec.short_conv, spec.hidden_size
    assert conv is not None
    yield simple(f"{ours}in", f"{theirs}in_proj.weight", 3 * conv.width, hidden)
    if conv.bias:
        yield simple(f"{ours}in_bias", f"{theirs}in_proj.bias", 3 * conv.width)
    yield simple(f"{ours}conv", f"{theirs}conv.weight", conv.width, 1, conv.taps)
    if conv.bias:
        yield simple(f"{ours}conv_bias", f"{theirs}conv.bias", conv.width)
    yield simple(f"{ours}out", f"{theirs}out_proj.weight", hidden, conv.width)
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


def mamba_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    mamba, hidden = spec.mamba, spec.hidden_size
    assert mamba is not None
    rows = 2 * mamba.width
    of_scan: Shape = (mamba.width, mamba.state_size)
    if isinstance(mamba, HeadMambaSpec):
        rows, of_scan = mamba.width + mamba.conv_width + mamba.num_heads, (mamba.num_heads,)
    yield simple(f"{ours}mamba_in", f"{theirs}in_proj.weight", rows, hidden)
    if mamba.bias:
        yield simple(f"{ours}mamba_in_bias", f"{theirs}in_proj.bias", rows)
    yield simple(f"{ours}conv", f"{theirs}conv1d.weight", mamba.conv_width, 1, mamba.taps)
    if mamba.conv_bias:
        yield simple(f"{ours}conv_bias", f"{theirs}conv1d.bias", mamba.conv_width)
    yield simple(f"{ours}a_log", f"{theirs}A_log", *of_scan)
    yield simple(f"{ours}skip", f"{theirs}D", of_scan[0])
    if isinstance(mamba, HeadMambaSpec):
        yield simple(f"{ours}dt_bias", f"{theirs}dt_bias", mamba.num_heads)
        if mamba.has_norm:
            yield simple(f"{ours}gate_norm", f"{theirs}norm.weight", mamba.width)
    else:
        yield from channel_targets(mamba, ours, theirs)
    yield simple(f"{ours}mamba_out", f"{theirs}out_proj.weight", hidden, mamba.width)
    if mamba.out_bias:
        yield simple(f"{ours}mamba_out_bias", f"{theirs}out_proj.bias", hidden)


def channel_targets(mamba: ChannelMambaSpec, ours: str, theirs: str) -> Iterator[Target]:
    """The tensors from which Mamba-1 makes time steps, b and c."""
    rows = mamba.rank + 2 * mamba.state_size
    yield simple(f"{ours}parameters", f"{theirs}x_proj.weight", rows, mamba.width)
    yield simple(f"{ours}steps", f"{theirs}dt_proj.weight", mamba.width, mamba.rank)
    yield simple(f"{ours}dt_bias", f"{theirs}dt_proj.bias", mamba.width)
    if mamba.norms == "stored":
        sizes = {"dt": mamba.rank, "b": mamba.state_size, "c": mamba.state_size}
        for name, size in sizes.items():
            yield simple(f"{ours}{name}_norm", f"{theirs}{name}_layernorm.weight", size)


def plain_mlp_targets(
    ours: str, theirs: str, sizes: tuple[int, int], bias: bool
) -> Iterator[Target]:
    """The tensors of an MLP without a gate. sizes: intermediate and hidden size."""
    size, hidden = sizes
    for name, rows, columns in (("up", size, hidden), ("down", hidden, size)):
        yield simple(f"{ours}{name}", f"{theirs}{name}_proj.weight", rows, columns)
        if bias:
            yield simple(f"{ours}{name}_bias", f"{theirs}{name}_proj.bias", rows)


def mlp_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    size, hidden, names = spec.mlp.intermediate_size, spec.hidden_size, spec.names
    if not spec.mlp.is_gated:
        yield from plain_mlp_targets(ours, theirs, (size, hidden), spec.mlp.bias)
        return
    halves = (names.gate, names.up)
    yield target(
        f"{ours}gate_up",
        (2 * size, hidden),
        tuple(whole(f"{theirs}{half}.weight", size, hidden) for half in halves),
        (whole(f"{theirs}{names.gate_up}.weight", 2 * size, hidden),),
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
    blocks = tuple(f"{theirs}{block}." for block in MOE_BLOCKS)
    shape = (moe.num_experts, hidden)
    routers = (whole(f"{b}{name}.weight", *shape) for b in blocks for name in ROUTERS)
    yield target(f"{ours}router", shape, *((router,) for router in routers))
    if moe.has_bias:
        biases = (whole(f"{b}{name}", moe.num_experts) for b in blocks for name in ROUTER_BIASES)
        yield target(f"{ours}router_bias", (moe.num_experts,), *((bias,) for bias in biases))
    if moe.shared_size:
        yield from shared_expert_targets(spec, ours, theirs)
    rows = 2 * moe.intermediate_size
    for e in range(moe.num_experts):
        if not spec.mlp.is_gated:
            sizes, block = (moe.intermediate_size, hidden), f"{theirs}{spec.names.mlp}."
            yield from plain_mlp_targets(f"{ours}{e}.", f"{block}experts.{e}.", sizes, False)
            continue
        yield target(
            f"{ours}{e}.gate_up",
            (rows, hidden),
            *(expert_parts(spec, block, e, halves) for block in blocks for halves in GATE_UP),
            *(stacked(f"{b}{n}", spec, e, (rows, hidden)) for b in blocks for n in STACKED_GATE_UP),
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
            *(stacked(f"{b}{n}", spec, e, down) for b in blocks for n in STACKED_DOWN),
        )


GATE_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
DOWN = ("down_proj", "w2")
STACKED_GATE_UP = ("experts.gate_up_proj", "input_linear.weight")
STACKED_DOWN = ("experts.down_proj", "experts.down_proj.weight", "output_linear.weight")
MOE_BLOCKS = ("mlp", "block_sparse_moe", "feed_forward", "mixer")
ROUTERS = ("gate", "router.layer", "router")
ROUTER_BIASES = ("expert_bias", "gate.e_score_correction_bias")


def shared_expert_targets(spec: DecoderSpec, ours: str, theirs: str) -> Iterator[Target]:
    """The tensors of the expert that all tokens use. ours, theirs: prefixes of the layer."""
    moe, hidden = spec.moe, spec.hidden_size
    assert moe is not None
    size = moe.shared_size
    if not spec.mlp.is_gated:
        block = f"{theirs}{spec.names.mlp}.shared_experts."
        yield from plain_mlp_targets(f"{ours}shared_", block, (size, hidden), spec.mlp.bias)
        return
    block, granite = f"{theirs}mlp.shared_expert", f"{theirs}shared_mlp."
    halves = tuple(whole(f"{block}.{half}.weight", size, hidden) for half in GATE_UP[0])
    both = (whole(f"{granite}input_linear.weight", 2 * size, hidden),)
    yield target(f"{ours}shared_gate_up", (2 * size, hidden), halves, both)
    downs = (f"{block}.down_proj.weight", f"{granite}output_linear.weight")
    ways = ((whole(name, hidden, size),) for name in downs)
    yield target(f"{ours}shared_down", (hidden, size), *ways)
    if moe.shared_is_gated:
        yield simple(f"{ours}shared_gate", f"{block}_gate.weight", 1, hidden)


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
