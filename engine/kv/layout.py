"""Shape of the KV cache: bytes per block and groups of layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.config.kv_groups import FULL, Group, window_blocks
from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """The KV format of one attention layer, which stores keys and values in blocks."""

    num_kv_heads: int
    head_dim: int
    """Elements of a key."""
    value_dim: int = 0
    """Elements of a value; 0: as many as a key has."""
    window: int = 0
    """Sliding window in tokens, 0 for full attention."""
    is_chunked: bool = False
    """True if ``window`` is the size of chunks, see ``Group.is_chunked``."""
    dtype_bytes: int = 4
    scale_bytes: int = 0
    """Bytes of the scale of a token's key, and of its value, in one head; 0: without scales."""

    @property
    def stored_dim(self) -> int:
        """Elements stored for a key, and for a value, of one head; the shorter one is padded."""
        return max(self.head_dim, self.value_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes stored for the key and the value of one token."""
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes stored for the key, or for the value, of one token in one head."""
        return self.stored_dim * self.dtype_bytes + self.scale_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of the key and the value of one token, without padding."""
        dims = self.head_dim + (self.value_dim or self.head_dim)
        return self.num_kv_heads * (dims * self.dtype_bytes + 2 * self.scale_bytes)


@dataclass(frozen=True, kw_only=True)
class SharedKV:
    """A layer without keys and values of its own, which reads those of an earlier layer."""

    source: int
    """Index of the earlier layer, which keeps its own."""


@dataclass(frozen=True, kw_only=True)
class NoCache:
    """A layer that stores nothing between steps."""


DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class StateTensor(NamedTuple):
    """One tensor of a recurrent state: shape for one request, and name of its dtype."""

    shape: tuple[int, ...]
    dtype: str
    is_sum: bool = False
    """True if the tensor sums up all tokens, so that its dtype is that of the option
    ``mamba_ssm_cache_dtype``; False if it holds recent inputs of a convolution."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one copy of one request's tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """A layer with a state of fixed size for each running request, which is not in the KV pool."""

    tensors: tuple[StateTensor, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy of one request's state in this layer."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, kw_only=True)
class PagedLatent:
    """One compressed vector per token instead of a key and a value. Not supported yet."""

    latent_dim: int


Kind = tuple[int, int, bool]
"""A kind of layers: window in tokens (0: none), bytes per token, True if the window is chunked."""
LayerCache = PagedKV | SharedKV | NoCache | RecurrentState | PagedLatent
"""What one layer of a model keeps between steps."""
UNSUPPORTED: Mapping[type, str] = {PagedLatent: "a compressed vector per token"}


class KVLayout(NamedTuple):
    """How the layers of a model share one pool of blocks.

    A block belongs to one group of layers at a time. It consists of parts: one part holds the keys
    and values of ``block_size`` tokens in one layer of the group."""

    groups: tuple[Group, ...]
    group_of: tuple[int, ...]
    """Group of each layer. A layer that keeps nothing has group 0."""
    parts: tuple[int, ...]
    """Place of each layer in its group's blocks. A layer that keeps nothing has place 0."""
    block_bytes: int
    parts_of: tuple[int, ...]
    """Number of parts into which each group divides a block."""
    is_interleaved: bool = False
    """True if groups divide a block into different numbers of parts, so that all parts of a block
    are stored next to each other. Otherwise each part of all blocks is a tensor of its own."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors that store the pool."""
        return 1 if self.is_interleaved else max(self.parts) + 1

    @property
    def scales(self) -> tuple[int, ...]:
        """For each group, the factor by which a block's id in the pool is multiplied to get its
        index in the tensors of the group's layers."""
        return self.parts_of if self.is_interleaved else (1,) * len(self.groups)

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each group in tokens, 0 for full attention."""
        return tuple(group.window for group in self.groups)


PLANNED_TOKENS = 32768  # length of the request for which the size of blocks is chosen
MOST_HELD = 1.03  # its memory relative to what its layers need, if blocks of some size allow that


def one_group(layers: Sequence[LayerCache], block_size: int) -> KVLayout:
    """The layout with a single group, in which every layer keeps the KV of all tokens. Raises
    ``ConfigError`` if no layer stores KV, or if one stores something that is not supported."""
    return _one_group(_owners(layers), layers, FULL, block_size)


def make_layout(
    layers: Sequence[LayerCache],
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> KVLayout:
    """Divide the layers into groups, and assign each layer a part of its group's blocks.

    Layers of a group have the same window and, if windows differ, the same bytes per token; a
    window of ``max_model_len`` tokens or more is full attention. All blocks have the same size. It
    is chosen to make few groups, and so few block tables, while a decoding request of
    ``PLANNED_TOKENS`` tokens takes at most ``MOST_HELD`` times the memory that its KV needs. Groups
    of full attention come first. Raises ``ConfigError`` if a layer keeps something that is not
    supported."""
    owners = _owners(layers)
    kinds: dict[Kind, list[int]] = {}
    for index, layer in owners.items():
        window = layer.window if layer.window < max_model_len else 0
        is_chunked = layer.is_chunked and window > 0
        kinds.setdefault((window, layer.token_bytes, is_chunked), []).append(index)

    def group_with(window: int, is_chunked: bool) -> Group:
        most = window_blocks(window, max_num_batched_tokens, block_size) if window else 0
        return Group(window=window, max_blocks=most, is_chunked=is_chunked)

    seen = {(window, is_chunked) for window, _, is_chunked in kinds}
    if len(seen) == 1:
        return _one_group(owners, layers, group_with(*seen.pop()), block_size)
    token_bytes = _choose_bytes({kind: len(found) for kind, found in kinds.items()}, block_size)
    groups: list[Group] = []
    parts_of: list[int] = []
    places: dict[int, tuple[int, int]] = {}
    for (window, layer_bytes, is_chunked), indices in sorted(kinds.items()):
        num_parts = token_bytes // layer_bytes
        for nth, index in enumerate(indices):
            if nth % num_parts == 0:
                groups.append(group_with(window, is_chunked))
                parts_of.append(num_parts)
            places[index] = (len(groups) - 1, nth % num_parts)
    group_of, parts = zip(*_of_all(places, layers), strict=True)
    is_interleaved = len(set(parts_of)) > 1
    block_bytes = token_bytes * block_size
    return KVLayout(tuple(groups), group_of, parts, block_bytes, tuple(parts_of), is_interleaved)


def part_of_layout(
    layout: KVLayout, layers: Sequence[LayerCache], mine: Sequence[LayerCache], block_size: int
) -> KVLayout:
    """The layout of a worker that has only some layers, ``mine``, of those of ``layout``.

    The groups are those of the whole layout, so block tables are the same for all workers; a group
    may be without a layer here. Layers are distributed evenly among the groups of their kind, which
    makes blocks as small as possible. No layer may use the keys and values of another one."""
    owners = _owners(mine)
    if len(layout.groups) == 1:
        return _one_group(owners, mine, layout.groups[0], block_size)
    groups_of: dict[tuple[Group, int], set[int]] = {}  # by group and bytes of a token in a layer
    kinds: dict[PagedKV, tuple[Group, int]] = {}
    for layer, group in zip(layers, layout.group_of, strict=True):
        if isinstance(layer, PagedKV):
            kinds[layer] = layout.groups[group], layer.token_bytes
            groups_of.setdefault(kinds[layer], set()).add(group)
    by_kind: dict[tuple[Group, int], list[int]] = {}
    for index, layer in owners.items():
        by_kind.setdefault(kinds[layer], []).append(index)
    most = {kind: -(-len(found) // len(groups_of[kind])) for kind, found in by_kind.items()}
    unit = math.lcm(*(layer_bytes for _, layer_bytes in most))
    needed = max(num * layer_bytes for (_, layer_bytes), num in most.items())
    token_bytes = -(-needed // unit) * unit
    parts_of = [1] * len(layout.groups)
    places: dict[int, tuple[int, int]] = {}
    for kind, indices in by_kind.items():
        groups = sorted(groups_of[kind])
        for nth, index in enumerate(indices):
            places[index] = groups[nth // most[kind]], nth % most[kind]
        for group in groups:
            parts_of[group] = token_bytes // kind[1]
    group_of, parts = zip(*_of_all(places, mine), strict=True)
    is_interleaved = len({layer_bytes for _, layer_bytes in by_kind}) > 1
    block_bytes = token_bytes * block_size
    return KVLayout(layout.groups, group_of, parts, block_bytes, tuple(parts_of), is_interleaved)


def state_bytes(layers: Sequence[LayerCache]) -> int:
    """Bytes of one copy of one request's recurrent states in all layers; 0 without such layers."""
    return sum(layer.state_bytes for layer in layers if isinstance(layer, RecurrentState))


def padding(layers: Sequence[LayerCache], layout: KVLayout, block_size: int) -> float:
    """Fraction of the pool's bytes that store no key and no value, if all groups have the same
    number of blocks."""
    owned = _owners(layers).values()
    needed = sum(layer.needed_bytes for layer in owned) * block_size
    return 1 - needed / (len(layout.groups) * layout.block_bytes)


def _owners(layers: Sequence[LayerCache]) -> dict[int, PagedKV]:
    """The layers that store keys and values of their own, by index. Raises ``ConfigError`` if there
    are none, or if a layer stores something that is not supported."""
    for index, layer in enumerate(layers):
        if type(layer) in UNSUPPORTED:
            raise ConfigError(
                f"layer {index} of the model keeps {UNSUPPORTED[type(layer)]} "
                f"({type(layer).__name__}), which is not supported; layers may keep keys and "
                "values, use those of an earlier layer, keep a recurrent state, or keep nothing"
            )
    owners = {index: layer for index, layer in enumerate(layers) if isinstance(layer, PagedKV)}
    if not owners:
        raise ConfigError("no layer of the model keeps keys and values, which is not supported")
    return owners


def _one_group(
    owners: Mapping[int, PagedKV], layers: Sequence[LayerCache], group: Group, block_size: int
) -> KVLayout:
    """The layout with one group, in which each layer that stores KV has a tensor of its own."""
    places = {index: (0, part) for part, index in enumerate(owners)}
    group_of, parts = zip(*_of_all(places, layers), strict=True)
    block_bytes = sum(layer.token_bytes for layer in owners.values()) * block_size
    return KVLayout((group,), group_of, parts, block_bytes, (len(owners),))


def _of_all(
    places: Mapping[int, tuple[int, int]], layers: Sequence[LayerCache]
) -> list[tuple[int, int]]:
    """Return (group, part of a block) for every layer: for one that reads the KV of an earlier
    layer, those of that layer. ``places``: the pairs of the layers that store KV."""
    sources = [
        layer.source if isinstance(layer, SharedKV) else index for index, layer in enumerate(layers)
    ]
    return [places.get(source, (0, 0)) for source in sources]


def _choose_bytes(counts: Mapping[Kind, int], block_size: int) -> int:
    """Choose the size of a block in bytes per token (see ``make_layout``). counts: the number of
    layers of each kind."""
    unit = math.lcm(*(layer_bytes for _, layer_bytes, _ in counts))
    needed_tokens = {kind: min(kind[0] or PLANNED_TOKENS, PLANNED_TOKENS) for kind in counts}
    needed = sum(count * kind[1] * needed_tokens[kind] for kind, count in counts.items())

    def num_groups(block: int) -> int:
        return sum(-(-count * kind[1] // block) for kind, count in counts.items())

    def held(block: int) -> int:
        """Bytes that the planned request takes; ``block``: a block's bytes per token. Its tokens
        begin and end anywhere in a block, so a group may hold one block more than they fill."""
        return sum(
            -(-count * kind[1] // block) * block * (needed_tokens[kind] + block_size)
            for kind, count in counts.items()
        )

    largest = max(count * layer_bytes for (_, layer_bytes, _), count in counts.items())
    blocks = range(unit, max(unit, largest) + unit, unit)
    least = min(map(held, blocks))
    most = MOST_HELD * (needed if least <= MOST_HELD * needed else least)
    fits = [block for block in blocks if held(block) <= most]
    return min(fits, key=lambda block: (num_groups(block), held(block), block))
