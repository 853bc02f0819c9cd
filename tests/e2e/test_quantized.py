"""Quantised directories of every format: the logits of the numbers they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from e2e.paged import PagedRun
from e2e.quantized_models import Writer, Written, awq, fp8, gptq, int8, packed, write_model
from e2e.test_forward import assert_same, load, reference_logits, tokens_of
from e2e.tiny_models import CASES
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.errors import ConfigError, ModelError

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "fmt": "e4m3", "weight_block_size": [32, 16]}


def compressed(
    layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A config with one group, as llm-compressor writes it."""
    weights = {"dynamic": False, "symmetric": True, "block_structure": None, **weights}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def integers(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    sizes = {"group_size": 32 if strategy == "group" else None}
    return {"num_bits": bits, "type": "int", "strategy": strategy, **sizes, **more}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, **more}


TOKEN_FLOATS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
TENSOR_FLOATS = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
TOKEN_INTEGERS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def keep_head(module: str) -> bool:
    return module == "lm_head"


def keep_none(module: str) -> bool:
    return False


def keep_some(module: str) -> bool:
    """A whole fused projection, a part of one, and a layer's MLP."""
    return module == "lm_head" or any(
        part in module for part in ("0.self_attn", "1.self_attn.k_proj", "2.mlp")
    )


def keep_gates(module: str) -> bool:
    """The head, and small projections of the gated delta rule and of shared experts."""
    return module.endswith(("lm_head", "in_proj_ba", "in_proj_a", "in_proj_b", "_gate"))


def keep_small(module: str) -> bool:
    """The head, routers, and the projections to the time steps of Mamba."""
    return module.endswith(("lm_head", "router", ".router.layer", "gate", "dt_proj", "x_proj"))


class Directory(NamedTuple):
    """A tiny model and how it is stored."""

    model: str
    write: Writer
    stated: dict[str, Any]
    keep: Callable[[str], bool] = keep_head


DIRECTORIES = {
    "awq": Directory("llama", awq(32), AWQ),
    "awq-rows-biased": Directory("qwen2", awq(-1), {**AWQ, "group_size": -1}),
    "awq-tied-kept": Directory(
        "llama-mha-tied-biased",
        awq(32),
        {**AWQ, "modules_to_not_convert": ["0.self_attn", "1.self_attn.k_proj", "2.mlp"]},
        keep_some,
    ),
    "awq-experts": Directory("mixtral", awq(32), AWQ, lambda m: m.endswith("gate") or keep_head(m)),
    "awq-lfm2": Directory("lfm2", awq(32), AWQ),
    "gptq-lfm2": Directory("lfm2-biased", gptq(4, 32, desc_act=True), {**GPTQ, "desc_act": True}),
    "fp8-blocks-lfm2": Directory("lfm2", fp8("block", scale_name="weight_scale_inv"), BLOCKS),
    "ct-w4a16-lfm2": Directory(
        "lfm2", packed(4, 32), compressed("pack-quantized", integers(4, "group"))
    ),
    "awq-bamba": Directory("bamba", awq(32), AWQ),
    "gptq-multipliers": Directory("falcon-h1-norm", gptq(4, 32, sym=False), {**GPTQ, "sym": False}),
    "fp8-blocks-nemotron": Directory(
        "nemotron-h-moe", fp8("block", scale_name="weight_scale_inv"), BLOCKS, keep_small
    ),
    "ct-w8a8-mamba": Directory(
        "mamba2",
        int8("channel"),
        compressed("int-quantized", integers(8, "channel"), TOKEN_INTEGERS),
    ),
    "gptq": Directory("qwen3", gptq(4, 32), GPTQ),
    "gptq-ordered-by-head": Directory("qwen3-next", gptq(4, 32), GPTQ, keep_gates),
    "gptq-8": Directory("llama", gptq(8, 32, sym=False), {**GPTQ, "bits": 8, "sym": False}),
    "gptq-desc-act": Directory(
        "llama", gptq(4, 16, desc_act=True), {**GPTQ, "group_size": 16, "desc_act": True}
    ),
    "gptq-8-desc-act": Directory(
        "qwen3",
        gptq(8, 32, desc_act=True, sym=False),
        {**GPTQ, "bits": 8, "sym": False, "desc_act": True},
    ),
    "gptq-zeros-of-biases": Directory(
        "llama", gptq(4, -1, has_bias=True), {**GPTQ, "group_size": -1}
    ),
    "gptq-2": Directory("qwen3", gptq(2, 32), {**GPTQ, "bits": 2}),
    "gptq-3-desc-act": Directory(
        "llama",
        gptq(3, 32, desc_act=True, sym=False),
        {**GPTQ, "bits": 3, "sym": False, "desc_act": True},
    ),
    "gptq-v2": Directory(
        "llama",
        gptq(4, 32, sym=False, zero_offset=0),
        {**GPTQ, "sym": False, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-head": Directory("llama", gptq(8, 32), {**GPTQ, "bits": 8, "lm_head": True}, keep_none),
    "gptq-fused-files": Directory("phi3", gptq(4, 32), GPTQ),
    "fp8": Directory("llama", fp8("tensor"), FP8),
    "fp8-gemma": Directory("gemma3", fp8("tensor"), {**FP8, "ignored_layers": ["lm_head"]}),
    "fp8-static": Directory(
        "qwen3", fp8("tensor", is_static=True), {**FP8, "activation_scheme": "static"}
    ),
    "fp8-channel": Directory("llama", fp8("channel"), FP8),
    "fp8-blocks": Directory("qwen3", fp8("block", scale_name="weight_scale_inv"), BLOCKS),
    "fp8-blocks-of-gated-heads": Directory(
        "qwen3.5", fp8("block", scale_name="weight_scale_inv"), BLOCKS, keep_gates
    ),
    "fp8-blocks-kept": Directory(
        "qwen3-moe",
        fp8("block", scale_name="weight_scale_inv", scale_dtype=torch.bfloat16),
        {**BLOCKS, "modules_to_not_convert": ["lm_head"]},
        lambda module: keep_some(module) or module.endswith("gate"),
    ),
    "ct-fp8-tensor": Directory(
        "llama",
        fp8("tensor", is_static=True),
        compressed("float-quantized", floats("tensor"), TENSOR_FLOATS),
    ),
    "ct-fp8-channel": Directory(
        "qwen3",
        fp8("channel", scale_dtype=torch.bfloat16),
        compressed("float-quantized", floats("channel"), TOKEN_FLOATS),
    ),
    "ct-fp8-blocks": Directory(
        "llama",
        fp8("block"),
        compressed("float-quantized", floats("block", block_structure=[32, 16]), TOKEN_FLOATS),
    ),
    "ct-w8a8": Directory(
        "llama",
        int8("channel"),
        compressed("int-quantized", integers(8, "channel"), TOKEN_INTEGERS),
        keep_some,
    ),
    "ct-w8-zeros": Directory(
        "llama",
        int8("group", sym=False),
        compressed("naive-quantized", integers(8, "group", symmetric=False)),
    ),
    "ct-w8a16": Directory(
        "llama", packed(8, -1), compressed("pack-quantized", integers(8, "channel"))
    ),
    "ct-w4a16": Directory(
        "qwen3", packed(4, 32), compressed("pack-quantized", integers(4, "group"))
    ),
    "ct-w4a16-zeros": Directory(
        "llama-mqa-head-dim",
        packed(4, 32, sym=False),
        compressed("pack-quantized", integers(4, "group", symmetric=False)),
    ),
    "ct-w4a16-sorted": Directory(
        "llama",
        packed(4, 32, is_sorted=True),
        compressed("pack-quantized", integers(4, "group", actorder="group")),
    ),
}

MORE_WITH_STATES = {
    f"{name}-{model}": Directory(model, write, stated, keep_small)
    for model in (
        *("jamba-moe", "mamba2", "falcon-mamba", "granite-hybrid", "falcon-h1"),
        *("nemotron-h", "nemotron-h-moe", "bamba-limits"),
    )
    for name, write, stated in (
        ("awq", awq(8), {**AWQ, "group_size": 8}),
        ("gptq-8", gptq(8, 8), {**GPTQ, "bits": 8, "group_size": 8}),
        ("fp8-blocks", fp8("block", scale_name="weight_scale_inv"), BLOCKS),
        (
            "ct-w8a8",
            int8("channel"),
            compressed("int-quantized", integers(8, "channel"), TOKEN_INTEGERS),
        ),
    )
}


def written(path: Path, name: str) -> Written:
    one = (DIRECTORIES | MORE_WITH_STATES)[name]
    return write_model(path / name, CASES[one.model], one.write, one.stated, keep=one.keep)


@pytest.mark.parametrize(
    "name",
    [*DIRECTORIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_WITH_STATES)],
)
def test_logits_are_those_of_what_weights_stand_for(tmp_path: Path, name: str, seed: int) -> None:
    made, tokens = written(tmp_path, name), tokens_of(seed, 23)
    expected = reference_logits(made.reference, tokens)
    model = load(made.path)
    assert_same(PagedRun(model, seed=seed).prefill("a", tokens, 9), expected, name)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(one, other, dim=-1).mean().item()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["awq", "fp8-blocks"])
def test_other_numbers_to_compute_with_stay_near(
    tmp_path: Path, name: str, options: dict[str, str], seed: int
) -> None:
    made, tokens = written(tmp_path, name), tokens_of(seed, 23)
    got = PagedRun(load(made.path, **options)).prefill("a", tokens)
    assert cosine(got, reference_logits(made.reference, tokens)) > 0.98


def test_a_user_just_gives_the_directory(tmp_path: Path, seed: int) -> None:
    made, prompt = written(tmp_path, "gptq"), tokens_of(seed, 9)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(made.path), skip_tokenizer_init=True, max_model_len=64) as llm:
        got = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(reference_logits(made.reference, tokens)[-1].argmax()))
    assert list(got) == tokens[9:]


def test_directories_in_float16_are_computed_in_bfloat16(tmp_path: Path, seed: int) -> None:
    """Most AWQ and GPTQ directories name float16, for which no kernel multiplies packed weights."""
    made, tokens = written(tmp_path, "awq"), tokens_of(seed, 12)
    config = json.loads((made.path / "config.json").read_text()) | {"dtype": "float16"}
    (made.path / "config.json").write_text(json.dumps(config))
    model = load(made.path, dtype="auto")
    assert model.dtype is torch.bfloat16
    got = PagedRun(model).prefill("a", tokens)
    assert cosine(got, reference_logits(made.reference, tokens)) > 0.98
    assert load(made.path, dtype="float16").dtype is torch.float32


def restate(path: Path, **changes: Any) -> None:
    """Change what config.json says of the quantisation."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))


def restore(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a directory."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj"


def test_what_old_tools_wrote_beside_config_json_is_read(tmp_path: Path, seed: int) -> None:
    for name, file in (("awq", "quant_config.json"), ("gptq-8", "quantize_config.json")):
        made, tokens = written(tmp_path, name), tokens_of(seed, 12)
        config = json.loads((made.path / "config.json").read_text())
        stated = config.pop("quantization_config")
        del stated["quant_method"]
        if name == "awq":
            stated = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
        (made.path / "config.json").write_text(json.dumps(config))
        (made.path / file).write_text(json.dumps(stated))
        got = PagedRun(load(made.path)).prefill("a", tokens)
        assert_same(got, reference_logits(made.reference, tokens), name)


def test_a_group_that_names_modules_comes_before_their_class(tmp_path: Path, seed: int) -> None:
    """llm-compressor's mixed precision: 8 bits for what a pattern names, 4 for the others."""
    wide, narrow = packed(8, -1), packed(4, 32)
    stated = compressed("pack-quantized", integers(4, "group"))
    eight = compressed("pack-quantized", integers(8, "channel"))["config_groups"]["group_0"]
    stated["config_groups"]["group_1"] = {**eight, "targets": ["re:.*down_proj", f"{Q}"]}

    def write(weight: torch.Tensor, dice: torch.Generator) -> tuple:
        is_down = weight.shape == (64, 96)
        return (wide if is_down else narrow)(weight, dice)

    path = tmp_path / "mixed"
    made = write_model(path, CASES["llama"], write, stated, keep=lambda m: m in ("lm_head", Q))
    tokens = tokens_of(seed, 12)
    got = PagedRun(load(path)).prefill("a", tokens)
    assert_same(got, reference_logits(made.reference, tokens), "mixed precision")


def test_scales_of_an_8_bit_cache_are_passed_over(tmp_path: Path, seed: int) -> None:
    made = written(tmp_path, "ct-fp8-channel")
    scale = {f"{Q.replace('q_proj', 'k_scale')}": torch.ones(1)}
    restore(made.path, lambda tensors: tensors.update(scale))
    tokens = tokens_of(seed, 12)
    got = PagedRun(load(made.path)).prefill("a", tokens)
    assert_same(got, reference_logits(made.reference, tokens), "with scales of a cache")


@pytest.mark.parametrize(
    ("name", "lost", "named"),
    [
        ("awq", "qzeros", rf"lacks the tensor {Q}.qzeros of shape \(2, 8\).*awq"),
        ("gptq-desc-act", "g_idx", rf"lacks the tensor {Q}.g_idx of shape \(64,\)"),
        ("fp8", "weight_scale", rf"{Q}.weight_scale_inv or {Q}.weight_scale of shape \(\) or"),
        ("fp8-static", "input_scale", rf"{Q}.input_scale or {Q}.activation_scale"),
        ("ct-w4a16", "weight_scale", rf"{Q}.weight_scale of shape \(128, 2\)"),
        ("ct-w4a16-zeros", "weight_zero_point", rf"{Q}.weight_zero_point"),
        ("gptq", "qweight", rf"lacks the tensor {Q}.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(
    tmp_path: Path, name: str, lost: str, named: str
) -> None:
    made = written(tmp_path, name)
    restore(made.path, lambda tensors: tensors.pop(f"{Q}.{lost}"))
    with pytest.raises(ModelError, match=named):
        load(made.path)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("awq", {"group_size": 16}, r"q_proj.qzeros .*shape \(2, 8\).*group size.*\(4, 8\)"),
        ("awq", {"group_size": 48}, r"q_proj has 64 inputs, not a multiple of .* group_size 48"),
        ("gptq", {"bits": 8}, r"qweight .*shape \(8, 128\).*\(16, 128\)"),
        ("fp8-blocks", {"weight_block_size": [64, 64]}, r"weight_scale_inv .*\(4, 4\).*\(2, 1\)"),
        ("fp8", {"weight_block_size": [0, 64]}, r"weight_block_size \[0, 64\], must be at least 1"),
        ("gptq", {"group_size": 0}, r"group_size 0, must be -1 or at least 1"),
        ("gptq", {"bits": 5}, r"bits 5, supported: 2, 3, 4, 8"),
        ("gptq", {"checkpoint_format": "marlin"}, r"checkpoint_format 'marlin', supported: gptq"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic"),
        ("awq", {"version": "gemv"}, r"version 'gemv', supported: gemm"),
        ("awq", {"bits": 8}, r"bits 8, supported: 4"),
        ("fp8", {"scale_fmt": "ue8m0"}, r"scale_fmt 'ue8m0'"),
        ("ct-w4a16", {"format": "marlin-24"}, r"format 'marlin-24', supported:"),
        ("ct-w4a16", {"config_groups": {}}, r"has no config_groups"),
        ("ct-w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparse-24-bitmask"),
        ("ct-fp8-channel", {"format": "nvfp4-pack-quantized"}, r"nvfp4"),
    ],
)
def test_a_config_that_does_not_fit_or_is_not_read_is_named(
    tmp_path: Path, name: str, changes: dict[str, Any], named: str
) -> None:
    made = written(tmp_path, name)
    restate(made.path, **changes)
    with pytest.raises(ModelError, match=named):
        load(made.path)


def test_numbers_of_another_type_are_named(tmp_path: Path) -> None:
    made = written(tmp_path, "fp8")
    key = f"{Q}.weight"
    restore(made.path, lambda t: t.update({key: t[key].float().to(torch.float8_e5m2)}))
    with pytest.raises(ModelError, match=rf"{Q}.weight .*F8_E5M2, fp8 format has F8_E4M3"):
        load(made.path)


def test_groups_that_are_not_there_are_named(tmp_path: Path) -> None:
    made = written(tmp_path, "gptq-desc-act")
    restore(made.path, lambda t: t[f"{Q}.g_idx"].add_(3))
    with pytest.raises(ModelError, match=rf"{Q} assigns inputs to groups 3 to 6.*scales for 4"):
        load(made.path)


def test_a_bias_that_has_no_place_is_named(tmp_path: Path) -> None:
    made = written(tmp_path, "gptq-zeros-of-biases")
    restore(made.path, lambda t: t[f"{Q}.bias"].add_(1))
    with pytest.raises(ModelError, match=rf"{Q}.bias"):
        load(made.path)


@pytest.mark.parametrize("method", ["bitsandbytes", ""])
def test_other_methods_are_refused_with_the_way_out(tmp_path: Path, method: str) -> None:
    made = written(tmp_path, "awq")
    restate(made.path, quant_method=method)
    with pytest.raises(
        ModelError, match=rf"'{method or 'an unnamed method'}'.*quantization=\"int8\""
    ):
        load(made.path)


def test_mxfp4_of_native_families_is_refused(tmp_path: Path) -> None:
    made = written(tmp_path, "awq")
    restate(made.path, quant_method="mxfp4")
    with pytest.raises(ModelError, match=r"'mxfp4', which only general families .*LlamaFor"):
        load(made.path)


def test_options_that_make_no_sense_with_a_quantized_directory(tmp_path: Path) -> None:
    path = written(tmp_path, "fp8").path
    load(path, quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantized by 'fp8'.*load_format=\"dummy\""):
        load(path, load_format="dummy")
    awq_path = written(tmp_path, "awq").path
    with pytest.raises(ConfigError, match=r"'awq', and quantization='fp8' would quantize"):
        load(awq_path, quantization="fp8")
