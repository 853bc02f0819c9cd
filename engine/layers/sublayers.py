"""The parts of a decoder: embedding, norms, attention, MLP, experts and output layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

import torch

import kernels
from engine.layers.adapted_linear import ExpertRows
from engine.layers.batch import Embeds, Wanted
from engine.layers.interface import Linear, Mixer
from engine.layers.linear import PlainLinear
from engine.layers.quantized_linear import packed_of
from kernels.meta import AttentionMeta, LayerMeta
from kernels.quantized import Packed, can_stack, stack


class Embedding:
    """Token embedding, scaled by ``multiplier``."""

    def __init__(
        self,
        rows: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype,
        multiplier: float = 1.0,
    ) -> None:
        self.rows = rows  # [N] -> a new [N, H]; the output layer owns a tied table
        self.dtype = dtype
        # Gemma rounds the factor to the compute dtype.
        self.multiplier = torch.tensor(multiplier, dtype=dtype).item()

    def __call__(self, input_ids: torch.Tensor, embeds: Embeds | None = None) -> torch.Tensor:
        """Vectors [N, H] of input_ids [N], scaled. ``embeds.values`` replace the rows
        ``embeds.rows``, and are not scaled."""
        x = self.rows(input_ids).to(self.dtype)
        x = x if self.multiplier == 1.0 else kernels.scale_in_place(x, self.multiplier)
        if embeds is not None:
            x[embeds.rows] = embeds.values.to(self.dtype)
        return x


class RMSNorm:
    """RMS norm: x / rms(x) * weight, or x / rms(x) * (1 + weight) with ``add_one``."""

    def __init__(self, weight: torch.Tensor, eps: float, add_one: bool = False) -> None:
        self.weight = weight  # [H]
        self.eps = eps
        self.add_one = add_one

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of the vectors x [N, H], as a new tensor."""
        return kernels.rms_norm(x, self.weight, self.eps, add_one=self.add_one)


class ResidualNorm:
    """Adds a sublayer's output to the residual stream, and normalises the sum.

    ``norm``: ``None`` if the sum is not normalised.
    """

    def __init__(self, norm: RMSNorm | None) -> None:
        self.norm = norm

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [N, H] to the residual (``None`` before the first sublayer) and normalise. Returns
        the next sublayer's input and the new residual, both [N, H]."""
        norm = self.norm
        if norm is None:
            total = x if residual is None else x + residual
            return total, total
        if residual is None:
            return norm(x), x
        return kernels.add_rms_norm(x, residual, norm.weight, norm.eps, add_one=norm.add_one)


class Attention:
    """Fused QKV projection, norm and rotation of queries and keys, attention, output projection.
    With ``gate``, the sigmoid of this projection multiplies the output of attention."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        write: Mapping[str, Any],
        attend: Mapping[str, Any],
        gate: Linear | None = None,
    ) -> None:
        """write, attend: keyword arguments for the kernels ``qkv_rope_write`` and
        ``paged_attention``."""
        self.qkv = qkv
        self.out = out
        self.write = dict(write)
        self.attend = dict(attend)
        self.gate = gate

    def __call__(
        self,
        x: torch.Tensor,
        meta: AttentionMeta,
        kv_layer: torch.Tensor,
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute the attention sublayer: x [N, H] -> [N, H], or [R, H] for the R tokens in
        ``wanted``. Writes K and V of all N tokens to ``kv_layer``."""
        write = self.write if meta.cos_sin is None else {**self.write, "cos_sin": meta.cos_sin}
        q = kernels.qkv_rope_write(self.qkv(x), kv_layer, meta, **write)
        if wanted is not None:
            q, meta = q[wanted.rows], wanted.attn
        y = kernels.paged_attention(q, kv_layer, meta, **self.attend)
        if (both := meta.both_ways) is not None:
            attend = {**self.attend, "causal": False}
            y[both.rows] = kernels.paged_attention(q[both.rows], kv_layer, both.attn, **attend)
        if self.gate is not None:
            gate = self.gate(x if wanted is None else x[wanted.rows])
            y = kernels.apply_gate(y, gate, "sigmoid")
        return self.out(y)


