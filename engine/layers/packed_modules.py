"""Layers of a torch module whose products are ours: weights packed once, the module's own freed.

A layer keeps its identity and its place in the module, and becomes of another class. It stays as it
was where that might not do: a subclass of ``nn.Linear`` may compute something else, a weight may be
shared with more than embeddings, an embedding may do more with its table than read rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from engine.layers.interface import Linear
from engine.layers.linear import make_linear

PACKED = (torch.bfloat16, torch.float16)  # torch's product of float32 is no slower than ours
NUM_TRIED = 8  # rows of a table by which an embedding is tried

Rows = Callable[[torch.Tensor], torch.Tensor]
"""[N] -> [N, in], rows of a weight."""


def pack_module(
    root: nn.Module, dtype: torch.dtype, *, head: nn.Module | None, transposed: type[nn.Module]
) -> None:
    """Have a module's products of bfloat16 and float16 weights on the CPU computed by ours, layer
    by layer. What the layers keep for torch is copied, so that no file stays mapped for it.

    dtype: that of values between layers; what stays torch's and is float16 becomes that. head: the
    layer of the scores, which stay as they were summed, in float32. transposed: the class of linear
    layers whose weight is [in, out].
    """
    modules = list(root.modules())
    owners: dict[int, list[nn.Module]] = {}  # of a parameter, by its identity
    for module in modules:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for module in modules:
        if type(module) in (nn.Linear, transposed) and module.weight.dtype in PACKED:
            tables = [other for other in owners[id(module.weight)] if other is not module]
            if all(can_read_rows(table, dtype) for table in tables):
                product = pack_linear(module, keeps_float32=module is head)
                for table in tables:
                    read_rows(table, product.rows, dtype)
        elif is_experts(module):
            pack_experts(module)
    for module in modules:
        take_over(module, dtype)


class PackedLinear(nn.Linear):
    """``nn.Linear`` with our product."""

    product: Linear
    origin: type[nn.Module]
    """The class it was of."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        y = self.product(input.reshape(-1, input.shape[-1]))
        return y.view(*input.shape[:-1], y.shape[-1])

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """Read by code around the layer: it becomes what it was, with a plain weight of its own."""
        weight = self.product.rows(torch.arange(self.product.out_features))
        if weight.dtype is torch.float16:
            weight = weight.float()
        if self.origin is not nn.Linear:
            weight = weight.T
        del self.product
        self.__class__ = self.origin  # type: ignore[assignment]
        parameter = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("weight", parameter)
        return parameter


def pack_linear(layer: Any, *, keeps_float32: bool) -> Linear:
    """Have a layer compute our product, which is returned."""
    weight, bias = layer.weight.detach(), layer.bias
    if type(layer) is not nn.Linear:
        weight = weight.T.contiguous()
    bias = None if bias is None else bias.detach()
    product = make_linear(weight, bias, keeps_float32=keeps_float32)
    del layer.weight
    layer.product, layer.origin = product, type(layer)
    layer.__class__ = PackedLinear
    return product


class RowsEmbedding(nn.Embedding):
    """A table whose rows are elsewhere. Its weight tells a size, a dtype and a device, no values:
    they are NaN."""

    rows: Rows

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., H]"""
        rows = self.rows(input.flatten()).to(self.weight.dtype)
        return rows.view(*input.shape, self.embedding_dim)


def read_rows(table: Any, rows: Rows, dtype: torch.dtype) -> None:
    """Have an embedding read its rows by a function, as `dtype`, and forget its table."""
    origin = type(table)
    # A subclass, which may scale what nn.Embedding gives it, is given rows in the place of that.
    bases = (RowsEmbedding,) if origin is nn.Embedding else (origin, RowsEmbedding)
    table.__class__ = type(origin.__name__, bases, {})
    nowhere = torch.full((), torch.nan, dtype=dtype, device=table.weight.device)
    table.weight = nn.Parameter(nowhere.expand(table.weight.shape), requires_grad=False)
    table.rows = rows


def can_read_rows(table: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a module gives what it gave if it reads rows by a function: a copy of it tries."""
    if not isinstance(table, nn.Embedding) or table.max_norm is not None:
        return False
    ids = torch.arange(min(NUM_TRIED, table.num_embeddings))
    wanted, trial = table(ids), copy.copy(table)
    trial._parameters = dict(table._parameters)
    read_rows(trial, partial(F.embedding, weight=table.weight.detach()), dtype)
    return torch.allclose(trial(ids).float(), wanted.float(), rtol=1e-2)


def take_over(module: nn.Module, dtype: torch.dtype) -> None:
    """Copy what a module itself still holds, float16 as `dtype`, but for tables: their rows become
    that when they are read."""
    if isinstance(module, RowsEmbedding):
        return
    weight = module.weight.detach() if isinstance(module, nn.Embedding) else None
    if weight is not None and weight.dtype != dtype and can_read_rows(module, dtype):
        read_rows(module, partial(F.embedding, weight=weight.clone()), dtype)
        return
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        is_half = tensor.dtype is torch.float16
        tensor.data = tensor.data.to(dtype if is_half else tensor.dtype, copy=True)


class PackedExperts(nn.Module):
    """Experts of a mixture as transformers holds them, with our products."""

    num_experts: int
    ups: list[Linear]
    """Weights of each expert: the gate and up projections as one, or the latter alone."""
    downs: list[Linear]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states: [N, H]; top_k_index, top_k_weights: [N, K] -> [N, H]. An index past the
        last expert stands for none."""
        experts: Any = self
        num_tokens, top_k = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=self.num_experts).tolist()
        counts = counts[: self.num_experts]
        rows = hidden_states[order[: sum(counts)] // top_k]
        rows = _products(self.ups, rows, counts)
        rows = experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)
        rows = _products(self.downs, rows, counts)
        if experts.has_post_expert_norm:
            rows = experts.post_expert_norm(rows)
        outputs = hidden_states.new_zeros(num_tokens * top_k, rows.shape[-1])
        outputs[order[: len(rows)]] = rows
        weighted = outputs.view(num_tokens, top_k, -1) * top_k_weights[..., None]
        return weighted.sum(dim=1).to(hidden_states.dtype)


def _products(layers: list[Linear], rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """rows: [S, in], those of the first expert first, `counts` of each -> [S, out]."""
    parts = torch.split(rows, counts)
    made = [layer(part) for layer, part in zip(layers, parts, strict=True) if len(part)]
    return torch.cat(made)


def is_experts(module: nn.Module) -> bool:
    """Whether it is experts in the form that transformers' own functions for them take."""
    needed = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
    if not all(hasattr(module, name) for name in needed) or module._is_expert_parallel:
        return False
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    weights = [getattr(module, name, None) for name in names]
    return all(
        isinstance(weight, nn.Parameter) and weight.dim() == 3 and weight.dtype in PACKED
        for weight in weights
    )


def pack_experts(experts: Any) -> None:
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    experts.ups = _packed_stack(experts, up)
    experts.downs = _packed_stack(experts, "down_proj")
    origin = type(experts)
    experts.__class__ = type(origin.__name__, (PackedExperts, origin), {})


def _packed_stack(experts: Any, name: str) -> list[Linear]:
    """Products of a weight [E, out, in] or, transposed, [E, in, out], which is forgotten."""
    weights = getattr(experts, name).detach()
    biases = (
        getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * len(weights)
    )
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    delattr(experts, name)
    return [
        make_linear(weight.contiguous(), bias) for weight, bias in zip(weights, biases, strict=True)
    ]
