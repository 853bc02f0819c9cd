"""Options of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.check import check_kind, check_types
from engine.errors import ConfigError

MAX_GRAPH_ROWS = 512
MOST_RECORDED, FEW_RECORDED = 8192, 1024  # tokens of the largest recorded step, by free memory
# A step is padded to the next size. From some 300 tokens on padding costs as much as tokens do, so
# large sizes are at most an eighth apart.
MIXED_SIZES = (
    *(8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896),
    *range(1024, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, MOST_RECORDED + 1, 512),
)


@dataclass(frozen=True, kw_only=True)
class GPUConfig:
    """The GPU: memory, CUDA graphs, attention kernel."""

    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that the engine may use. The KV pool gets what weights and
    activations leave free."""
    enforce_eager: bool = False
    """Launch every kernel of a step separately: no CUDA graphs, and no recorded steps on a CPU."""
    cudagraph_capture_sizes: list[int] | tuple[int, ...] | None = None
    """Step sizes to record as CUDA graphs: rows of decode steps, and tokens of steps with prompts
    or drafts. Default: 1, 2 and 4 rows, then every multiple of 8 (from 256 on, of 16) up to
    max_num_seqs, at most 512; and up to 39 numbers of tokens up to max_num_batched_tokens, at most
    8192."""
    attention_backend: Literal["triton", "TRITON_ATTN"] | None = None
    """Attention kernels on a GPU. There is one backend, this project's Triton kernels; both names
    select it."""

    def __post_init__(self) -> None:
        check_types(self)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}, must be in (0, 1]"
            )
        for size in self.cudagraph_capture_sizes or ():
            check_kind("a size in cudagraph_capture_sizes", size, (int,))
            if size < 1:
                raise ConfigError(f"cudagraph_capture_sizes has {size}, must be at least 1")


def graph_sizes(config: GPUConfig, max_num_seqs: int) -> list[int]:
    """Return the batch sizes of decode steps to record as CUDA graphs, ascending. Larger batches
    run without a graph."""
    if config.enforce_eager:
        return []
    if config.cudagraph_capture_sizes is not None:
        return sorted({size for size in config.cudagraph_capture_sizes if size <= max_num_seqs})
    most = min(max_num_seqs, MAX_GRAPH_ROWS)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, MAX_GRAPH_ROWS, 16))
    return [*(size for size in steps if size < most), most]


def mixed_sizes(config: GPUConfig, max_num_tokens: int, most: int = MOST_RECORDED) -> list[int]:
    """Return the sizes, in tokens and ascending, for which mixed steps (with prompts or drafts) are
    recorded as CUDA graphs. ``most``: largest size without ``cudagraph_capture_sizes``."""
    if config.enforce_eager:
        return []
    if config.cudagraph_capture_sizes is not None:
        return sorted({size for size in config.cudagraph_capture_sizes if size <= max_num_tokens})
    most = min(max_num_tokens, most)
    return [*(size for size in MIXED_SIZES if size < most), most]
