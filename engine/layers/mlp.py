"""Gated MLPs: one, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

import kernels
from engine.layers.linear import Linear


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, H] -> [N, H]."""
        return self.down(kernels.act_mul(self.gate_up(x), self.activation))


class MixtureOfExperts:
    """Each token's best ``top_k`` experts, weighted by their softmax scores."""

    can_be_recorded = False  # the host groups the tokens by their experts

    def __init__(
        self, router: torch.Tensor, experts: Sequence[GatedMLP], top_k: int, renormalize: bool
    ) -> None:
        self.router = router  # [E, H]
        self.experts = experts
        self.top_k = top_k
        self.renormalize = renormalize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, H] -> [N, H]. Tokens are grouped by expert, so each expert runs once."""
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)  # [N * top_k], by expert
        rows = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        outputs = [
            expert(tokens)
            for expert, tokens in zip(self.experts, torch.split(x[rows], counts), strict=True)
            if len(tokens)
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, rows, weighted)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights in x's dtype, expert ids), both [N, top_k]."""
        scores = F.linear(x, self.router).softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(self.top_k)
        if self.renormalize:
            weights /= weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen
