"""Shape of the KV cache: bytes per block and groups of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.config.kv_groups import FULL, Group, window_blocks
from engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """The keys and values that one attention layer keeps, in blocks."""

    num_kv_heads: int
    head_dim: int
    """Elements of a key, and of a value."""
    window: int = 0
    """Sliding window in tokens, 0 for full attention."""
    dtype_bytes: int = 4

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


class KVLayout(NamedTuple):
    """How the layers of a model share one pool of blocks.

    A block belongs to one group of layers at a time. It consists of parts: one part holds the keys
    and values of ``block_size`` tokens in one layer of the group."""

    groups: tuple[Group, ...]
    group_of: tuple[int, ...]
    """Group of each layer."""
    parts: tuple[int, ...]
    """Place of each layer in its group's blocks."""
    block_bytes: int

    @property
    def num_parts(self) -> int:
        """Number of parts of a block, which is the number of layers in the largest group."""
        return max(self.parts) + 1

    @property
    def windows(self) -> tuple[int, ...]:
        """Window of each group in tokens, 0 for full attention."""
        return tuple(group.window for group in self.groups)


MOST_PADDED = 1.025  # most memory of a request of full length, relative to what its layers need


def one_group(layers: Sequence[PagedKV], block_size: int) -> KVLayout:
    """The layout with a single group, in which every layer keeps the KV of all tokens. Raises
    ``ConfigError`` as ``make_layout`` does."""
    num = len(layers)
    block_bytes = num * _token_bytes(layers) * block_size
    return KVLayout((FULL,), (0,) * num, tuple(range(num)), block_bytes)


def make_layout(
    layers: Sequence[PagedKV], *, block_size: int, max_num_batched_tokens: int, max_model_len: int
) -> KVLayout:
    """Divide the layers into groups with the same window, and assign each layer a part of a block.

    All blocks have the same number of parts; a group with fewer layers leaves some unused. More
    parts make fewer groups, which need fewer block tables, but waste more memory. So the number of
    parts is the one with the fewest groups for which a request of ``max_model_len`` tokens takes at
    most ``MOST_PADDED`` times the memory that its layers need. Groups of full attention come first.

    Raises ``ConfigError`` if layers need different numbers of bytes per token, since their blocks
    could not come from one pool."""
    token_bytes = _token_bytes(layers)
    by_window: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        by_window.setdefault(layer.window, []).append(index)
    num_parts = _choose_parts({w: len(found) for w, found in by_window.items()}, max_model_len)
    groups: list[Group] = []
    group_of, parts = [0] * len(layers), [0] * len(layers)
    for window, indices in sorted(by_window.items()):
        most = window_blocks(window, max_num_batched_tokens, block_size) if window else 0
        for nth, index in enumerate(indices):
            parts[index] = nth % num_parts
            if not parts[index]:
                groups.append(Group(window=window, max_blocks=most))
            group_of[index] = len(groups) - 1
    block_bytes = num_parts * token_bytes * block_size
    return KVLayout(tuple(groups), tuple(group_of), tuple(parts), block_bytes)


def _token_bytes(layers: Sequence[PagedKV]) -> int:
    """Bytes of the keys and values of one token in one layer. Raises ``ConfigError`` if layers
    differ."""
    by_bytes: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        by_bytes.setdefault(layer.token_bytes, []).append(index)
    if len(by_bytes) > 1:
        sizes = "; ".join(f"{size} in layers {indices}" for size, indices in by_bytes.items())
        raise ConfigError(
            f"layers keep different numbers of bytes of KV per token ({sizes}), but all blocks of "
            "the KV cache have one size; models with several layer sizes are not supported"
        )
    return layers[0].token_bytes


def _choose_parts(counts: Mapping[int, int], max_model_len: int) -> int:
    """Choose the number of parts of a block (see ``make_layout``). counts: the number of layers
    with each sliding window (0: none)."""
    tokens = {window: min(window or max_model_len, max_model_len) for window in counts}

    def num_groups(num_parts: int) -> int:
        return sum(-(-count // num_parts) for count in counts.values())

    def kept(num_parts: int) -> int:
        """The memory of a request of ``max_model_len`` tokens, in tokens times layers."""
        return sum(-(-n // num_parts) * num_parts * tokens[w] for w, n in counts.items())

    few = range(1, max(counts.values()) + 1)
    fits = [num_parts for num_parts in few if kept(num_parts) <= MOST_PADDED * kept(1)]
    return min(fits, key=lambda num_parts: (num_groups(num_parts), kept(num_parts), num_parts))


def cross_attention_blocks(num_encoder_tokens: int, block_size: int) -> int:
    """Number of blocks for the KV of ``num_encoder_tokens`` encoder outputs, for
    cross-attention."""
    return -(-num_encoder_tokens // block_size)


def agreed_num_blocks(num_blocks_by_worker: Sequence[int]) -> int:
    """Return the number of blocks in every worker's pool: the smallest number, because a block id
    must be valid on all workers."""
    return min(num_blocks_by_worker)
