"""Ranks that each compute a part of an encoder agree with one that computes all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from e2e.encoder_models import CASES, LONGEST, embed_tokens, make_encoder, texts_of
from support.rank_threads import run_ranks

from engine.config.model import ModelConfig, read_model_info
from engine.errors import ConfigError
from engine.models.load import load_model
from engine.parallel.collectives import Alone, Collectives

FEW = {"bert", "mpnet", "modernbert", "gte"}


def hidden(path: Path, ranks: Collectives, seed: int) -> dict[str, torch.Tensor]:
    config, info = ModelConfig(model=str(path), dtype="float32"), read_model_info(path)
    model = load_model(config, info, device="cpu", max_model_len=LONGEST, collectives=ranks)
    return embed_tokens(model, texts_of(seed), seed=seed)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in CASES]
)
def test_ranks_compute_what_one_does(name: str, tmp_path: Path, seed: int) -> None:
    path = make_encoder(name, tmp_path)
    alone = hidden(path, Alone(), seed)
    for size in (2, 4):
        answers = run_ranks(size, lambda ranks: hidden(path, ranks, seed))
        for text, wanted in alone.items():
            for one in answers:
                assert torch.equal(one[text], answers[0][text])
                assert (one[text] - wanted).abs().max() < 1e-5 * wanted.abs().max(), text


def test_a_size_that_does_not_divide_the_heads_is_refused(tmp_path: Path, seed: int) -> None:
    path = make_encoder("bert", tmp_path)
    with pytest.raises(ConfigError, match=r"4 attention heads; sizes that do: 1, 2, 4$"):
        run_ranks(3, lambda ranks: hidden(path, ranks, seed))
