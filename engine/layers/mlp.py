"""Gated MLPs: one, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

import kernels
from engine.layers.adapted import Linear
from engine.layers.linear import PlainLinear


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


class GroupedExperts:
    """A mixture whose experts lie in one tensor, so that one product on a GPU computes them all."""

    can_be_recorded = True

    def __init__(self, mixture: MixtureOfExperts) -> None:
        """Takes the weights over; the mixture keeps its router alone. See ``can_be_grouped``."""
        experts, mixture.experts = mixture.experts, ()
        self._route = mixture.route
        self._activation = experts[0].activation
        self._gate_up = _stacked([expert.gate_up for expert in experts])  # [E, 2F, H]
        self._down = _stacked([expert.down for expert in experts])  # [E, H, F]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, H] -> [N, H]."""
        weights, chosen = self._route(x)
        return kernels.mixture(
            x, self._gate_up, self._down, chosen.int(), weights.float(), self._activation
        )


def can_be_grouped(mixture: MixtureOfExperts) -> bool:
    """Whether all its weights are plain ones without biases."""
    return all(
        isinstance(linear, PlainLinear) and linear.bias is None
        for expert in mixture.experts
        for linear in (expert.gate_up, expert.down)
    )


def _stacked(linears: Sequence[Linear]) -> torch.Tensor:
    return torch.stack([linear.weight for linear in linears if isinstance(linear, PlainLinear)])
