"""Adapters placed on decoders: the layers change as those of a model into which the adapter was
merged before it was loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.tiny_models import TinyModels
from support import adapter_files

from engine.config.model import read_model_info
from engine.lora.adapter import AdapterError
from engine.lora.files import adapter_of
from engine.lora.placing import EMBED, HEAD, PlacedAdapter, Places, place
from engine.models.load import native_spec
from engine.models.spec import DecoderSpec
from engine.models.targets import targets

Tensors = dict[str, torch.Tensor]
NAMES = [
    "llama",
    "llama-mha-tied-biased",
    "phi3",
    "mixtral",
    "qwen3-moe-mixed",
    "gemma3",
    "lfm2-moe",
    "granite-hybrid-moe",
    "falcon-h1",
    "nemotron-h",
    "jamba-moe",
    "mamba2",
    "qwen3-next",
    "qwen3.5",
]
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


def spec_of(path: Path) -> DecoderSpec:
    spec = native_spec(read_model_info(path))
    assert spec is not None
    return spec


def filled(spec: DecoderSpec, state: Tensors) -> Tensors:
    """The tensors of a decoder from those of a checkpoint, in float64."""
    found = {}
    for target in targets(spec):
        way = next((w for w in target.ways if all(part.name in state for part in w)), None)
        if way is None:
            continue  # experts of a family whose checkpoints name them otherwise
        parts = [state[p.name].reshape(-1)[p.start : p.start + p.size].double() for p in way]
        whole = torch.cat(parts).view(target.shape)
        factors = spec.factors.get(target.name.rpartition(".")[2])
        if factors is not None and whole.dim() == 2:
            counts = torch.tensor([factor.num_rows for factor in factors])
            weights = torch.tensor([factor.of_weight for factor in factors])
            whole = whole * weights.repeat_interleave(counts)[:, None]
        found[target.name] = whole
    return found


def changed(base: Tensors, placed: PlacedAdapter) -> Tensors:
    """The tensors of a decoder with the products of a placed adapter."""
    made = dict(base)
    if HEAD not in made:
        made[HEAD] = made[EMBED]
    for target, slices in placed.linears.items():
        weight = made[target].clone()
        for one in slices:
            rows = weight[one.first : one.first + len(one.b)]
            rows += one.scale * (one.b.double() @ one.a.double())
            if one.magnitude is not None:
                rows *= (one.magnitude.double() / rows.norm(dim=1))[:, None]
        made[target] = weight
    if (table := placed.embedding) is not None:
        made[EMBED] = made[EMBED] + table.scale * (table.b.double() @ table.a.double()).T
    return {**made, **{name: whole.double() for name, whole in placed.replaced.items()}}


@pytest.mark.parametrize("name", NAMES)
def test_every_linear_module(tiny_models: TinyModels, name: str) -> None:
    """Also those that a decoder fuses with others, reorders or multiplies by factors."""
    model, spec = tiny_models.reference(name), spec_of(tiny_models.path(name))
    linears = [p for p, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    stacked = [p for p, _ in model.named_parameters() if p.endswith(EXPERTS)]
    use_dora = name in ("falcon-h1", "qwen3-next")
    if use_dora:
        stacked = []
    targeted = {"target_modules": linears, "target_parameters": stacked, "use_dora": use_dora}
    made = adapter_files.random_tensors(model, linears, stacked, use_dora=use_dora)
    adapter = adapter_of(made, adapter_files.config_of(**targeted), "one")
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    if spec.tied:  # an adapter of the output layer leaves the embedding as it is
        state.pop("lm_head.weight")
        adapter.modules.pop("lm_head", None)
    expected = filled(spec, adapter_files.merged(state, adapter))
    found = changed(filled(spec, state), place(adapter, Places(spec)))
    for target, tensor in expected.items():
        torch.testing.assert_close(found[target], tensor, rtol=1e-5, atol=1e-5, msg=target)
    assert sum(not torch.equal(found[t], filled(spec, state)[t]) for t in expected) > 3


@pytest.mark.parametrize(
    ("name", "block", "parts"),
    [
        ("mixtral", "block_sparse_moe", ("w1", "w3", "w2")),
        ("qwen3-moe", "mlp", ("gate_proj", "up_proj", "down_proj")),
    ],
)
def test_experts_in_modules_of_their_own(
    tiny_models: TinyModels, name: str, block: str, parts: tuple[str, ...]
) -> None:
    """Names of transformers 4."""
    model, spec = tiny_models.reference(name), spec_of(tiny_models.path(name))
    state = {key: tensor.detach().clone() for key, tensor in model.state_dict().items()}
    gate_up, down = (state[f"model.layers.1.mlp.experts.{p}_proj"] for p in ("gate_up", "down"))
    wholes = dict(zip(parts, (*gate_up[2].chunk(2), down[2]), strict=True))
    made: Tensors = {}
    for part, weight in wholes.items():
        path = f"model.layers.1.{block}.experts.2.{part}"
        made |= adapter_files.product(path, outs=len(weight), ins=weight.shape[1])
    adapter = adapter_of(made, adapter_files.config_of(target_modules=list(parts)), "one")
    for weight, one in zip(wholes.values(), adapter.modules.values(), strict=True):
        weight += one.scale * (one.b @ one.a)
    base = filled(spec, model.state_dict())
    found, expected = changed(base, place(adapter, Places(spec))), filled(spec, state)
    for target, tensor in expected.items():
        torch.testing.assert_close(found[target], tensor, rtol=1e-5, atol=1e-5, msg=target)
    assert not torch.equal(found["1.2.down"], base["1.2.down"])


@pytest.mark.parametrize("name", ["llama", "llama-mha-tied-biased"])
@pytest.mark.parametrize("ties", [False, True])
def test_embeddings_and_output_layers(tiny_models: TinyModels, name: str, ties: bool) -> None:
    spec, (vocab, hidden) = spec_of(tiny_models.path(name)), (300, 64)
    base = filled(spec, tiny_models.reference(name).state_dict())
    table = {
        "model.embed_tokens.lora_embedding_A": torch.randn(4, vocab),
        "model.embed_tokens.lora_embedding_B": torch.randn(hidden, 4),
    }
    options: dict[str, Any] = {"target_modules": ["embed_tokens"], "ensure_weight_tying": ties}
    adapter = adapter_of(table, adapter_files.config_of(**options), "one")
    found = changed(base, place(adapter, Places(spec)))
    a, b = (tensor.double() for tensor in table.values())
    delta = 2.0 * (b @ a).T
    torch.testing.assert_close(found[EMBED], base[EMBED] + delta)
    is_head_changed = ties and spec.tied
    head = base.get(HEAD, base[EMBED])
    torch.testing.assert_close(found[HEAD], head + delta if is_head_changed else head)
    whole = {"model.embed_tokens.weight": torch.randn(vocab, hidden)}
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": ties}
    adapter = adapter_of(whole, adapter_files.config_of(**options), "one")
    placed = place(adapter, Places(spec))
    assert set(placed.replaced) == ({EMBED, HEAD} if is_head_changed else {EMBED})


def test_adapters_of_other_models(tiny_models: TinyModels) -> None:
    places = Places(spec_of(tiny_models.path("llama")))
    q = "model.layers.0.self_attn.q_proj"

    def refusal(tensors: Tensors, **options: Any) -> str:
        adapter = adapter_of(tensors, adapter_files.config_of(**options), "one")
        with pytest.raises(AdapterError) as caught:
            place(adapter, places)
        words = str(caught.value)
        assert words.startswith("adapter 'one': ")
        assert words.endswith("(it was trained on somewhere/base)")
        return words

    everything = {"target_modules": "all-linear"}
    for made, options, expected in (
        (
            adapter_files.product(q, outs=64, ins=96),
            {},
            f"its product for {q} has the shape [64, 96], the base model has [64, 64] there",
        ),
        (
            adapter_files.product("model.layers.0.self_attn.qkv", outs=64, ins=64),
            everything,
            "which the base model does not have; the base model has "
            "model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj",
        ),
        (
            adapter_files.product("model.layers.7.self_attn.q_proj", outs=64, ins=64),
            {},
            "model.layers.7.self_attn.q_proj, which the base model does not have",
        ),
        (
            adapter_files.product("model.norm", outs=64, ins=64),
            everything,
            "model.norm, which is not a linear module in the base model",
        ),
        (
            {"model.norm.weight": torch.ones(64)},
            {"modules_to_save": ["norm"]},
            "it replaces model.norm.weight (modules_to_save); only the embedding and the output",
        ),
        (
            {"lm_head.weight": torch.ones(301, 64)},
            {"modules_to_save": ["lm_head"]},
            "lm_head.weight has the shape [301, 64], the base model's has [300, 64]",
        ),
    ):
        assert expected in refusal(made, **options)
