"""Divides an encoder among the ranks of a group, as ``sharding`` does a decoder. Does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from engine.models.encoder_spec import EncoderSpec
from engine.models.encoder_targets import encoder_targets
from engine.models.sharding import ALL, WHOLE, Shard, check, joined, scaled
from engine.models.targets import Cut, Target, cut_target


@dataclass(frozen=True)
class EncoderSlice:
    """The part of an encoder that one rank has."""

    whole: EncoderSpec
    shard: Shard = WHOLE
    unit: int = 1
    """Number of adjacent columns of MLPs that are stored together."""

    @property
    def vocabulary(self) -> range:
        """Tokens whose embeddings this rank has."""
        return self.shard.part(self.whole.vocab_size)

    @property
    def columns(self) -> range:
        """Columns of MLPs that this rank has."""
        return self.shard.part(self.whole.mlp.intermediate_size, self.unit)

    @cached_property
    def spec(self) -> EncoderSpec:
        """The architecture of the part. Its vocabulary is that of the whole."""
        whole, a = self.whole, self.whole.attention
        if self.shard.size == 1:
            return whole
        heads, shared = a.num_heads // self.shard.size, len(self.shard.share(a.num_kv_heads))
        return replace(
            whole,
            attention=replace(a, num_heads=heads, num_kv_heads=shared),
            mlp=replace(whole.mlp, intermediate_size=len(self.columns)),
        )

    def targets(self) -> Iterator[Target]:
        """The tensors of the part, in the order in which it is built."""
        for one in encoder_targets(self.whole):
            yield one if self.shard.size == 1 else cut_target(one, self.cut(one.name))

    def cut(self, name: str) -> Cut:
        """Which rows and columns of a target this rank has."""
        role = name.rpartition(".")[2]
        found = self._cuts.get(role.removesuffix("_bias"), ALL)
        # A bias of outputs that are added up belongs to all of them.
        return ALL if found.columns is not None and role.endswith("_bias") else found

    def adds_up(self, name: str) -> bool:
        """True if the outputs of a linear layer are added up over the ranks."""
        return self.cut(name).columns is not None

    @cached_property
    def _cuts(self) -> Mapping[str, Cut]:
        if self.shard.size == 1:
            return {}
        a, mlp = self.whole.attention, self.whole.mlp
        heads = self.shard.part(a.num_heads)
        queries = scaled(heads, a.head_dim)
        keys = scaled(self.shard.share(a.num_kv_heads), a.head_dim)
        both = [(mlp.intermediate_size, self.columns)] * (2 if mlp.is_gated else 1)
        return {
            "words": Cut((self.vocabulary,)),
            "relative": Cut(None, heads),
            "qkv": Cut(joined((a.q_width, queries), (a.kv_width, keys), (a.kv_width, keys))),
            "out": Cut(None, queries),
            "up": Cut(joined(*both)),
            "down": Cut(None, self.columns),
        }


def check_encoder(spec: EncoderSpec, size: int, unit: int = 1) -> None:
    """Raise ``ConfigError`` if an encoder cannot be divided among this many ranks. unit: see
    ``EncoderSlice``."""

    def obstacle(num: int) -> str:
        a, columns = spec.attention, spec.mlp.intermediate_size
        if a.num_heads % num:
            return f"{a.num_heads} attention heads"
        if a.num_kv_heads % num and num % a.num_kv_heads:
            return f"{a.num_kv_heads} heads of keys and values"
        if -(-columns // unit) < num:
            return f"{columns} columns in its MLPs in blocks of {unit}"
        return ""

    check(size, obstacle)
