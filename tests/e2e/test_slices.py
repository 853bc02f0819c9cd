"""Ranks that each compute a part of a model agree with one that computes all of it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from e2e.paged import PagedRun
from e2e.tiny_models import CASES, VOCAB, TinyModels
from support.rank_threads import run_ranks

from engine.config.model import ModelConfig, read_model_info
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model, native_spec
from engine.models.sharding import obstacles
from engine.parallel.collectives import Alone, Collectives

LONGEST = 128
TOKENS = 23  # of a prompt
NEW = 6  # tokens that are generated


class Answer(NamedTuple):
    """What one rank computes: logits of a prompt in chunks, and greedy tokens after it."""

    logits: torch.Tensor
    tokens: list[int]


def load(path: str | os.PathLike, ranks: Collectives, **options: Any) -> NativeDecoder:
    config = ModelConfig(model=str(path), **{"dtype": "float32", **options})
    info = read_model_info(path)
    model = load_model(config, info, device="cpu", max_model_len=LONGEST, collectives=ranks)
    assert isinstance(model, NativeDecoder)
    return model


def answer(
    path: str | os.PathLike, ranks: Collectives, prompt: list[int], **options: Any
) -> Answer:
    run = PagedRun(load(path, ranks, **options))
    logits = run.prefill("a", prompt, 9)
    tokens = [int(logits[-1].argmax())]
    for _ in range(NEW - 1):
        step = run.step({"a": tokens[-1:]})["a"]
        tokens.append(int(step[-1].argmax()))
        logits = torch.cat([logits, step])
    return Answer(logits, tokens)


def compare(path: str | os.PathLike, sizes: Sequence[int], seed: int, **options: Any) -> None:
    prompt = random.Random(seed).choices(range(VOCAB), k=TOKENS)
    alone = answer(path, Alone(), prompt, **options)
    for size in sizes:
        answers = run_ranks(size, lambda ranks: answer(path, ranks, prompt, **options))
        for rank, one in enumerate(answers):
            assert torch.equal(one.logits, answers[0].logits), f"rank {rank} of {size} differs"
        error = (answers[0].logits - alone.logits).abs().max() / alone.logits.abs().max()
        assert error < 1e-5, f"{size} ranks are off by {error:.2e} of the largest logit"
        assert answers[0].tokens == alone.tokens, f"{size} ranks write other tokens"


FEW = {
    "llama",
    "llama-mha-tied-biased",
    "gemma2",
    "olmo2",
    "qwen3-moe",
    "lfm2",
    "qwen3-next",
    "granite-hybrid-moe",
    "jamba-moe",
}
"""Families that differ in what is divided; the others are slow."""
EVERY = [pytest.param(name, marks=() if name in FEW else [pytest.mark.slow]) for name in CASES]


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_compute_what_one_does(tiny_models: TinyModels, name: str, seed: int) -> None:
    compare(tiny_models.path(name), [2], seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_more_ranks_compute_what_one_does(tiny_models: TinyModels, name: str, seed: int) -> None:
    path = tiny_models.path(name)
    spec = native_spec(read_model_info(path))
    assert spec is not None
    sizes = [n for n in range(3, 9) if next(obstacles(spec, n, {}), None) is None]
    print(f"{name}: {sizes}")
    compare(path, sizes, seed)


def test_parts_of_odd_vocabularies_and_mlps(tmp_path: Path, seed: int) -> None:
    """Weights are made up, and are the same whatever the number of ranks."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB + 1,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    compare(tmp_path, [3, 6], seed, load_format="dummy")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("llama-mha-tied-biased", {"quantization": "int8"}),
        ("qwen3.5", {"quantization": "int8", "dtype": "bfloat16"}),
        ("gemma2", {"quantization": "int4", "dtype": "bfloat16"}),
        ("olmo2", {"output_layer_quantization": "int8", "dtype": "bfloat16"}),
    ],
    ids=str,
)
def test_narrow_numbers_stay_near(
    tiny_models: TinyModels, name: str, options: dict[str, str], seed: int
) -> None:
    """Ranks round their parts of sums, and quantise their parts of rows."""
    prompt, path = random.Random(seed).choices(range(VOCAB), k=TOKENS), tiny_models.path(name)
    exact, alone = answer(path, Alone(), prompt), answer(path, Alone(), prompt, **options)
    one, other = run_ranks(2, lambda ranks: answer(path, ranks, prompt, **options))
    assert torch.equal(one.logits, other.logits)
    near, usual = (
        torch.cosine_similarity(each.logits[:TOKENS], exact.logits[:TOKENS], dim=-1)
        for each in (one, alone)
    )
    print(f"{name} {options}: cosine {near.mean():.5f}, one worker {usual.mean():.5f}")
    assert near.mean() > 0.99 or 1 - near.mean() < 2 * (1 - usual.mean())
