"""How a GPU's memory is shared out. Pure arithmetic; the worker measures."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """A device's memory in bytes, measured in a step as large as there can be."""

    total: int
    """Of the device."""
    loaded: int
    """Weights and the engine's tables."""
    activations: int
    """What the step took beside them, at its peak."""
    others: int
    """Other processes, and libraries of this one."""


def kv_budget(use: MemoryUse, utilization: float, *, one_request: int) -> int:
    """Bytes for the KV pool, at least those of one request of full length.

    Raises ``ConfigError`` with the numbers and the ways out if they are not left.
    """
    allowed = int(use.total * utilization)
    left = allowed - use.loaded - use.activations - use.others
    if left >= one_request:
        return left
    raise ConfigError(
        f"no GPU memory is left for the KV cache: one request of max_model_len tokens needs "
        f"{one_request / GIB:.2f} GiB. Of {use.total / GIB:.2f} GiB gpu_memory_utilization "
        f"{utilization} allows {allowed / GIB:.2f} GiB; weights and tables take "
        f"{use.loaded / GIB:.2f}, the largest step {use.activations / GIB:.2f}, other processes "
        f"and libraries {use.others / GIB:.2f}, which leaves {left / GIB:.2f} GiB. Raise "
        "gpu_memory_utilization, end other processes on the GPU, or lower max_model_len, "
        "max_num_batched_tokens or max_num_seqs"
    )


def shortage(doing: str, *, free: int, total: int) -> str:
    """What to say when memory ran out, and what can be done about it."""
    return (
        f"out of GPU memory while {doing}: {free / GIB:.2f} GiB of {total / GIB:.2f} GiB are free. "
        "End other processes on the GPU, take a smaller model, dtype or quantization, or lower "
        "max_num_batched_tokens, max_num_seqs, max_model_len or gpu_memory_utilization"
    )
