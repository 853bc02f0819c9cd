"""The native decoder against transformers: every logit of every family, however a step is cut."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from e2e.paged import PagedRun
from e2e.tiny_models import (
    CASES,
    FULL,
    VOCAB,
    Case,
    TinyModels,
    config_of,
    random_model,
    randomised,
    reference,
)
from safetensors.torch import load_file, save_file

from engine.config.model import ModelConfig, read_model_info
from engine.models.decoder import NativeDecoder
from engine.models.families import FAMILIES
from engine.models.load import load_model
from engine.models.mamba_families import MAMBA_FAMILIES
from engine.models.model import Model

LENGTH = 41
MAX_MODEL_LEN = 256


def load(path: str | os.PathLike, max_model_len: int = MAX_MODEL_LEN, **options) -> Model:
    """In float32 unless told otherwise: what is exact, and not how precise."""
    config = ModelConfig(model=str(path), **{"dtype": "float32", **options})
    info = read_model_info(path)
    return load_model(config, info, device="cpu", max_model_len=max_model_len)


def tokens_of(seed: int, count: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def reference_logits(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Within 1e-4 of the largest logit, and the same greedy tokens except for ties."""
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-4, f"{what}: off by {error:.2e} of the largest logit"
    best = theirs.topk(2, dim=-1)
    decided = best.values[:, 0] - best.values[:, 1] > 1e-4
    wrong = decided & (ours.argmax(-1) != best.indices[:, 0])
    assert not wrong.any(), f"{what}: other greedy tokens at {wrong.nonzero().flatten().tolist()}"


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tiny_models: TinyModels, name: str, seed: int) -> None:
    model = load(tiny_models.path(name))
    assert isinstance(model, NativeDecoder)
    reference = tiny_models.reference(name)
    a, b = tokens_of(seed), tokens_of(seed + 1, 29)
    expected = {"a": reference_logits(reference, a), "b": reference_logits(reference, b)}
    for chunk in (None, 7, 16):
        run = PagedRun(model, seed=seed)
        assert_same(run.prefill("a", a, chunk), expected["a"], f"{name} in chunks of {chunk}")

    run = PagedRun(model, block_size=8, seed=seed)
    got: dict[str, list[torch.Tensor]] = {"a": [], "b": []}
    cuts = [(5, 0), (1, 11), (9, 1), (1, 1), (20, 7), (1, 1), (1, 8), (3, 0)]
    done = {"a": 0, "b": 0}
    for counts in cuts:
        chunks = {
            key: tokens[done[key] : done[key] + count]
            for key, tokens, count in zip("ab", (a, b), counts, strict=True)
            if count
        }
        for key, logits in run.step(chunks).items():
            got[key].append(logits)
            done[key] += len(chunks[key])
    assert done == {"a": len(a), "b": len(b)}
    for key, parts in got.items():
        assert_same(torch.cat(parts), expected[key], f"{name}, two sequences mixed, {key}")


def test_what_a_native_family_does_not_compute_runs_through_transformers(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="engine.models")
    random_model(config_of(Case("Llama", {"hidden_act": "relu"})), seed).save_pretrained(tmp_path)
    model, tokens = load(tmp_path), tokens_of(seed)
    assert not isinstance(model, NativeDecoder)
    assert "'relu'" in caplog.text and "transformers' module" in caplog.text
    assert_same(
        PagedRun(model).prefill("a", tokens), reference_logits(reference(tmp_path), tokens), "relu"
    )


def test_every_family_has_a_case() -> None:
    made = {f"{case.family.removesuffix('Text')}ForCausalLM" for case in CASES.values()}
    assert made | set(WITH_IMAGES) == {*FAMILIES, *MAMBA_FAMILIES}


