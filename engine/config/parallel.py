"""Options for a model that several workers compute together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from engine.config.check import check_kind, check_range, check_types
from engine.config.option import SHORT
from engine.errors import ConfigError

MOST_RANKS = 32
ExecutorBackend = Literal["mp", "ray"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Ranks: workers of a core that compute each step together."""

    tensor_parallel_size: int = field(default=1, metadata={SHORT: "-tp"})
    """Ranks of a core: processes that each have a part of every layer (and a GPU, where there are
    GPUs). They share num_threads. -tp is short for it."""
    pipeline_parallel_size: int = field(default=1, metadata={SHORT: "-pp"})
    """Stages of a core: processes that each have some of the layers (and a GPU, where there are
    GPUs), and compute successive steps at the same time. With tensor_parallel_size, each stage has
    that many ranks. -pp is short for it."""
    pipeline_layer_split: list[int] | tuple[int, ...] | None = None
    """Layers of each stage, such as 15 17. Default: about the same bytes of weights in each."""
    distributed_executor_backend: ExecutorBackend = "mp"
    """Where these ranks run. mp: on this machine. ray: on the nodes of the Ray cluster that this
    machine belongs to, as few as possible, with rank 0 here."""

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, 1, MOST_RANKS, "tensor_parallel_size", "pipeline_parallel_size")
        if self.num_workers > MOST_RANKS:
            raise ConfigError(
                f"tensor_parallel_size is {self.tensor_parallel_size} and pipeline_parallel_size "
                f"is {self.pipeline_parallel_size}: {self.num_workers} ranks, at most {MOST_RANKS} "
                "are possible; lower one of the two"
            )
        self._check_split()

    @property
    def num_workers(self) -> int:
        """Ranks of a core, in all stages together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sizes(self) -> str:
        """The options that say how many ranks there are, for messages."""
        tensor, stages = self.tensor_parallel_size, self.pipeline_parallel_size
        if stages == 1:
            return f"tensor_parallel_size is {tensor}"
        both = f"tensor_parallel_size is {tensor} and " if tensor > 1 else ""
        return f"{both}pipeline_parallel_size is {stages}"

    def _check_split(self) -> None:
        """Raise ``ConfigError`` for numbers of layers that are not those of stages."""
        split = self.pipeline_layer_split
        if split is None:
            return
        for number in split:
            check_kind("a number in pipeline_layer_split", number, (int,))
            if number < 1:
                raise ConfigError(f"pipeline_layer_split has {number}, must be at least 1")
        if len(split) != self.pipeline_parallel_size:
            raise ConfigError(
                f"pipeline_layer_split is {list(split)} and pipeline_parallel_size is "
                f"{self.pipeline_parallel_size}: give one number of layers for each stage, or "
                "leave pipeline_layer_split out"
            )
