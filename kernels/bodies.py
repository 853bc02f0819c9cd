"""The one place that decides which body computes: Triton, Numba or plain torch.

Tensors on a CUDA or ROCm device go to Triton. Tensors on the CPU go to Numba; or to Triton, if its
interpreter is on (``TRITON_INTERPRET=1`` before Triton is imported) after
``CPU_TENSORS.go_to_triton(True)``, which the CUDA worker calls where it stands in for a device.

An operation that a GPU may compute in more than one way has a table of bodies, which is asked by
name when a model is loaded: attention is the only one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from kernels.meta import AttentionMeta
from kernels.reference import Variant


class CpuTensors:
    """Where tensors on the CPU are computed, in the whole process."""

    def __init__(self) -> None:
        self.are_interpreted = False

    def go_to_triton(self, asked: bool) -> None:
        """Raises ``ValueError`` if they cannot, as Triton compiles what it is given."""
        if asked and not _triton().is_interpreting():
            raise ValueError(
                "Triton compiles in this process; set TRITON_INTERPRET=1 before it starts to have "
                "tensors on the CPU interpreted"
            )
        self.are_interpreted = asked


CPU_TENSORS = CpuTensors()


def triton_for(x: torch.Tensor) -> ModuleType | None:
    """The Triton bodies if they compute on this tensor."""
    return _triton() if not x.is_cpu or CPU_TENSORS.are_interpreted else None


def _triton() -> ModuleType:
    # Only here, so that an engine on the CPU never pays for importing Triton.
    from kernels import triton

    return triton


class AttentionNeeds(NamedTuple):
    """What a model on a GPU asks of attention, as far as it is known before weights are read."""

    device: torch.device
    dtype: torch.dtype  # of queries
    cache_dtype: torch.dtype  # of keys and values
    head_dim: int
    block_size: int  # tokens of a block of the cache
    switches: frozenset[str]  # of ``SWITCHES``, those that are on in some layer

    @property
    def architecture(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability; ``None``: another maker's device. The CPU in a GPU's place
        counts as what Triton's interpreter takes it for."""
        if self.device.type == "cpu":
            return (9, 0)
        return None if torch.version.hip else torch.cuda.get_device_capability(self.device)


SWITCHES = ("window", "softcap", "sinks", "alibi", "kv_scales", "batch_invariant")


class Refusal(NamedTuple):
    """Why a body does not serve a model."""

    reason: str  # a clause
    way_out: str  # what to do instead, a clause in the imperative


class AttentionBody(Protocol):
    """One way to compute attention on a GPU."""

    can_be_recorded: bool
    """Whether a step's launches may be recorded and repeated for other sequences."""
    plans_on_host: bool
    """Whether each ``AttentionMeta`` costs the host time and needs ``host_lens``, so that the rows
    that are wanted of a step are picked behind attention and not before."""

    def paged_attention(
        self, q: torch.Tensor, kv_layer: torch.Tensor, meta: AttentionMeta, variant: Variant
    ) -> torch.Tensor:
        """See kernels.ops.paged_attention."""
        ...


def _flashinfer_attention(needs: AttentionNeeds) -> AttentionBody | Refusal:
    from kernels.flashinfer import attention_for  # which imports FlashInfer

    return attention_for(needs)


# By the name of ``attention_backend``. A body answers why not, and is made only if it serves; None
# is this package's own, by where the tensors lie: every switch, every step.
ATTENTION: dict[str, Callable[[AttentionNeeds], AttentionBody | Refusal | None]] = {
    "triton": lambda needs: None,
    "flashinfer": _flashinfer_attention,
}
