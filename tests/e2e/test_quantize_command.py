"""``metronome quantize``: its directories, and ``quantization="int4"``, which computes the same."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.paged import PagedRun
from e2e.test_forward import assert_same, load, reference_logits, tokens_of
from e2e.tiny_models import CASES, Case, TinyModels, config_of, random_model
from safetensors.torch import load_file

from engine.cli.main import main
from engine.models.checkpoint import Checkpoint
from engine.models.quant.directory import Shards

BOTH_SIZES = Case("Qwen3", {"head_dim": 32, "intermediate_size": 128})
"""A model in which the inputs of some matrices are a multiple of 128 and those of others of 32."""


def unpacked(tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """Dequantise a module's weight by the definition of compressed-tensors."""
    packed, scales = tensors[f"{module}.weight_packed"], tensors[f"{module}.weight_scale"]
    shifts = torch.arange(0, 32, 4)
    integers = ((packed[..., None] >> shifts) & 15).flatten(1) - 8
    assert integers.shape == tuple(tensors[f"{module}.weight_shape"].tolist())
    return integers * scales.repeat_interleave(integers.shape[1] // scales.shape[1], dim=1)


def quantize(path: Path, out: Path, *options: str) -> dict[str, Any]:
    assert main(["quantize", str(path), str(out), *options]) == 0
    config: dict[str, Any] = json.loads((out / "config.json").read_text())
    return config["quantization_config"]


@pytest.mark.parametrize("case", [BOTH_SIZES, CASES["phi3"], CASES["gemma3"]], ids=str)
def test_its_directory_computes_what_its_integers_stand_for(
    tmp_path: Path, case: Case, seed: int
) -> None:
    path, out, tokens = tmp_path / "plain", tmp_path / "out", tokens_of(seed)
    model = random_model(config_of(case), seed)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    stated = quantize(path, out)
    sizes = {group["weights"]["group_size"] for group in stated["config_groups"].values()}
    assert sizes == ({32, 128} if case is BOTH_SIZES else {32})
    assert (out / "tokenizer_config.json").read_text() == "{}"

    tensors = load_file(out / "model.safetensors")
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            weight, rounded = module.weight.data, unpacked(tensors, name)
            assert (rounded - weight).abs().max() <= weight.abs().max() / 7
            weight.copy_(rounded)
    got = PagedRun(load(out)).prefill("a", tokens)
    assert_same(got, reference_logits(model, tokens), "the written directory")
    in_memory = PagedRun(load(path, quantization="int4")).prefill("a", tokens)
    assert torch.equal(got, in_memory)


@pytest.mark.parametrize("is_stacked", [False, True])
def test_experts_become_modules_of_their_own(
    tiny_models: TinyModels, tmp_path: Path, is_stacked: bool, seed: int
) -> None:
    path, out, tokens = tmp_path / "plain", tmp_path / "out", tokens_of(seed)
    tiny_models.reference("qwen3-moe").save_pretrained(path, save_original_format=not is_stacked)
    stated = quantize(path, out)
    tensors = load_file(out / "model.safetensors")
    assert "model.layers.0.mlp.experts.1.up_proj.weight_packed" in tensors
    assert "model.layers.0.mlp.gate.weight" in tensors
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(stated["ignore"])
    got = PagedRun(load(out)).prefill("a", tokens)
    in_memory = PagedRun(load(path, quantization="int4")).prefill("a", tokens)
    assert torch.equal(got, in_memory)


def test_the_group_size_can_be_chosen(tiny_models: TinyModels, tmp_path: Path) -> None:
    stated = quantize(tiny_models.path("llama"), tmp_path / "out", "--group-size", "16")
    (group,) = stated["config_groups"].values()
    assert group["weights"]["group_size"] == 16 and group["targets"] == ["Linear"]
    load(tmp_path / "out")


@pytest.mark.parametrize(
    "options", [("--group-size", "24"), ("--group-size", "1024"), ("--quantization", "int3")]
)
def test_bad_options_are_errors(
    tiny_models: TinyModels,
    tmp_path: Path,
    options: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["quantize", str(tiny_models.path("llama")), str(tmp_path / "out"), *options]
    try:
        status = main(command)
    except SystemExit as error:
        status = error.code
    assert status == 2 and options[1] in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_quantized_are_errors(
    tiny_models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama, out = str(tiny_models.path("llama")), tmp_path / "out"
    other = random_model(config_of(Case("Llama", {"hidden_act": "relu"})), 0)
    other.save_pretrained(tmp_path / "general")
    quantize(Path(llama), out)
    fresh = str(tmp_path / "fresh")
    for source, target, named in (
        (llama, str(out), "exists already"),
        (str(out), fresh, "'compressed-tensors' already"),
        (str(tmp_path / "general"), fresh, "no native family"),
        (str(tmp_path / "nothing"), fresh, "nothing"),
        (llama, str(out / "config.json" / "x"), "cannot be written"),
    ):
        assert main(["quantize", source, target]) != 0
        assert named in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["general", "out"]


def test_shards_hold_every_tensor_once(tmp_path: Path) -> None:
    tensors = {f"t{n}": torch.full((n, 8), float(n)) for n in range(1, 6)}
    shards = Shards(tmp_path, shard_bytes=200)
    for name, tensor in tensors.items():
        shards.add(name, tensor)
    shards.close()
    assert len(list(tmp_path.glob("model-0000*-of-00003.safetensors"))) == 3
    with Checkpoint(tmp_path) as checkpoint:
        for name, tensor in tensors.items():
            assert torch.equal(checkpoint.tensor(name), tensor)


@pytest.mark.parametrize("chosen", ["int8", "int4"])
def test_the_output_layer_can_be_quantized(
    tiny_models: TinyModels, tmp_path: Path, chosen: str, seed: int
) -> None:
    """The option quantises the output layer of plain and quantised directories, tied ones too."""
    quantize(tiny_models.path("llama"), tmp_path / "out")
    for path, options in (
        (tiny_models.path("llama"), {}),
        (tiny_models.path("llama"), {"quantization": "int4"}),
        (tmp_path / "out", {}),
        (tiny_models.path("granite"), {}),
    ):
        tokens = tokens_of(seed)
        kept = PagedRun(load(path, **options)).prefill("a", tokens)
        options = {**options, "output_layer_quantization": chosen}
        got = PagedRun(load(path, **options)).prefill("a", tokens)
        assert not torch.equal(got, kept)
        assert torch.nn.functional.cosine_similarity(got, kept, dim=-1).mean() > 0.95