class ParallelMixers:
    """Mixers of one layer that have the same input and whose outputs are added."""

    def __init__(self, mixers: Sequence[Mixer]) -> None:
        self.mixers = mixers

    def __call__(
        self,
        x: torch.Tensor,
        metas: Sequence[LayerMeta],
        caches: Sequence[Any],
        wanted: Wanted | None = None,
    ) -> torch.Tensor:
        """Compute all mixers; see ``Mixer``. metas, caches: one for each mixer."""
        parts = zip(self.mixers, metas, caches, strict=True)
        return reduce(
            kernels.add_in_place, (mixer(x, meta, cache, wanted) for mixer, meta, cache in parts)
        )


class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up fused in one matrix."""

    def __init__(self, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        gated = getattr(self.gate_up, "gated", None)  # product and activation in one pass
        hidden = gated and gated(x, self.activation)
        if hidden is None:
            hidden = kernels.act_mul(self.gate_up(x), self.activation)
        return self.down(hidden)


class PlainMLP:
    """down(relu(up(x)) ** 2), an MLP without a gate."""

    def __init__(self, up: Linear, down: Linear) -> None:
        self.up = up
        self.down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        return self.down(kernels.relu_squared(self.up(x)))


class Routing(Protocol):
    """How a router chooses experts; see ``engine.models.spec.MoESpec``."""

    @property
    def top_k(self) -> int: ...
    @property
    def renormalize(self) -> bool: ...
    @property
    def renormalize_eps(self) -> float: ...
    @property
    def scoring(self) -> str: ...
    @property
    def scale(self) -> float: ...


class MixtureOfExperts:
    """Mixture of the ``top_k`` experts with the largest scores, weighted by these scores."""

    can_be_recorded = False  # the host groups the tokens by expert

    def __init__(
        self,
        router: Linear,
        experts: Sequence[GatedMLP | PlainMLP],
        routing: Routing,
        bias: torch.Tensor | None = None,
        adapted: ExpertRows | None = None,
    ) -> None:
        """router: H -> E; bias: [E] float32, added to the scores only to choose experts; adapted:
        tells experts that take adapters which rows they compute."""
        self.router = router
        self.experts = experts
        self.routing = routing
        self.top_k = routing.top_k
        self.bias = bias
        self.adapted = adapted

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Mixture of experts: x [N, H] -> [N, H]. Each expert runs once, on all its tokens."""
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)  # [N * top_k], by expert
        rows = order // self.top_k
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        if self.adapted is not None:
            self.adapted.begin(len(x))
        outputs = [
            self._output(expert, x, mine)
            for expert, mine in zip(self.experts, torch.split(rows, counts), strict=True)
            if len(mine)
        ]
        # Sum in float32 and round once.
        weighted = torch.cat(outputs).float() * weights.float().flatten()[order, None]
        return torch.zeros_like(x, dtype=torch.float32).index_add_(0, rows, weighted).to(x.dtype)

    def _output(
        self, expert: GatedMLP | PlainMLP, x: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Outputs of an expert for rows [T] of x."""
        if self.adapted is not None:
            self.adapted.choose(rows)
        return expert(x[rows])

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts for x [N, H]. Returns their weights and their ids, both [N, top_k]."""
        logits, routing = self.router(x), self.routing
        if routing.scoring == "sigmoid":
            scores = logits.float().sigmoid()
        else:
            scores = logits.softmax(-1, dtype=torch.float32)
        if self.bias is None:
            weights, chosen = scores.topk(self.top_k)
        else:
            chosen = (scores + self.bias).topk(self.top_k).indices
            weights = scores.gather(-1, chosen)
        if routing.renormalize:
            weights /= weights.sum(-1, keepdim=True) + routing.renormalize_eps
        if routing.scale != 1.0:
            weights *= routing.scale
        return weights.to(x.dtype), chosen


class GroupedExperts:
    """A mixture of experts whose weights are stacked in one tensor, for grouped GPU kernels."""

    can_be_recorded = True

    def __init__(self, mixture: MixtureOfExperts) -> None:
        """Take the experts' weights out of ``mixture``, which must satisfy ``can_be_grouped``."""
        experts = [expert for expert in mixture.experts if isinstance(expert, GatedMLP)]
        mixture.experts = ()
        self._route = mixture.route
        self._activation = experts[0].activation
        self._gate_up = together([expert.gate_up for expert in experts])  # [E, 2F, H]
        self._down = together([expert.down for expert in experts])  # [E, H, F]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        weights, chosen = self._route(x)
        return kernels.mixture(
            x, self._gate_up, self._down, chosen.int(), weights.float(), self._activation
        )


class WithSharedExpert:
    """A mixture of experts, plus an expert that all tokens use, weighted by the sigmoid of its gate
    if it has one."""

    def __init__(
        self,
        routed: MixtureOfExperts | GroupedExperts,
        shared: GatedMLP | PlainMLP,
        gate: Linear | None,
    ) -> None:
        self.routed = routed
        self.shared = shared
        self.gate = gate  # H -> 1

    @property
    def can_be_recorded(self) -> bool:
        return self.routed.can_be_recorded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, H] -> [N, H]."""
        shared = self.shared(x)
        if self.gate is not None:
            shared = kernels.apply_gate(shared, self.gate(x), "sigmoid")
        return self.routed(x) + shared


def can_be_grouped(mixture: MixtureOfExperts) -> bool:
    """True if all experts have gates, none has a bias, and all have the same kind of weights, plain
    or packed."""
    return all(isinstance(expert, GatedMLP) for expert in mixture.experts) and all(
        can_be_together([getattr(expert, place) for expert in mixture.experts])
        for place in ("gate_up", "down")
    )


def can_be_together(linears: Sequence[Linear]) -> bool:
    if all(isinstance(linear, PlainLinear) and linear.bias is None for linear in linears):
        return True
    packed = list(map(packed_of, linears))
    return None not in packed and can_stack([one for one in packed if one is not None])


def together(linears: Sequence[Linear]) -> torch.Tensor | Packed:
    """Stack the weights of layers that satisfy ``can_be_together`` into one tensor."""
    packed = [one for one in map(packed_of, linears) if one is not None]
    if packed:
        return stack(packed)
    return torch.stack([linear.weight for linear in linears if isinstance(linear, PlainLinear)])


class OutputLayer:
    """Logits over the vocabulary: scaled, then capped as cap * tanh(logit / cap)."""

    def __init__(self, linear: Linear, multiplier: float = 1.0, softcap: float = 0.0) -> None:
        self.linear = linear
        self.multiplier = multiplier
        self.softcap = softcap

    @property
    def has_largest(self) -> bool:
        """True if this layer can find the largest logits without storing all logits."""
        return self.multiplier == 1.0 and not self.softcap and hasattr(self.linear, "largest")

    def largest(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """The token with the largest logit of each row, [R] int32, -1 for rows with invalid logits;
        ``None`` if this layer can only find it by computing the logits."""
        largest = getattr(self.linear, "largest", None)
        if largest is None or not self.has_largest:
            return None
        found: torch.Tensor | None = largest(hidden)
        return found

    def part(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The logits [R, W] of the tokens of this rank; all if it is alone."""
        return self(hidden, out)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden [R, H] -> logits [R, V] float32, written to ``out`` if given."""
        scores = self.linear(hidden)
        scores = scores.float() if out is None else out.copy_(scores)
        if self.multiplier != 1.0:
            scores = kernels.scale_in_place(scores, self.multiplier)
        if self.softcap:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores
