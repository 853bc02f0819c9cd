"""RMS norms on the residual stream."""

from __future__ import annotations

import torch

import kernels


class RMSNorm:
    """x / rms(x) * weight; ``add_one``: stored weights are offsets from one."""

    def __init__(self, weight: torch.Tensor, eps: float, add_one: bool = False) -> None:
        self.weight = weight  # [H]
        self.eps = eps
        self.add_one = add_one

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, H] -> a new [N, H]."""
        return kernels.rms_norm(x, self.weight, self.eps, add_one=self.add_one)


class ResidualNorm:
    """Closes the sublayer before and opens the next: adds to the residual stream, then normalises.

    Without a norm, only the addition is done. A stream begins with ``residual`` of ``None``.
    """

    def __init__(self, norm: RMSNorm | None) -> None:
        self.norm = norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [N, H] -> (input of the next sublayer, residual stream)."""
        norm = self.norm
        if norm is None:
            total = x if residual is None else x + residual
            return total, total
        if residual is None:
            return norm(x), x
        return kernels.add_rms_norm(x, residual, norm.weight, norm.eps, add_one=norm.add_one)
