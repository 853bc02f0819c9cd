"""How a GPU's memory is shared out. Pure arithmetic; the worker measures."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.config.gpu import FEW_RECORDED, MOST_RECORDED
from engine.errors import ConfigError

GIB = 1 << 30
GRANULE = 2 << 20
"""Bytes that torch rounds a large tensor up to."""
TRIED_GRAPHS = 4
"""Sizes that are recorded on trial, to know what all will take."""

LEAST_POOL = 20
"""Times the memory of the largest step that is to be left where steps of its size are recorded."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """A device's memory in bytes, measured in a step as large as there can be: what torch has taken
    of the device, gaps between tensors included."""

    total: int
    """Memory of the device."""
    loaded: int
    """Weights and the engine's tables."""
    activations: int
    """What the step took in addition to them, at its peak."""
    others: int
    """Other processes, and libraries of this one."""


@dataclass(frozen=True, kw_only=True)
class GraphTrial:
    """Bytes of a device that were free around the recording of a few steps on trial."""

    before: int
    """With none recorded."""
    one: int
    """With the largest recorded: the first one also has the driver load what it needs for any."""
    several: int
    """With the ``num_several`` largest recorded anew, in place of that."""
    num_several: int
    """At least one."""


def graphs_bytes(trial: GraphTrial, num_sizes: int) -> int:
    """Bytes that the graphs of this many sizes take. All graphs of a device share the memory that
    the largest needs; each further one adds what the driver keeps for it, which varies little."""
    # None may show: the driver takes memory in pieces, and other processes give some back.
    further = max(0, trial.one - trial.several)
    each = further / max(1, trial.num_several - 1)
    seen = max(0, trial.before - min(trial.one, trial.several))
    return seen + math.ceil(each * (num_sizes - trial.num_several))


def most_mixed(use: MemoryUse, utilization: float) -> int:
    """Tokens of the largest steps with chunks to record. A recorded one holds what the same step
    takes launched call by call: that is not worth much of the pool."""
    left = int(use.total * utilization) - use.loaded - use.activations - use.others
    return MOST_RECORDED if use.activations * LEAST_POOL <= left else FEW_RECORDED


def kv_budget(
    use: MemoryUse, utilization: float, *, one_request: int, graphs: int = 0, num_tensors: int = 0
) -> int:
    """Bytes for the KV pool, at least those of one request of full length. graphs: bytes that
    recorded steps will take; num_tensors: that the pool consists of, each rounded up by torch.

    Raises ``ConfigError`` with the numbers and the ways out if they are not left.
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
    """What to say when memory ran out, and what can be done about it."""
    return (
        f"out of GPU memory while {doing}: {free / GIB:.2f} GiB of {total / GIB:.2f} GiB are free. "
        "End other processes on the GPU, take a smaller model, dtype or quantization, or lower "
        "max_num_batched_tokens, max_num_seqs, max_model_len or gpu_memory_utilization, or "
        "num_kv_blocks or kv_cache_memory_bytes if they are given"
    )
