"""Options for a model that several workers compute together."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.check import check_range, check_types
from engine.config.option import SHORT

MOST_RANKS = 32


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks: workers of a core that compute each step together."""

    tensor_parallel_size: int = field(default=1, metadata={SHORT: "-tp"})
    """Ranks of a core: processes that each have a part of every layer (and a GPU, where there are
    GPUs). They share num_threads. -tp is short for it."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, MOST_RANKS, "tensor_parallel_size")
