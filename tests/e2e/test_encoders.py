"""Encoders against transformers: hidden states of every token of every family, in any company."""

from pathlib import Path

import pytest
import torch
from e2e.encoder_models import (
    CASES,
    LONGEST,
    embed_tokens,
    hidden_of,
    load,
    make_encoder,
    reference,
    texts_of,
)
from safetensors.torch import load_file, save_file

from engine.config.model import ModelConfig, read_model_info
from engine.errors import ConfigError, ModelError
from engine.models.encoder import NativeEncoder
from engine.models.load import load_model

PLAIN = [name for name in CASES if ":" not in CASES[name].family]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest error relative to the largest number."""
    assert got.shape == wanted.shape and got.isfinite().all()
    return float((got.float() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_equal_transformers(name: str, root: Path, seed: int) -> None:
    path = make_encoder(name, root)
    model, theirs, texts = load(path), reference(path), texts_of(seed)
    assert isinstance(model, NativeEncoder) and not model.is_causal
    got = embed_tokens(model, texts, seed=seed)
    for text, tokens in texts.items():
        assert off(got[text], hidden_of(theirs, tokens)) < 1e-5, text
        alone = embed_tokens(model, {text: tokens}, seed=seed + 1)[text]
        assert torch.equal(alone, got[text]), f"{text}: other bits in company"


@pytest.mark.parametrize("name", PLAIN)
def test_bfloat16_is_near_float32(name: str, root: Path, seed: int) -> None:
    path, texts = make_encoder(name, root), texts_of(seed)
    exact = embed_tokens(load(path), texts)
    rounded = embed_tokens(load(path, dtype="bfloat16"), texts)
    for text in texts:
        assert rounded[text].dtype is torch.bfloat16
        means = [hidden[text].float().mean(0) for hidden in (exact, rounded)]
        assert torch.cosine_similarity(*means, dim=0) >= 0.999, text


@pytest.mark.parametrize("name", ["bert", "gte-classifier"])
def test_second_texts_of_pairs_have_another_type(name: str, root: Path, seed: int) -> None:
    path, texts = make_encoder(name, root), texts_of(seed, (2, 30, 21))
    types = {text: [int(i > len(ids) // 3) for i in range(len(ids))] for text, ids in texts.items()}
    model, theirs = load(path), reference(path)
    got = embed_tokens(model, texts, types)
    for text, tokens in texts.items():
        assert off(got[text], hidden_of(theirs, tokens, types[text])) < 1e-5
        assert off(got[text], hidden_of(theirs, tokens)) > 1e-3


def test_weights_in_eight_bits(root: Path, seed: int) -> None:
    path, texts = make_encoder("bert", root), texts_of(seed)
    exact = embed_tokens(load(path), texts)
    for dtype in ("float32", "bfloat16"):
        got = embed_tokens(load(path, quantization="int8", dtype=dtype), texts)
        for text in texts:
            similarity = torch.cosine_similarity(got[text].float(), exact[text], dim=-1)
            assert similarity.mean() > 0.99, (dtype, text)


def test_old_names_of_norms(root: Path, tmp_path: Path, seed: int) -> None:
    path = make_encoder("bert", root)
    tensors = load_file(path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new_ending, ending in old.items():
        for name in [name for name in tensors if name.endswith(new_ending)]:
            tensors[f"bert.{name.removesuffix(new_ending)}{ending}"] = tensors.pop(name)
    tensors = {n if n.startswith("bert.") else f"bert.{n}": t for n, t in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(128)
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    texts = texts_of(seed)
    got, wanted = (embed_tokens(load(one), texts) for one in (tmp_path, path))
    assert all(torch.equal(got[text], wanted[text]) for text in texts)


def test_a_length_beyond_the_position_embeddings_is_refused(root: Path) -> None:
    path = make_encoder("roberta", root)
    config, info = ModelConfig(model=str(path)), read_model_info(path)
    with pytest.raises(ConfigError, match=r"127.* 126 positions"):
        load_model(config, info, device="cpu", max_model_len=127)
    assert LONGEST < 126


def test_what_is_no_tensor_of_the_model_is_named(root: Path, tmp_path: Path) -> None:
    path = make_encoder("bert", root)
    tensors = load_file(path / "model.safetensors") | {"encoder.extra": torch.zeros(2)}
    (tmp_path / "config.json").write_bytes((path / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"encoder\.extra"):
        load(tmp_path)


def test_an_encoder_generates_nothing(root: Path) -> None:
    model = load(make_encoder("bert", root))
    with pytest.raises(NotImplementedError, match="no output layer"):
        model.logits(torch.zeros(1, 64))


def test_positions_of_padding_are_not_for_tokens(root: Path) -> None:
    longest = {"bert": 128, "roberta": 126, "roberta-classifier": 124, "xlm-roberta": 126}
    for name, most in {**longest, "mpnet": 126, "modernbert": 128}.items():
        assert read_model_info(make_encoder(name, root)).max_position_embeddings == most
