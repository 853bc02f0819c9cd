"""gpt-oss as it is published, with experts in MXFP4, against transformers' own dequantisation."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from e2e.general_models import GENERAL_CASES, general_config
from e2e.paged import PagedRun
from e2e.test_general import assert_same, load, random_tokens, reference_logits
from e2e.tiny_models import random_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine import LLM, SamplingParams
from engine.cli.main import main
from engine.errors import ConfigError, ModelError

PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}
FIRST = "model.layers.0.mlp.experts"


def write(path: Path, seed: int) -> PreTrainedModel:
    """Write a random directory in the published form. Returns transformers' model of its
    dequantised weights, in float32."""
    dice = torch.Generator().manual_seed(seed)
    model = random_model(general_config(*GENERAL_CASES["gpt-oss-sinks"]), seed).eval()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            continue
        if name.endswith("_bias"):
            parameter.data.normal_(generator=dice)
            stored[name] = parameter.data.clone()
            continue
        experts, inputs, outputs = parameter.shape
        size = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*size, 16), generator=dice, dtype=torch.uint8)
        scales = torch.randint(121, 126, size, generator=dice, dtype=torch.uint8)
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    path.mkdir()
    save_file(stored, path / "model.safetensors")
    config = json.loads(model.config.to_json_string()) | {"quantization_config": PUBLISHED}
    config["architectures"] = ["GptOssForCausalLM"]
    (path / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("chunk", [None, 7])
def test_logits_are_those_of_the_dequantized_experts(
    tmp_path: Path, chunk: int | None, seed: int
) -> None:
    theirs, tokens = write(tmp_path / "oss", seed), random_tokens(seed, 41)
    expected = reference_logits(theirs, tokens)
    run = PagedRun(load(tmp_path / "oss", dtype="float32"), seed=seed)
    assert_same(run.prefill("a", tokens, chunk), expected, "mxfp4")
    with_rounding = PagedRun(load(tmp_path / "oss", dtype="bfloat16")).prefill("a", tokens, chunk)
    assert torch.nn.functional.cosine_similarity(with_rounding, expected).mean() > 0.99


def test_tokens_are_those_of_transformers(tmp_path: Path, seed: int) -> None:
    theirs, prompt = write(tmp_path / "oss", seed), random_tokens(seed, 9)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(
        str(tmp_path / "oss"), skip_tokenizer_init=True, max_model_len=64, dtype="float32"
    ) as llm:
        got = llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
    tokens = list(prompt)
    for _ in range(6):
        tokens.append(int(reference_logits(theirs, tokens)[-1].argmax()))
    assert list(got) == tokens[9:]


def short_scales(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{FIRST}.down_proj_scales"
    tensors[name] = tensors[name][:, 1:].clone()


def lost_scales(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{FIRST}.down_proj_scales"]


def flat_blocks(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{FIRST}.gate_up_proj_blocks"
    tensors[name] = tensors[name].flatten(2)


def lost_experts(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{FIRST}.down_proj_scales"], tensors[f"{FIRST}.down_proj_blocks"]


def fewer_experts(tensors: dict[str, torch.Tensor]) -> None:
    for part in ("blocks", "scales"):
        name = f"{FIRST}.down_proj_{part}"
        tensors[name] = tensors[name][1:].clone()


def other_dtype(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (short_scales, r"down_proj_scales .*\(4, 63, 3\).*must be \(4, 64, 3\)"),
        (lost_scales, "lacks .*down_proj_scales"),
        (flat_blocks, r"gate_up_proj_blocks .*\(4, 192, 32\).*\[experts, outputs"),
        (lost_experts, "lacks weights of GptOssForCausalLM.*down_proj"),
        (fewer_experts, "down_proj"),
        (other_dtype, "q_proj.weight .*F8_E4M3"),
    ],
)
def test_damaged_tensors_are_named(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], named: str
) -> None:
    path = tmp_path / "oss"
    write(path, zlib.crc32(named.encode()))
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelError, match=named):
        load(path)


def test_options_and_commands_know_the_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "oss"
    write(path, 1)
    for option in ({"quantization": "int4"}, {"load_format": "dummy"}):
        with pytest.raises(ConfigError, match="'mxfp4'"):
            load(path, **option)
    main(["models", str(path)])
    assert "quantized by mxfp4" in capsys.readouterr().out
