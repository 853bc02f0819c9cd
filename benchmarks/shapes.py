"""Shapes of models, and the tokens and KV cache of a step on which they are measured.

Sizes count bytes that must be read once, and two operations for each product.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kernels import AttentionMeta


@dataclass(frozen=True)
class Shape:
    """The sizes in a decoder's configuration."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    is_tied: bool

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of a layer's products, of which each layer has its own."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.ff, self.hidden),
            "down": (self.hidden, self.ff),
        }

    @property
    def num_read(self) -> int:
        """Weights that every step reads: all but the table of embeddings."""
        layer = sum(out * inner for out, inner in self.linears.values())
        return self.layers * layer + self.vocab * self.hidden

    def kv_bytes(self, cell: int) -> int:
        """Bytes of one token's keys and values, with elements of `cell` bytes."""
        return 2 * self.layers * self.kv_heads * self.head_dim * cell

    def hf_config(self, max_len: int) -> dict[str, Any]:
        family = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}[self.architecture]
        return {
            "architectures": [self.architecture],
            "model_type": family,
            "hidden_size": self.hidden,
            "intermediate_size": self.ff,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": max_len,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 500_000.0,
            "dtype": "bfloat16",
            "eos_token_id": 2,
        }


QWEN3, LLAMA = "Qwen3ForCausalLM", "LlamaForCausalLM"
SHAPES = {
    "tiny": Shape(QWEN3, 2, 128, 4, 2, 32, 256, 512, True),
    "mid": Shape(LLAMA, 12, 768, 12, 4, 64, 2560, 32000, False),
    "qwen3-0.6b": Shape(QWEN3, 28, 1024, 16, 8, 128, 3072, 151936, True),
    "llama-3.1-8b": Shape(LLAMA, 32, 4096, 32, 8, 128, 14336, 128256, False),
}


@contextmanager
def model_directory(shape: Shape, max_len: int) -> Iterator[str]:
    """A directory that holds only the shape's config.json, for ``load_format="dummy"``."""
    with config_directory(shape.hf_config(max_len)) as root:
        yield root


@contextmanager
def config_directory(config: dict[str, Any]) -> Iterator[str]:
    """A directory that holds only this config.json, for ``load_format="dummy"``."""
    with TemporaryDirectory() as root:
        (Path(root) / "config.json").write_text(json.dumps(config))
        yield root


class Step:
    """One step's tokens, their places in a scattered cache.

    sequences: query tokens and context of each, single tokens first.
    """

    def __init__(self, sequences: Sequence[tuple[int, int]], block: int, device: str = "cpu"):
        counts = [new for new, _ in sequences]
        lens = [new + context for new, context in sequences]
        width = max(-(-length // block) for length in lens)
        shuffled = torch.randperm(len(lens) * width, generator=torch.Generator().manual_seed(0))
        tables = shuffled.to(torch.int32).view(len(lens), width) + 1
        positions = torch.cat([torch.arange(context, context + new) for new, context in sequences])
        owner = torch.repeat_interleave(torch.tensor(counts))
        slots = tables[owner, positions // block].long() * block + positions % block
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.num_tokens = sum(counts)
        self.num_blocks = len(lens) * width + 1
        self.block = block
        self.device = device
        self.num_keys = sum(lens)
        # Pairs of query and key: a token sees what is before it and itself.
        self.num_pairs = sum(n * context + n * (n + 1) // 2 for n, context in sequences)
        self._sizes = (block, sum(n == 1 for n in counts), max(counts), max(lens))
        self._tensors = [
            x.to(device)
            for x in (starts, torch.tensor(lens, dtype=torch.int32), tables, positions, slots)
        ]

    def meta(self) -> AttentionMeta:
        """New metadata, without what the layers of a step have computed and shared."""
        starts, lens, tables, positions, slots = self._tensors
        return AttentionMeta(starts, lens, tables, positions, slots, *self._sizes)

    def cache(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """One layer's cache, of small random numbers."""
        size = (self.num_blocks, 2, kv_heads, self.block, head_dim)
        return torch.empty(size, dtype=dtype, device=self.device).uniform_(-1, 1)
