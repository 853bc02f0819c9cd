"""Divides the layers of a decoder among the ranks of a group. Does not import torch.

Each rank computes some of the heads, of the columns of MLPs and experts, of the channels of
recurrent mixers, and of the vocabulary. The outputs of the last matrix of each sublayer are added
up over the ranks. Everything else is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from engine.config.parallel import MOST_RANKS
from engine.errors import ConfigError
from engine.models.spec import (
    ChannelMambaSpec,
    DecoderSpec,
    Factor,
    HeadMambaSpec,
)
from engine.models.stages import Stage
from engine.models.targets import Cut, Target, cut_target, targets


class Shard(NamedTuple):
    """The number of a rank, from 0, and the number of ranks."""

    rank: int = 0
    size: int = 1

    def part(self, count: int, unit: int = 1) -> range:
        """The part of ``count`` things that this rank has. Parts are adjacent and consist of whole
        units; the first ones may be a unit larger."""
        if count % (self.size * unit):
            # Kernels are fastest with multiples of 32 columns.
            wider = (one * unit for one in (32, 16, 8, 4, 2) if count % (one * unit) == 0)
            unit = next((one for one in wider if count // one >= self.size), unit)
        units, more = divmod(-(-count // unit), self.size)
        first = self.rank * units + min(self.rank, more)
        last = first + units + (self.rank < more)
        return range(first * unit, min(last * unit, count))

    def share(self, heads: int) -> range:
        """The part of ``heads`` that this rank has, a single one if there are fewer than ranks:
        then adjacent ranks have the same."""
        if heads >= self.size:
            return self.part(heads)
        first = self.rank * heads // self.size
        return range(first, first + 1)


WHOLE = Shard()
ALL = Cut(None)


@dataclass(frozen=True)
class DecoderSlice:
    """The part of a decoder that one rank has."""

    whole: DecoderSpec
    shard: Shard = WHOLE
    units: Mapping[str, int] = field(default_factory=dict)
    """Numbers of adjacent columns that cannot be divided, by the dimension (see ``DIMENSIONS``),
    since they are stored together."""
    only: Stage | None = None
    """The stage of a pipeline that the rank computes; ``None``: all layers."""

    @property
    def stage(self) -> Stage:
        """The stage of the pipeline that this is; of a whole model, its only stage."""
        return self.only or Stage(0, 1, range(len(self.whole.layers)))

    @property
    def vocabulary(self) -> range:
        """Tokens whose embeddings and logits this rank has."""
        return self.shard.part(self.whole.vocab_size)

    @property
    def kv_heads(self) -> range:
        """Heads of keys and values that this rank has."""
        if not self.has_attention:
            return range(self.whole.attention.num_kv_heads)
        return self.shard.share(self.whole.attention.num_kv_heads)

    @property
    def has_attention(self) -> bool:
        return any("attention" in layer.mixers for layer in self.whole.layers)

    @cached_property
    def spec(self) -> DecoderSpec:
        """The architecture of the part. Its vocabulary is that of the whole."""
        whole, shard = self.whole, self.shard
        if shard.size == 1:
            return whole
        attention, moe, delta = whole.attention, whole.moe, whole.gated_delta
        if self.has_attention:
            heads = attention.num_heads // shard.size
            attention = replace(attention, num_heads=heads, num_kv_heads=len(self.kv_heads))
        if moe is not None:
            moe = replace(
                moe,
                intermediate_size=len(self.columns("experts")),
                shared_size=len(self.columns("shared")),
            )
        if delta is not None:
            delta = replace(
                delta,
                key_heads=len(shard.share(delta.key_heads)),
                value_heads=delta.value_heads // shard.size,
            )
        conv = whole.short_conv
        if conv is not None:
            conv = replace(conv, width=len(self.columns("channels")))
        return replace(
            whole,
            attention=attention,
            mlp=replace(whole.mlp, intermediate_size=len(self.columns("mlp"))),
            moe=moe,
            gated_delta=delta,
            short_conv=conv,
            mamba=self._mamba(),
            factors={name: self._factors(name, whole.factors[name]) for name in whole.factors},
        )

    def _mamba(self) -> HeadMambaSpec | ChannelMambaSpec | None:
        mamba = self.whole.mamba
        if isinstance(mamba, ChannelMambaSpec):
            return replace(mamba, width=len(self.columns("mamba")))
        if mamba is None:
            return None
        groups = len(self.shard.share(mamba.num_groups))
        heads = mamba.num_heads // self.shard.size
        return replace(mamba, num_heads=heads, num_groups=groups)

    def columns(self, dimension: str) -> range:
        """The part of a dimension that this rank has."""
        return self.shard.part(dimension_size(self.whole, dimension), self.units.get(dimension, 1))

    def targets(self) -> Iterator[Target]:
        """The tensors of the part, in the order in which it is built."""
        for one in targets(self.whole):
            if self.stage.has(self.whole, one.name):
                yield one if self.shard.size == 1 else cut_target(one, self.cut(one.name))

    def cut(self, name: str) -> Cut:
        """Which rows and columns of a target this rank has."""
        if self.shard.size == 1:
            return ALL
        layer, _, role = name.rpartition(".")
        if not layer:
            return Cut((self.vocabulary,)) if name in ("embed", "head") else ALL
        cuts = self._layer_cuts[int(layer.partition(".")[0])]
        role = f"expert_{role}" if "." in layer else role
        kind = role.removesuffix("_bias")
        found = cuts.get(role) or cuts.get(kind) or ALL
        # A bias of outputs that are added up belongs to all of them.
        return ALL if found.columns is not None and role.endswith("_bias") else found

    def dimension_of(self, name: str) -> str | None:
        """The dimension, of ``DIMENSIONS``, that the columns of a target are; ``None`` if it is
        another one or if this rank has all columns."""
        if not self.adds_up(name):
            return None
        layer, _, role = name.rpartition(".")
        if role in ("down", "shared_down"):
            return "shared" if role == "shared_down" else "experts" if "." in layer else "mlp"
        mixers = self.whole.layers[int(layer)].mixers
        if role == "out":
            return "channels" if "short_conv" in mixers else None
        return "mamba" if isinstance(self.whole.mamba, ChannelMambaSpec) else None

    def adds_up(self, name: str) -> bool:
        """True if the outputs of a linear layer are added up over the ranks."""
        return self.cut(name).columns is not None

    @cached_property
    def _layer_cuts(self) -> list[Mapping[str, Cut]]:
        """The cuts of each layer by the last parts of target names; what is missing is whole."""
        makers = {
            "attention": self._attention_cuts,
            "short_conv": self._short_conv_cuts,
            "gated_delta": self._gated_delta_cuts,
            "mamba": self._mamba_cuts,
        }
        of_kind = {
            kind: makers[kind]()
            for kind in dict.fromkeys(kind for layer in self.whole.layers for kind in layer.mixers)
        }
        mlp = self._mlp_cuts()
        return [
            {**mlp, **{role: cut for kind in layer.mixers for role, cut in of_kind[kind].items()}}
            for layer in self.whole.layers
        ]

    def _attention_cuts(self) -> dict[str, Cut]:
        a = self.whole.attention
        queries = scaled(self.shard.part(a.num_heads), a.head_dim)
        keys = scaled(self.kv_heads, a.head_dim)
        rows = joined((a.q_width, queries), (a.kv_width, keys), (a.kv_width, keys))
        found = {"qkv": Cut(rows), "gate": Cut((queries,)), "out": Cut(None, queries)}
        if a.qk_norm == "full":
            found |= {"q_norm": Cut((queries,)), "k_norm": Cut((keys,))}
        return found

    def _mlp_cuts(self) -> dict[str, Cut]:
        found: dict[str, Cut] = {}
        for prefix, dimension in (("", "mlp"), ("expert_", "experts"), ("shared_", "shared")):
            size = dimension_size(self.whole, dimension)
            if not size:
                continue
            mine = self.columns(dimension)
            found |= {
                f"{prefix}gate_up": Cut(joined((size, mine), (size, mine))),
                f"{prefix}up": Cut((mine,)),
                f"{prefix}down": Cut(None, mine),
            }
        return found | {"shared_gate": ALL}

    def _short_conv_cuts(self) -> dict[str, Cut]:
        mine, size = self.columns("channels"), dimension_size(self.whole, "channels")
        rows = joined(*[(size, mine)] * 3)
        return {"in": Cut(rows), "conv": Cut((mine,)), "out": Cut(None, mine)}

    def _gated_delta_cuts(self) -> dict[str, Cut]:
        delta = self.whole.gated_delta
        assert delta is not None
        heads = self.shard.part(delta.value_heads)
        values = delta.value_width, scaled(heads, delta.value_dim)
        keys = delta.key_width, scaled(self.shard.share(delta.key_heads), delta.key_dim)
        one = Cut((heads,))
        return {
            "in": Cut(joined(keys, keys, values, values)),
            "gates": Cut(joined(*[(delta.value_heads, heads)] * 2)),
            "conv": Cut(joined(keys, keys, values)),
            "rate": one,
            "decay_bias": one,
            "out": Cut(None, values[1]),
        }

    def _mamba_cuts(self) -> dict[str, Cut]:
        mamba = self.whole.mamba
        assert mamba is not None
        if isinstance(mamba, ChannelMambaSpec):
            mine = self.columns("mamba")
            one = Cut((mine,))
            return {
                "mamba_in": Cut(joined(*[(mamba.width, mine)] * 2)),
                **dict.fromkeys(("conv", "a_log", "skip", "steps", "dt_bias"), one),
                "parameters": Cut(None, mine),
                "mamba_out": Cut(None, mine),
            }
        heads = self.shard.part(mamba.num_heads)
        inner = mamba.width, scaled(heads, mamba.head_dim)
        groups = scaled(self.shard.share(mamba.num_groups), mamba.state_size)
        both = [(mamba.num_groups * mamba.state_size, groups)] * 2
        one = Cut((heads,))
        return {
            "mamba_in": Cut(joined(inner, inner, *both, (mamba.num_heads, heads))),
            "conv": Cut(joined(inner, *both)),
            **dict.fromkeys(("a_log", "skip", "dt_bias"), one),
            "gate_norm": Cut((inner[1],)),
            "mamba_out": Cut(None, inner[1]),
        }

    def _factors(self, role: str, factors: tuple[Factor, ...]) -> tuple[Factor, ...]:
        """The factors on the outputs that this rank has of a linear layer."""
        kind = next(i for i, layer in enumerate(self.whole.layers) if self._has(i, role))
        rows = self._layer_cuts[kind].get(role, ALL).rows
        if rows is None:
            return factors
        found, first = list[Factor](), 0
        for factor in factors:
            mine = sum(
                len(range(max(first, one.start), min(first + factor.num_rows, one.stop)))
                for one in rows
            )
            found.append(factor._replace(num_rows=mine))
            first += factor.num_rows
        return tuple(found)

    def _has(self, index: int, role: str) -> bool:
        return role in self._layer_cuts[index]


DIMENSIONS = ("mlp", "experts", "shared", "channels", "mamba")
"""Dimensions that may be divided into parts of other sizes: the columns of MLPs, of experts and of
shared experts, the channels of short convolutions and of Mamba-1."""


def dimension_size(spec: DecoderSpec, dimension: str) -> int:
    """The size of one of ``DIMENSIONS``; 0 if the model does not have it."""
    sizes = {
        "mlp": spec.mlp.intermediate_size,
        "experts": 0 if spec.moe is None else spec.moe.intermediate_size,
        "shared": 0 if spec.moe is None else spec.moe.shared_size,
        "channels": 0 if spec.short_conv is None else spec.short_conv.width,
        "mamba": spec.mamba.width if isinstance(spec.mamba, ChannelMambaSpec) else 0,
    }
    return sizes[dimension]


def scaled(part: range, width: int) -> range:
    """The rows of a part, each of whose members has this many."""
    return range(part.start * width, part.stop * width)


def joined(*parts: tuple[int, range]) -> tuple[range, ...]:
    """The rows of a matrix that consists of several, of which (size, part) is given for each."""
    found, first = list[range](), 0
    for size, part in parts:
        found.append(range(first + part.start, first + part.stop))
        first += size
    return tuple(found)


def check_size(spec: DecoderSpec, size: int, units: Mapping[str, int] | None = None) -> None:
    """Raise ``ConfigError`` if a model cannot be divided among this many ranks. units: see
    ``DecoderSlice``."""
    check(size, lambda num: next(obstacles(spec, num, units or {}), ""))


def check(size: int, obstacle: Callable[[int], str]) -> None:
    """Raise ``ConfigError`` if there is an obstacle to a number of ranks. obstacle: what cannot be
    divided among that many, "" if there is nothing."""
    if found := obstacle(size):
        fits = ", ".join(str(num) for num in range(1, MOST_RANKS + 1) if not obstacle(num))
        raise ConfigError(
            f"tensor_parallel_size is {size}, which does not divide the model: it has {found}; "
            f"sizes that do: {fits}"
        )


def obstacles(spec: DecoderSpec, size: int, units: Mapping[str, int]) -> Iterator[str]:
    """What of a model cannot be divided among this many ranks."""
    for heads, shared, what in kinds_of_heads(spec):
        if heads % size:
            yield f"{heads} {what[0]}"
        if shared % size and size % shared:
            yield f"{shared} {what[1]}"
    for dimension, words in dimensions(spec).items():
        count, unit = dimension_size(spec, dimension), units.get(dimension, 1)
        if -(-count // unit) < size:
            yield f"{count} {words}" + (f" in blocks of {unit}" if unit > 1 else "")
    if spec.vocab_size < size:
        yield f"{spec.vocab_size} tokens in its vocabulary"


def kinds_of_heads(spec: DecoderSpec) -> Iterator[tuple[int, int, tuple[str, str]]]:
    """Numbers of heads of mixers, of heads or groups that several of them share, and what they are
    called."""
    kinds = {kind for layer in spec.layers for kind in layer.mixers}
    a, delta, mamba = spec.attention, spec.gated_delta, spec.mamba
    if "attention" in kinds:
        yield a.num_heads, a.num_kv_heads, ("attention heads", "heads of keys and values")
    if "gated_delta" in kinds and delta is not None:
        what = "value heads of the gated delta rule", "key heads of the gated delta rule"
        yield delta.value_heads, delta.key_heads, what
    if "mamba" in kinds and isinstance(mamba, HeadMambaSpec):
        yield mamba.num_heads, mamba.num_groups, ("Mamba heads", "groups of Mamba heads")


def dimensions(spec: DecoderSpec) -> dict[str, str]:
    """The names in ``DIMENSIONS`` that layers of the model use, with descriptions in words."""
    kinds = {kind for layer in spec.layers for kind in layer.mixers}
    has_dense = any(layer.has_mlp and not layer.is_moe for layer in spec.layers)
    has_moe = spec.moe is not None and any(layer.is_moe for layer in spec.layers)
    used = {
        "mlp": (has_dense, "columns in its MLPs"),
        "experts": (has_moe, "columns in its experts"),
        "shared": (has_moe and dimension_size(spec, "shared") > 0, "columns in its shared experts"),
        "channels": ("short_conv" in kinds, "channels in its convolutions"),
        "mamba": (
            isinstance(spec.mamba, ChannelMambaSpec) and "mamba" in kinds,
            "channels in its Mamba layers",
        ),
    }
    return {name: words for name, (is_used, words) in used.items() if is_used}
