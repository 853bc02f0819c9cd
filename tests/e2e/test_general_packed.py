"""Quantised weights of models that transformers' modules compute: packed, with the same results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from e2e.general_models import MLA
from e2e.gguf_models import GENERAL, WIDE_GENERAL, GgufModels, Kind
from e2e.paged import PagedRun
from e2e.quantized_models import Writer, Written, awq, fp8, gptq, int8, packed, write_model
from e2e.references import Reference, Tally, compare, engine_for, generate, prompts, run
from e2e.test_forward import assert_same, load, reference_logits, tokens_of
from e2e.test_quantized import (
    AWQ,
    BLOCKS,
    FP8,
    GPTQ,
    TOKEN_INTEGERS,
    compressed,
    cosine,
    integers,
    keep_head,
    restore,
)
from e2e.tiny_models import Case, reference
from transformers import PreTrainedModel

from engine.config.model import ModelConfig, read_model_info
from engine.errors import ConfigError, ModelError
from engine.gguf.directory import directory_of
from engine.models.general_stored import load_stored
from engine.models.general_support import read_hf_config


def keep_gates(module: str) -> bool:
    return keep_head(module) or module.endswith(("gate", "router"))


class Directory(NamedTuple):
    """A tiny model and how it is stored."""

    case: Case
    write: Writer
    stated: dict[str, Any]
    keep: Callable[[str], bool] = keep_head


DIRECTORIES = {
    "glm4-awq": Directory(Case("Glm4", {"head_dim": 16, "attention_bias": True}), awq(32), AWQ),
    "gemma-gptq-desc-act": Directory(
        Case("Gemma", {"head_dim": 16}), gptq(4, 32, desc_act=True), {**GPTQ, "desc_act": True}
    ),
    "gpt2-gptq": Directory(
        Case("GPT2", {"n_embd": 64, "n_head": 4, "n_layer": 3}), gptq(4, 32), GPTQ
    ),
    "cohere-fp8": Directory(Case("Cohere", {"logit_scale": 0.3}), fp8("channel"), FP8),
    "starcoder2-w8a8": Directory(
        Case("Starcoder2", {"sliding_window": 9, "use_bias": True}),
        int8("channel"),
        compressed("int-quantized", integers(8, "channel"), TOKEN_INTEGERS),
    ),
    "olmoe-w4a16": Directory(
        GENERAL["olmoe"],
        packed(4, 32),
        compressed("pack-quantized", integers(4, "group")),
        keep_gates,
    ),
    "deepseek-fp8-blocks": Directory(
        Case("DeepseekV3", MLA), fp8("block", scale_name="weight_scale_inv"), BLOCKS, keep_gates
    ),
}
"""Models whose linear layers and experts are quantised, the latter stored one by one."""


EXPERT = "model.layers.0.mlp.experts.1"


@pytest.fixture(scope="module")
def gguf_models(tmp_path_factory: pytest.TempPathFactory) -> GgufModels:
    return GgufModels(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    root = tmp_path_factory.mktemp("general")
    return {
        name: write_model(root / name, one.case, one.write, one.stated, keep=one.keep)
        for name, one in DIRECTORIES.items()
    }


@pytest.mark.parametrize("name", DIRECTORIES)
def test_logits_are_those_of_what_weights_stand_for(
    directories: dict[str, Written], name: str, seed: int
) -> None:
    made, tokens = directories[name], tokens_of(seed, 23)
    expected = reference_logits(made.reference, tokens)
    assert_same(PagedRun(load(made.path), seed=seed).prefill("a", tokens, 9), expected, name)


@pytest.mark.parametrize(
    "name",
    # Attention of these two has other heads than that of the others, and is compiled for them.
    [
        pytest.param(name, marks=[pytest.mark.slow] * name.startswith(("gpt2", "deepseek")))
        for name in DIRECTORIES
    ],
)
def test_logits_in_bfloat16_stay_near(
    directories: dict[str, Written], name: str, seed: int
) -> None:
    made, tokens = directories[name], tokens_of(seed, 23)
    rounded = PagedRun(load(made.path, dtype="bfloat16")).prefill("a", tokens)
    assert cosine(rounded.float(), reference_logits(made.reference, tokens)) > 0.98


@pytest.mark.parametrize("name", ["gemma-gptq-desc-act", "olmoe-w4a16"])
def test_tokens_are_those_of_transformers(directories: dict[str, Written], name: str) -> None:
    """Also in chunks, with drafts, and when prefixes are found again."""
    made, tally = prompts()[1:5], Tally()
    answers = [generate(directories[name].reference, ids) for ids in made]
    right = Reference(made, [one for one, _ in answers], [margins for _, margins in answers])
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    options = {"max_num_batched_tokens": 16, "speculative_config": drafts}
    with engine_for(str(directories[name].path), dtype="float32", **options) as engine:
        for _ in range(2):
            compare(right, run(engine, made)[0], tally)
    assert not tally.ties


PUBLISHED: dict[str, tuple[Directory, tuple[tuple[str, str], ...]]] = {
    "gpt2": (DIRECTORIES["gpt2-gptq"], ((r"^transformer\.", ""),)),
    "gpt-neox": (
        Directory(Case("GPTNeoX", {"intermediate_size": 96}), gptq(4, 32), GPTQ),
        ((r"^lm_head\.", "embed_out."),),
    ),
    "phimoe": (
        Directory(
            Case("Phimoe", {"num_local_experts": 4}),
            packed(4, 32),
            compressed("pack-quantized", integers(4, "group")),
            keep_gates,
        ),
        (
            (r"\.mlp\.", ".block_sparse_moe."),
            (r"\.router\.", ".gate."),
            (r"\.gate_proj\.", ".w1."),
            (r"\.up_proj\.", ".w3."),
            (r"\.down_proj\.", ".w2."),
        ),
    ),
}
"""Models whose authors named tensors otherwise than transformers does, and how."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_of_published_tensors_are_those_that_transformers_reads(
    tmp_path: Path, name: str, seed: int
) -> None:
    one, renamings = PUBLISHED[name]
    made = write_model(tmp_path / name, one.case, one.write, one.stated, keep=one.keep)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for old in list(tensors):
            new = old
            for pattern, replacement in renamings:
                new = re.sub(pattern, replacement, new)
            tensors[new] = tensors.pop(old)

    restore(made.path, rename)
    tokens = tokens_of(seed, 23)
    found = PagedRun(load(made.path), seed=seed).prefill("a", tokens, 9)
    assert_same(found, reference_logits(made.reference, tokens), name)


def load_module(path: Path, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
    """Load the module of a model, before it is moved to the device."""
    info = read_model_info(path)
    config = read_hf_config(ModelConfig(model=str(path)), info)
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    return load_stored(info, config, device, options, quantize_activations=True)[0]


def bytes_of_parameters(path: Path, dtype: torch.dtype) -> int:
    """Load the module of a model; returns the memory that its own parameters take."""
    found = load_module(path, dtype).parameters()
    return sum({id(each): each.untyped_storage().nbytes() for each in found}.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", WIDE_GENERAL)
def test_matrices_of_gguf_files_stay_packed(
    gguf_models: GgufModels, name: str, dtype: torch.dtype
) -> None:
    model = gguf_models.get(name, Kind.MXFP4)
    whole = sum(values.size for values in model.made.twin.values()) * dtype.itemsize
    assert bytes_of_parameters(directory_of(str(model.file)), dtype) < whole / 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_of_directories_stay_packed(
    directories: dict[str, Written], dtype: torch.dtype
) -> None:
    """Only the routers, the embedding and the output layer are not quantised."""
    made = directories["olmoe-w4a16"]
    kept = sum(
        each.numel()
        for name, each in made.reference.named_parameters()
        if each.dim() == 1 or name.endswith(("gate.weight", "embed_tokens.weight", "head.weight"))
    )
    assert bytes_of_parameters(made.path, dtype) == kept * dtype.itemsize


@pytest.mark.parametrize("name", ["gpt2-gptq", "olmoe-w4a16", "wide-qwen2moe", "wide-gpt-oss"])
def test_weights_are_dequantised_for_a_gpu(
    directories: dict[str, Written], gguf_models: GgufModels, name: str
) -> None:
    if name in directories:
        path, theirs = directories[name].path, directories[name].reference
    else:
        model = gguf_models.mixed(name)
        path, theirs = directory_of(str(model.file)), reference(model.twin)
    found = load_module(path, torch.float32, "cuda").state_dict()
    wanted = theirs.state_dict()
    assert found.keys() == wanted.keys()
    for each in wanted:
        assert torch.allclose(found[each], wanted[each]), each


def test_the_format_of_the_weights_may_be_requested(directories: dict[str, Written]) -> None:
    load(directories["cohere-fp8"].path, quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantized by 'awq'.*would quantize them again"):
        load(directories["glm4-awq"].path, quantization="int4")


def renamed(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        tensors[name.replace(".mlp.", ".feed.")] = tensors.pop(name)


def without_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{EXPERT}.up_proj.weight_packed"]


def short_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{EXPERT}.down_proj.weight_scale"
    tensors[name] = tensors[name][1:].clone()


def another(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without_half, r"lacks the tensor .*experts\.1\.up_proj.* files are incomplete"),
        (renamed, r"lacks .*\.mlp\.gate\.weight .* has .*\.feed\..*not named as in transformers"),
        (short_scales, r"experts\.1\.down_proj\.weight_scale .*shape \(63, 3\).*\(64, 3\)"),
        (another, r"not part of the model .*self_attn\.extra\.weight of shape \(2,\)"),
    ],
)
def test_damaged_tensors_are_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    one = DIRECTORIES["olmoe-w4a16"]
    made = write_model(tmp_path / "x", one.case, one.write, one.stated, keep=one.keep)
    restore(made.path, change)
    with pytest.raises(ModelError, match=named):
        load(made.path)
