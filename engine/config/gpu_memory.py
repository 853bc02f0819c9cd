"""How a GPU's memory is shared out. Pure arithmetic; who measures is the worker."""

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


def kv_budget(use: MemoryUse, utilization: float) -> int:
    """Bytes for the KV pool. Raises ``ConfigError`` with the numbers if nothing is left."""
    allowed = int(use.total * utilization)
    left = allowed - use.loaded - use.activations - use.others
    if left <= 0:
        raise ConfigError(f"no GPU memory is left for the KV cache: {account(use, utilization)}")
    return left


def account(use: MemoryUse, utilization: float) -> str:
    """Where the memory goes, and what can be done about it."""
    allowed = int(use.total * utilization)
    left = allowed - use.loaded - use.activations - use.others
    return (
        f"of {use.total / GIB:.2f} GiB gpu_memory_utilization {utilization} allows "
        f"{allowed / GIB:.2f} GiB; weights and tables take {use.loaded / GIB:.2f}, the largest "
        f"step {use.activations / GIB:.2f}, other processes and libraries "
        f"{use.others / GIB:.2f}, which leaves {left / GIB:.2f} GiB. Raise "
        "gpu_memory_utilization, end other processes on the GPU, or lower "
        "max_num_batched_tokens, max_num_seqs or max_model_len"
    )


def shortage(doing: str, *, free: int, total: int) -> str:
    """What to say when memory ran out, and what can be done about it."""
    return (
        f"out of GPU memory while {doing}: {free / GIB:.2f} GiB of {total / GIB:.2f} GiB are free. "
        "End other processes on the GPU, take a smaller model, dtype or quantization, or lower "
        "max_num_batched_tokens, max_num_seqs, max_model_len or gpu_memory_utilization"
    )
