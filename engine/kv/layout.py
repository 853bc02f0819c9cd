"""Shape of the KV cache: bytes per block, how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KVSpec:
    """What a model keeps per token. Layers are numbered in forward order."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    """Sliding window of each layer in tokens, 0 for full attention."""
    dtype_bytes: int = 4

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block over all layers, K and V together."""
        per_token = 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes
        return self.num_layers * per_token * block_size
