"""Encoders as a GPU computes them, kernels interpreted, against transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.encoder_models import embed_tokens, hidden_of, load, make_encoder, reference, texts_of

from engine.layers.linear import PlainLinear
from kernels.bodies import CPU_TENSORS


@pytest.fixture(autouse=True)
def _as_a_gpu() -> Iterator[None]:
    CPU_TENSORS.go_to_triton(True)
    yield
    CPU_TENSORS.go_to_triton(False)


@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert-biased", "gte"])
def test_hidden_states_equal_transformers(name: str, tmp_path: Path, seed: int) -> None:
    path, texts = make_encoder(name, tmp_path), texts_of(seed, (1, 5, 37))
    model, theirs = load(path), reference(path)
    assert isinstance(model.layers[0].attention.out, PlainLinear)
    got = embed_tokens(model, texts, seed=seed)
    for text, tokens in texts.items():
        wanted = hidden_of(theirs, tokens)
        assert (got[text] - wanted).abs().max() < 1e-5 * wanted.abs().max(), text