# Families that also read images, and the case of their text model.
WITH_IMAGES = {
    "Qwen3_5ForConditionalGeneration": "qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "qwen3.5-moe",
    "Lfm2VlForConditionalGeneration": "lfm2",
}
SIGLIP = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16}


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_models_of_images_are_served_as_text_models(tmp_path: Path, name: str, seed: int) -> None:
    """The published checkpoints also have an encoder of images and layers that only draft."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    sizes = {"patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16}
    text = config_of(CASES[WITH_IMAGES[name]]).to_dict()
    make = getattr(transformers, name.replace("ForConditionalGeneration", "Config"))
    tied = name.startswith("Lfm2")
    vision |= SIGLIP if tied else {}
    config = make(text_config=text, vision_config={**vision, **sizes}, tie_word_embeddings=tied)
    model = randomised(getattr(transformers, name)(config).float(), seed)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert any("vis" in key for key in stored)
    drafts = {"mtp.fc.weight": torch.zeros(64, 128)}
    save_file({**stored, **drafts}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = tokens_of(seed)
    logits = PagedRun(load(tmp_path)).prefill("a", tokens, 16)
    assert_same(logits, reference_logits(model.eval(), tokens), name)


# Files as transformers 4 wrote them, and what became of their keys since.
OLDER = [
    "llama-llama3",
    "llama-yarn",
    "phi3-partial-window",
    "phi3-longrope",
    "gemma3-linear",
    "qwen3-next-mixed",
]


def in_older_words(hf: dict[str, Any]) -> dict[str, Any]:
    given = hf.pop("rope_parameters")
    if FULL in given:
        hf["rope_local_base_freq"] = given["sliding_attention"]["rope_theta"]
        given = given[FULL]
    hf["rope_theta"] = given.pop("rope_theta")
    hf["partial_rotary_factor"] = given.pop("partial_rotary_factor", 1.0)
    hf["rope_scaling"] = None if given["rope_type"] == "default" else given
    hf["torch_dtype"] = hf.pop("dtype")
    return hf


@pytest.mark.parametrize("name", OLDER)
def test_older_configurations_compute_the_same(
    tiny_models: TinyModels, tmp_path: Path, name: str, seed: int
) -> None:
    path = tiny_models.path(name)
    hf = in_older_words(json.loads((path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    tokens = tokens_of(seed)
    logits = PagedRun(load(tmp_path)).prefill("a", tokens)
    assert_same(logits, reference_logits(tiny_models.reference(name), tokens), name)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed", "qwen3-next"])
def test_stacked_experts_compute_the_same(
    tiny_models: TinyModels, tmp_path: Path, name: str, seed: int
) -> None:
    model = tiny_models.reference(name)
    model.save_pretrained(tmp_path, save_original_format=False)
    tokens = tokens_of(seed)
    logits = PagedRun(load(tmp_path)).prefill("a", tokens)
    assert_same(logits, reference_logits(model, tokens), name)


def test_sharded_checkpoints_compute_the_same(
    tiny_models: TinyModels, tmp_path: Path, seed: int
) -> None:
    model = tiny_models.reference("qwen3")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = tokens_of(seed)
    logits = PagedRun(load(tmp_path)).prefill("a", tokens)
    assert_same(logits, reference_logits(model, tokens), "shards")


def test_length_dependent_positions_agree_on_their_side_of_the_border(
    tmp_path: Path, seed: int
) -> None:
    """With ``max_model_len`` beyond the border, short sequences are where we differ: transformers
    turns them by the short factors until one call is long. See engine.layers.rotary."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
    }
    case = Case("Llama", {"rope_parameters": {**scaling, "rope_theta": 10_000.0}})
    random_model(config_of(case), seed).save_pretrained(tmp_path)
    short, long = tokens_of(seed, 30), tokens_of(seed, 50)
    for_short, for_long = load(tmp_path, max_model_len=32), load(tmp_path, max_model_len=64)
    theirs = {
        len(tokens): reference_logits(reference(tmp_path), tokens) for tokens in (short, long)
    }
    assert_same(PagedRun(for_short).prefill("a", short), theirs[30], "short factors")
    assert_same(PagedRun(for_long).prefill("a", long), theirs[50], "long factors")
    with pytest.raises(AssertionError, match="off by"):
        assert_same(PagedRun(for_long).prefill("a", short), theirs[30], "short, long factors")


def test_dynamic_positions_are_those_of_the_longest_sequence(tmp_path: Path, seed: int) -> None:
    scaling = {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10_000.0}
    case = Case("Llama", {"rope_parameters": scaling, "max_position_embeddings": 24})
    random_model(config_of(case), seed).save_pretrained(tmp_path)
    tokens = tokens_of(seed)
    model = load(tmp_path, max_model_len=len(tokens))
    logits = PagedRun(model).prefill("a", tokens, chunk=7)
    assert_same(logits, reference_logits(reference(tmp_path), tokens), "dynamic")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"dtype": "bfloat16"}) for name in ("gemma2", "mixtral", "qwen3-next")),
        *((name, {"quantization": "int8"}) for name in ("llama", "olmo2", "qwen3.5")),
    ],
    ids=str,
)
def test_narrow_numbers_stay_near(
    tiny_models: TinyModels, name: str, options: dict[str, str], seed: int
) -> None:
    tokens = tokens_of(seed)
    logits = PagedRun(load(tiny_models.path(name), **options)).prefill("a", tokens, chunk=16)
    expected = reference_logits(tiny_models.reference(name), tokens)
    cosine = torch.nn.functional.cosine_similarity(logits, expected, dim=-1)
    print(f"{name} {options}: cosine {cosine.mean():.5f}, lowest {cosine.min():.5f}")
    assert logits.dtype == torch.float32
    # Where two experts score nearly the same, rounding may choose the other one for a token.
    assert cosine.median() > 0.99 and cosine.mean() > 0.9


def test_made_up_weights_run_from_a_configuration_alone(
    tiny_models: TinyModels, tmp_path: Path, seed: int
) -> None:
    for name in ("llama", "gemma3", "mixtral"):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text((tiny_models.path(name) / "config.json").read_text())
        tokens = tokens_of(seed)
        one, same, other = (
            PagedRun(load(directory, load_format="dummy", seed=s)).prefill("a", tokens)
            for s in (1, 1, 2)
        )
        assert torch.isfinite(one).all()
        assert torch.equal(one, same) and not torch.equal(one, other)
        assert len(one.argmax(-1).unique()) > 5, "made-up models should answer to their input"
