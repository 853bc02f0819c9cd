"""Makes the linear layers, experts and embeddings of a torch module use our CPU kernels.

Weights are packed and the originals freed; each layer object stays the same, but changes its class.
Layers whose results might change are left as they are: subclasses of ``nn.Linear``, layers that
share their weight with anything but an embedding, and embeddings that do more than look up rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from engine.layers.interface import Linear
from engine.layers.linear import make_linear
from engine.layers.quantized import Weight

PACKED = (torch.bfloat16, torch.float16)  # torch's float32 product is as fast as ours
NUM_TRIED = 8  # table rows compared in the check of an embedding

Make = Callable[[Weight, torch.Tensor | None], Linear]
"""A function that makes a layer of a weight and a bias."""
Rows = Callable[[torch.Tensor], torch.Tensor]
"""A function that reads rows of a weight: indices [N] -> [N, in]."""


def pack_module(
    root: nn.Module, dtype: torch.dtype, *, head: nn.Module | None, transposed: type[nn.Module]
) -> None:
    """Make a module's linear layers and experts with bfloat16 or float16 weights use our CPU
    kernels, and copy all other tensors, so that no checkpoint file stays memory-mapped.

    dtype: of activations; other float16 tensors are converted to it. head: the output layer, which
    then returns float32. transposed: the class of linear layers with weights [in, out].
    """
    modules = list(root.modules())
    owners = owners_of_parameters(root)
    for module in modules:
        if type(module) in (nn.Linear, transposed) and module.weight.dtype in PACKED:
            tables = [other for other in owners[id(module.weight)] if other is not module]
            if all(can_read_rows(table, dtype) for table in tables):
                product = pack_linear(module, keeps_float32=module is head)
                for table in tables:
                    read_rows(table, product.rows, dtype)
        elif is_experts(module) and module.down_proj.dtype in PACKED:
            pack_experts(module)
    for module in modules:
        take_over(module, dtype)


def owners_of_parameters(root: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that have each parameter, by its ``id()``."""
    owners: dict[int, list[nn.Module]] = {}
    for module in root.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    return owners


class PackedLinear(nn.Linear):
    """``nn.Linear`` computed by our CPU kernel."""

    product: Linear
    origin: type[nn.Module]
    """The original class."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in] -> [..., out]"""
        y = self.product(input.reshape(-1, input.shape[-1]))
        return y.view(*input.shape[:-1], y.shape[-1])

    @property
    def weight(self) -> Any:  # type: ignore[override]
        """The unpacked weight. Reading it changes the layer back to its original class."""
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
    """Make ``layer`` a ``PackedLinear``. Returns its ``product``, which has the packed weight."""
    weight, bias = layer.weight.detach(), layer.bias
    if type(layer) is not nn.Linear:
        weight = weight.T.contiguous()
    bias = None if bias is None else bias.detach()
    product = make_linear(weight, bias, keeps_float32=keeps_float32)
    use_product(layer, product)
    return product


def use_product(layer: Any, product: Linear) -> None:
    """Make ``layer`` a ``PackedLinear`` that is computed by ``product``, and drop its weight."""
    del layer.weight
    layer.product, layer.origin = product, type(layer)
    layer.__class__ = PackedLinear


class RowsEmbedding(nn.Embedding):
    """An embedding that gets its vectors from the function ``rows``. Its weight has the original
    shape and device, but contains only NaN."""

    rows: Rows

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up the vectors [..., H] of token ids [...]."""
        rows = self.rows(input.flatten()).to(self.weight.dtype)
        return rows.view(*input.shape, self.embedding_dim)


def read_rows(table: Any, rows: Rows, dtype: torch.dtype) -> None:
    """Make an embedding get its vectors from ``rows``, in dtype `dtype`, and drop its own table."""
    origin = type(table)
    # A subclass may scale the rows that nn.Embedding returns, so it inherits from RowsEmbedding,
    # too.
    bases = (RowsEmbedding,) if origin is nn.Embedding else (origin, RowsEmbedding)
    table.__class__ = type(origin.__name__, bases, {})
    nowhere = torch.full((), torch.nan, dtype=dtype, device=table.weight.device)
    table.weight = nn.Parameter(nowhere.expand(table.weight.shape), requires_grad=False)
    table.rows = rows


def can_read_rows(table: nn.Module, dtype: torch.dtype) -> bool:
    """True if the module is an embedding that only looks up rows of its table, tried on a copy."""
    if not isinstance(table, nn.Embedding) or table.max_norm is not None:
        return False
    ids = torch.arange(min(NUM_TRIED, table.num_embeddings))
    wanted, trial = table(ids), copy.copy(table)
    trial._parameters = dict(table._parameters)
    read_rows(trial, partial(F.embedding, weight=table.weight.detach()), dtype)
    return torch.allclose(trial(ids).float(), wanted.float(), rtol=1e-2)


def take_over(module: nn.Module, dtype: torch.dtype) -> None:
    """Copy a module's tensors out of the checkpoint file, float16 tensors as `dtype`. An
    embedding's rows are only converted when they are looked up, if ``can_read_rows``."""
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
    """The experts module of transformers, computed by our CPU kernels."""

    num_experts: int
    ups: list[Linear]
    """For each expert, gate and up projections as one layer, or only the up projection."""
    downs: list[Linear]

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states [N, H]; top_k_index, top_k_weights [N, K] -> [N, H]. Indices of
        ``num_experts`` or more are ignored."""
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
    """Apply each expert's layer to its tokens. rows [S, in]: sorted by expert, ``counts[e]`` rows
    for expert e. Returns [S, out]."""
    parts = torch.split(rows, counts)
    made = [layer(part) for layer, part in zip(layers, parts, strict=True) if len(part)]
    return torch.cat(made)


def is_experts(module: nn.Module) -> bool:
    """True for an experts module with the interface of transformers' experts functions."""
    needed = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm")
    if not all(hasattr(module, name) for name in needed) or module._is_expert_parallel:
        return False
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    weights = [getattr(module, name, None) for name in names]
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def pack_experts(experts: Any) -> None:
    """Make an experts module use our kernels, with the weights that it has."""
    up, down = _weight_names(experts)
    pack_stored_experts(experts, {up: _matrices(experts, up), down: _matrices(experts, down)})


def pack_stored_experts(
    experts: Any, weights: Mapping[str, Iterable[Weight]], make: Make = make_linear
) -> None:
    """Make an experts module use our kernels. weights: the matrix [out, in] of each expert, for
    each of the module's stacked weights by name. The stacked weights are deleted. make: makes a
    layer of a weight and a bias."""
    up, down = _weight_names(experts)
    experts.ups = _packed_stack(experts, up, weights[up], make)
    experts.downs = _packed_stack(experts, down, weights[down], make)
    origin = type(experts)
    experts.__class__ = type(origin.__name__, (PackedExperts, origin), {})


def _weight_names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _matrices(experts: Any, name: str) -> Iterator[torch.Tensor]:
    """The matrix [out, in] of each expert from the stacked weight ``name``, [E, out, in], or
    [E, in, out] if transposed."""
    for weight in getattr(experts, name).detach():
        yield (weight.T if experts.is_transposed else weight).contiguous()


def _packed_stack(experts: Any, name: str, weights: Iterable[Weight], make: Make) -> list[Linear]:
    """Make a layer for each expert from its matrix in ``weights``, and delete the stacked weight
    ``name``."""
    count = len(getattr(experts, name))
    biases = getattr(experts, f"{name}_bias").detach() if experts.has_bias else [None] * count
    layers = [make(weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    delattr(experts, name)
    return layers
