"""Modules whose products are ours: the same results, one copy of the weights, odd ones left."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts
from transformers.pytorch_utils import Conv1D

from engine.layers.packed_modules import pack_module

FLOWING = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}
NEAR = {"rtol": 2e-2, "atol": 2e-2}


class Scaled(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(3.0).to(self.weight.dtype)


class Summed(nn.Embedding):
    """Reads its table itself."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, self.weight) + self.weight.mean(0)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


class Model(nn.Module):
    """A table, linear layers of each kind, and a head that may share the table."""

    def __init__(self, table: type[nn.Embedding], is_tied: bool) -> None:
        super().__init__()
        self.table = table(70, 24)
        self.plain = nn.Linear(24, 130)
        self.turned = Conv1D(24, 130)
        self.doubled = Doubled(24, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 70, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.turned(F.gelu(self.plain(self.table(ids))))
        return self.head(self.norm(self.doubled(x)))


def make(build: Any, dtype: torch.dtype, seed: int) -> tuple[nn.Module, nn.Module]:
    """A module in a dtype, and the same in float32."""
    torch.manual_seed(seed)
    module = build().eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.2)
    module.to(dtype)
    return module, copy.deepcopy(module).float()


def held(module: nn.Module) -> int:
    """Bytes of all that a module reaches."""
    found: dict[int, int] = {}

    def look(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, (list, tuple)):
            for part in thing:
                look(part)
        elif isinstance(thing, dict):
            look(list(thing.values()))
        elif type(thing).__module__.startswith("engine"):
            look(vars(thing))

    for part in module.modules():
        look({name: value for name, value in vars(part).items() if name != "_modules"})
    return sum(found.values())


@pytest.mark.parametrize("dtype", FLOWING)
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("table", [nn.Embedding, Scaled, Summed])
@torch.inference_mode()
def test_a_module_computes_what_it_did(
    table: type[nn.Embedding], is_tied: bool, dtype: torch.dtype, seed: int
) -> None:
    module, exact = make(lambda: Model(table, is_tied), dtype, seed)
    ids = torch.tensor([[5, 0, 69, 5, 33]])
    pack_module(module, FLOWING[dtype], head=module.head, transposed=Conv1D)
    got, wanted = module(ids), exact(ids)
    assert got.shape == wanted.shape
    assert module.table(ids).dtype == FLOWING[dtype]
    allowed = 2e-2 if dtype is torch.bfloat16 else 1e-5  # float16 is widened, nothing is rounded
    assert (got.float() - wanted).norm() <= allowed * wanted.norm()
    assert isinstance(module.plain, nn.Linear) and module.plain.in_features == 24
    assert {parameter.dtype for parameter in module.parameters()} == {FLOWING[dtype]}


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_are_held_once(is_tied: bool, seed: int) -> None:
    def build() -> nn.Module:
        model = Model(nn.Embedding, is_tied)
        model.plain, model.turned = nn.Linear(512, 1024), Conv1D(1024, 512)
        model.table, model.head = nn.Embedding(640, 512), nn.Linear(512, 640, bias=False)
        if is_tied:
            model.head.weight = model.table.weight
        return model

    module, _ = make(build, torch.bfloat16, seed)
    before = held(module)
    pack_module(module, torch.bfloat16, head=module.head, transposed=Conv1D)
    assert held(module) < 1.02 * before


@pytest.mark.parametrize("name", ["plain", "turned"])
@torch.inference_mode()
def test_a_weight_read_by_other_code_is_there(name: str, seed: int) -> None:
    module, exact = make(lambda: Model(nn.Embedding, True), torch.bfloat16, seed)
    kind, shape = type(getattr(module, name)), getattr(module, name).weight.shape
    pack_module(module, torch.bfloat16, head=module.head, transposed=Conv1D)
    layer = getattr(module, name)
    assert layer.weight.shape == shape
    assert torch.equal(layer.weight.float(), getattr(exact, name).weight)
    assert type(layer) is kind
    x = torch.randn(3, layer.weight.shape[0 if kind is Conv1D else 1])
    torch.testing.assert_close(layer(x.bfloat16()).float(), getattr(exact, name)(x), **NEAR)


def config(**more: Any) -> Any:
    """What constructors of experts ask for."""
    sizes = {"num_local_experts": 6, "n_routed_experts": 6, "num_experts": 6, "hidden_size": 40}
    widths = {"intermediate_size": 24, "moe_intermediate_size": 24, "moe_latent_size": None}
    kinds = {"hidden_act": "silu", "mlp_hidden_act": "relu2", "_experts_implementation": "eager"}
    gate = {"swiglu_alpha": 1.7, "swiglu_limit": 7.0}
    return SimpleNamespace(**sizes, **widths, **kinds, **gate, **more)


@pytest.mark.parametrize("dtype", FLOWING)
@pytest.mark.parametrize("kind", [OlmoeExperts, GptOssExperts, NemotronHExperts])
@torch.inference_mode()
def test_experts(kind: Any, dtype: torch.dtype, seed: int) -> None:
    """With a gate and without, transposed with biases, some experts without a token."""
    module, exact = make(lambda: kind(config()), dtype, seed)
    pack_module(module, FLOWING[dtype], head=None, transposed=Conv1D)
    for num in (1, 2, 19):
        x, scores = torch.randn(num, 40), torch.rand(num, 6)
        weights, chosen = scores.topk(2)
        wanted = exact(x, chosen, weights)
        got = module(x.to(FLOWING[dtype]), chosen, weights.to(FLOWING[dtype]))
        assert got.dtype == FLOWING[dtype]
        allowed = 2e-2 if dtype is torch.bfloat16 else 1e-5
        assert (got.float() - wanted).norm() <= allowed * wanted.norm()
