"""Estimates the minimum bytes and operations of a step, for its roofline.

Each weight counts once per step in its compute dtype; keys and values are read by each sequence and
written once; recurrent states are read and written once; logits are written. A multiply-add is two
operations. The embedding table does not count, since a step reads few of its rows. The engine may
do less than this: the last layer computes only the wanted rows, and logits of greedy tokens are not
stored.

Rooflines: Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for
Multicore Architectures", CACM 52 (2009).
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.models.spec import DecoderLayerSpec, DecoderSpec
from engine.models.targets import targets

LOGIT_BYTES = 4
STATE_OPERATIONS = {"gated_delta": 7.0, "mamba": 5.0}
"""Operations with which a token advances one number of a float32 state, by kind of mixer."""
Tokens = NDArray[np.int64]
"""A number of tokens for each sequence."""


class ModelWork(NamedTuple):
    """Minimum bytes to read and write, and operations."""

    bytes: float
    operations: float


class Shapes:
    """Computes the work of steps from the shapes of a native family's decoder."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec = spec
        sizes = {target.name: prod(target.shape) for target in targets(spec)}
        self.num_weights = sum(sizes.values())
        """Number of weights, including the embedding table."""
        self._head = sizes["embed" if spec.tied else "head"]
        del sizes["embed"]
        sizes.pop("head", None)
        self._experts = sum(size for name, size in sizes.items() if is_expert(name))
        self._dense = sum(sizes.values()) - self._experts
        self._windows = Counter(layer.window for layer in spec.layers if has_kv(layer))
        self._mixers = Counter(kind for layer in spec.layers for kind in layer.mixers)
        self._each = self._dense + self._experts * self.share_of_experts(1)

    def kv_bytes(self, cell: int) -> int:
        """Bytes of one token's K and V in all layers. cell: bytes of a number in the cache."""
        return 2 * self._windows.total() * self.spec.attention.kv_width * cell

    def state_bytes(self, cell: float) -> float:
        """Bytes of the recurrent states of one sequence in all layers. cell: of an activation."""
        return sum(
            num * prod(shape) * (4 if is_float32 else cell)
            for kind, num in self._mixers.items()
            for shape, is_float32 in self.spec.state(kind)
        )

    def state_operations(self) -> float:
        """Operations with which one token advances the states of all layers."""
        return sum(
            num * prod(shape) * STATE_OPERATIONS[kind]
            for kind, num in self._mixers.items()
            for shape, is_float32 in self.spec.state(kind)
            if is_float32
        )

    def work(
        self,
        new: Tokens,
        context: Tokens,
        cells: tuple[float, float],
        *,
        num_logits: int,
        shared: int = 0,
    ) -> ModelWork:
        """The work of one forward pass.

        new: new tokens of each sequence; context: earlier tokens of each, in the cache. cells:
        bytes of a weight, and of a number in the cache. num_logits: tokens with logits. shared:
        length of a prefix that all sequences share, whose keys and values are read once.
        """
        num_tokens = int(new.sum())
        used = self._dense + self._experts * self.share_of_experts(num_tokens)
        keys, pairs = self.attended(new, context, shared)
        head = self._head if num_logits else 0
        return ModelWork(
            cells[0] * (used + head)
            + 2 * len(new) * self.state_bytes(cells[0])
            + cells[1] * 2 * self.spec.attention.kv_width * keys
            + LOGIT_BYTES * num_logits * self.spec.vocab_size,
            2.0 * num_tokens * self._each
            + num_tokens * self.state_operations()
            + 2.0 * num_logits * head
            + 4.0 * self.spec.attention.q_width * pairs,
        )

    def attended(self, new: Tokens, context: Tokens, shared: int = 0) -> tuple[int, int]:
        """Number of tokens whose keys and values are read or written, and number of (query, key)
        pairs, both summed over the layers."""
        keys = pairs = 0
        for window, num_layers in self._windows.items():
            before = np.minimum(context, window - 1) if window else context
            known = np.clip(shared - (context - before), 0, before)
            read = before.sum() - known[1:].sum() + 2 * new.sum()
            keys += num_layers * int(read)
            pairs += num_layers * int(num_pairs(new, context, window).sum())
        return keys, pairs

    def share_of_experts(self, num_tokens: int) -> float:
        """Expected fraction of experts used by this many tokens, if routing is uniform and
        independent."""
        moe = self.spec.moe
        return 0.0 if moe is None else 1 - (1 - moe.top_k / moe.num_experts) ** num_tokens


def has_kv(layer: DecoderLayerSpec) -> bool:
    """True if the layer keeps keys and values."""
    return "attention" in layer.mixers


def is_expert(name: str) -> bool:
    """True if a target's name is that of an expert's matrix: `layer.expert.matrix`."""
    return name.count(".") == 2


def num_pairs(new: Tokens, context: Tokens, window: int) -> Tokens:
    """Number of (query, key) pairs of each sequence: a token attends to itself and the tokens
    before it, within the window."""
    seen: Tokens = new * context + new * (new + 1) // 2
    if window:  # subtract the pairs outside the window
        beyond = np.maximum(context + new - window, 0)
        first = np.maximum(context - window, 0)
        seen = seen - (beyond * (beyond + 1) - first * (first + 1)) // 2
    return seen
