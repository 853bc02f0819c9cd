"""The native decoder against transformers: every logit of every family, however a step is cut."""

import os
import random

import pytest
import torch
from e2e.paged import PagedRun
from e2e.tiny_models import CASES, VOCAB, TinyModels

from engine.config.model import ModelConfig, read_model_info
from engine.models.decoder import Decoder
from engine.models.families import FAMILIES
from engine.models.load import load_model
from engine.models.model import Model

LENGTH = 41
MAX_MODEL_LEN = 256


def load(path: str | os.PathLike, max_model_len: int = MAX_MODEL_LEN, **options) -> Model:
    config = ModelConfig(model=str(path), **options)
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
    assert isinstance(model, Decoder)
    reference = tiny_models.reference(name)
    a, b = tokens_of(seed), tokens_of(seed + 1, 29)
    expected = {"a": reference_logits(reference, a), "b": reference_logits(reference, b)}
    for chunk in (None, 1, 7, 16):
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


def test_every_family_has_a_case() -> None:
    assert {f"{case.family}ForCausalLM" for case in CASES.values()} == set(FAMILIES)
