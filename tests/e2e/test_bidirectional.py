"""Decoders whose config.json lets tokens see later tokens, pooled, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.encoder_models import embed_tokens, texts_of
from e2e.tiny_models import BASE, randomised
from transformers import Gemma3TextConfig, Gemma3TextModel, PreTrainedModel, Qwen2Config, Qwen2Model

from engine.config.model import ModelConfig, read_model_info
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model

GEMMA = {
    "use_bidirectional_attention": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
}


def gemma(path: Path, seed: int) -> PreTrainedModel:
    model = Gemma3TextModel(Gemma3TextConfig(**BASE | GEMMA))
    randomised(model, seed).save_pretrained(path)
    return model.eval()


def qwen2(path: Path, seed: int) -> PreTrainedModel:
    """The form of gte-Qwen2. transformers ignores the entry, so the test gives it the mask."""
    model = Qwen2Model(Qwen2Config(**BASE))
    randomised(model, seed).save_pretrained(path)
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_causal": False}))
    return model.eval()


def load(path: Path, **options: Any) -> NativeDecoder:
    config = ModelConfig(model=str(path), dtype="float32")
    info = read_model_info(path)
    model = load_model(config, info, device="cpu", max_model_len=128, **options)
    assert isinstance(model, NativeDecoder)
    return model


def hidden_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    masks = {}
    if isinstance(model, Qwen2Model):
        masks = {"attention_mask": torch.zeros(1, 1, len(tokens), len(tokens))}
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), **masks).last_hidden_state[0]
    return found


@pytest.mark.parametrize("make", [gemma, qwen2])
def test_tokens_see_later_tokens(make: Any, tmp_path: Path, seed: int) -> None:
    theirs, texts = make(tmp_path, seed), texts_of(seed)
    model = load(tmp_path, pools=True)
    assert not model.is_causal and not model.can_be_recorded
    got = embed_tokens(model, texts, seed=seed)
    for text, tokens in texts.items():
        wanted = hidden_of(theirs, tokens)
        assert (got[text] - wanted).abs().max() < 1e-5 * wanted.abs().max(), text
