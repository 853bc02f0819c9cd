"""Shape of the KV cache: bytes per block and groups of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import ConfigError
from engine.kv.tables import Group


@dataclass(frozen=True, kw_only=True)
class LayerKV:
    """The KV that one layer keeps per token."""

    num_kv_heads: int
    head_dim: int
    window: int = 0
    """Sliding window in tokens, 0 for full attention."""
    dtype_bytes: int = 4

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """The KV that a model keeps per token. Layers are numbered in forward order."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Sliding window of each layer in tokens, 0 for full attention."""
    dtype_bytes: int = 4

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block: K and V of ``block_size`` tokens in all layers."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes
        return self.num_layers * per_token * block_size

    def layers(self) -> list[LayerKV]:
        """The KV of each layer."""
        return [
            LayerKV(
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                window=window,
                dtype_bytes=self.dtype_bytes,
            )
            for window in self.windows
        ]


class Grouping(NamedTuple):
    """Groups of layers, and the bytes of a block, which are the same in all groups."""

    groups: tuple[Group, ...]
    block_bytes: int


def group_layers(
    layers: Sequence[LayerKV], *, block_size: int, max_num_batched_tokens: int
) -> Grouping:
    """Group layers with the same window. All groups but the last of a window are equally large.

    The rarest window decides the size; a smaller group leaves a part of its blocks unused. Full
    attention comes first. Raises ``ConfigError`` if layers keep different numbers of bytes per
    token, since their blocks could not come from one pool.
    """
    by_bytes: dict[int, list[int]] = {}
    by_window: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        by_bytes.setdefault(layer.token_bytes, []).append(index)
        by_window.setdefault(layer.window, []).append(index)
    if len(by_bytes) > 1:
        sizes = "; ".join(f"{size} in layers {indices}" for size, indices in by_bytes.items())
        raise ConfigError(
            f"layers keep different numbers of bytes of KV per token ({sizes}), but all blocks of "
            "the KV cache have one size; models with several layer sizes are not supported"
        )
    size = min(map(len, by_window.values()))
    groups = [
        Group(
            window=window,
            max_blocks=window_blocks(window, max_num_batched_tokens, block_size) if window else 0,
            layers=tuple(indices[start : start + size]),
        )
        for window, indices in sorted(by_window.items())
        for start in range(0, len(indices), size)
    ]
    return Grouping(tuple(groups), size * layers[0].token_bytes * block_size)


def window_blocks(window: int, max_num_batched_tokens: int, block_size: int) -> int:
    """The most blocks that a request needs in layers with this window (in tokens).

    The first token of a step reads the ``window - 1`` tokens before it; this range may begin and
    end inside a block.
    """
    return -(-(window - 1 + max_num_batched_tokens) // block_size) + 1


def cross_attention_blocks(num_encoder_tokens: int, block_size: int) -> int:
    """Blocks for the encoder output that a decoder's cross-attention reads."""
    return -(-num_encoder_tokens // block_size)


def max_concurrency(
    num_usable_blocks: int, groups: Sequence[Group], block_size: int, max_model_len: int
) -> float:
    """How many requests of full length the pool holds at once."""
    entries = -(-max_model_len // block_size)
    return num_usable_blocks / sum(group.bound(entries) for group in groups)


def agreed_num_blocks(num_blocks_by_worker: Sequence[int]) -> int:
    """Block ids mean the same on every worker, so the one with the least memory decides."""
    return min(num_blocks_by_worker)
