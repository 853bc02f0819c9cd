"""Options for a model that several workers compute together."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.check import check_range, check_types

MOST_RANKS = 32


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks: workers of a core that compute each step together."""

    tensor_parallel_size: int = 1
    """Ranks of a core, each a process with a part of each layer (and its own GPU, where there are
    GPUs). They share num_threads."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, MOST_RANKS, "tensor_parallel_size")
