"""Divides a GPU's memory. Pure arithmetic on what the worker measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config.gpu import FEW_RECORDED, MOST_RECORDED
from engine.errors import ConfigError

GIB = 1 << 30
GRANULE = 2 << 20
"""Torch rounds the bytes of a large tensor up to a multiple of this."""
TRIED_GRAPHS = 4
"""Number of step sizes that are recorded as CUDA graphs on trial, to estimate the memory of all
graphs."""

LEAST_POOL = 20
"""The largest step is recorded only if the KV pool is at least this many times as large as the
memory that the step needs."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """A GPU's memory use in bytes, measured in the largest possible step. Includes the gaps that
    torch's allocator leaves between tensors."""

    total: int
    """Memory of the device."""
    loaded: int
    """Weights and the engine's tables."""
    activations: int
    """Additional memory of the step at its peak."""
    others: int
    """Memory of other processes, and of libraries in this one."""


@dataclass(frozen=True, kw_only=True)
class GraphTrial:
    """Free bytes of a GPU, measured around a trial that records a few step sizes as CUDA graphs."""

    before: int
    """Before any step is recorded."""
    one: int
    """After the largest step is recorded, for which the driver also loads code that all graphs
    need."""
    several: int
    """After the ``num_several`` largest steps are recorded instead of only the largest."""
    num_several: int
    """Number of steps recorded for ``several``, at least one."""


def graphs_bytes(trial: GraphTrial, num_sizes: int) -> int:
    """Estimate the bytes that CUDA graphs for ``num_sizes`` step sizes take, from a trial with a
    few sizes. All graphs share the memory of the largest one."""
    # Differences may be negative: the driver allocates in pieces, and other processes free some.
    further = max(0, trial.one - trial.several)
    each = further / max(1, trial.num_several - 1)
    seen = max(0, trial.before - min(trial.one, trial.several))
    return seen + math.ceil(each * (num_sizes - trial.num_several))


def most_mixed(use: MemoryUse, utilization: float) -> int:
    """Return the size, in tokens, of the largest mixed step (with prompts or drafts) to record as a
    CUDA graph. It is smaller if the graph would use much of the KV pool's memory."""
    left = int(use.total * utilization) - use.loaded - use.activations - use.others
    return MOST_RECORDED if use.activations * LEAST_POOL <= left else FEW_RECORDED


def kv_budget(
    use: MemoryUse, utilization: float, *, one_request: int, graphs: int = 0, num_tensors: int = 0
) -> int:
    """Return the bytes left for the KV pool. one_request: the bytes that one request of full length
    needs.

    graphs: bytes of CUDA graphs; num_tensors: tensors of the pool, each rounded up by torch. Raises
    ``ConfigError`` if fewer than ``one_request`` bytes are left.
    """
    allowed = int(use.total * utilization)
    left = allowed - use.loaded - use.activations - graphs - use.others - num_tensors * GRANULE
    if left >= one_request:
        return left
    raise ConfigError(
        f"no GPU memory is left for the KV cache: one request of max_model_len tokens needs "
        f"{one_request / GIB:.2f} GiB. Of {use.total / GIB:.2f} GiB gpu_memory_utilization "
        f"{utilization} allows {allowed / GIB:.2f} GiB; weights and tables take "
        f"{use.loaded / GIB:.2f}, the largest step {use.activations / GIB:.2f}, recorded steps "
        f"{graphs / GIB:.2f}, other processes and libraries {use.others / GIB:.2f}, which "
        f"leaves {left / GIB:.2f} GiB. Raise gpu_memory_utilization, end other processes on the "
        "GPU, or lower max_model_len, max_num_batched_tokens or max_num_seqs"
    )


def shortage(doing: str, *, free: int, total: int) -> str:
    """Return an error message for exhausted GPU memory. ``doing``: what failed, as a clause after
    "while", such as "the weights were loaded"; ``free``, ``total``: bytes of the GPU."""
    return (
        f"out of GPU memory while {doing}: {free / GIB:.2f} GiB of {total / GIB:.2f} GiB are free. "
        "End other processes on the GPU, take a smaller model, dtype or quantization, divide the "
        "model among GPUs (tensor_parallel_size), or lower max_num_batched_tokens, max_num_seqs, "
        "max_model_len or gpu_memory_utilization, or num_kv_blocks or kv_cache_memory_bytes if "
        "they are given"
    )
