"""Engines with packed weights on a CPU: their tokens, alone and with other requests and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.paged import PagedRun
from e2e.quantized_models import Written
from e2e.references import (
    Reference,
    Tally,
    compare,
    engine_for,
    generate,
    prompts,
    run,
    run_several,
    tightest,
)
from e2e.test_forward import load, reference_logits, tokens_of
from e2e.test_quantized import cosine, written

from kernels.cpu.recording import Recording
from kernels.meta import AttentionMeta

NAMES = ("awq-tied-kept", "gptq-8-desc-act", "fp8-blocks", "awq-experts", "ct-w8a8")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "adaptive": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    root = tmp_path_factory.mktemp("packed")
    return {name: written(root, name) for name in NAMES}


def tokens(path: Path, made: list[list[int]], **options: Any) -> list[list[int]]:
    with engine_for(str(path), **options) as engine:
        return run(engine, made)[0]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_float32_are_those_of_transformers(models: dict[str, Written], name: str) -> None:
    """With prefixes that are found again, in a process of its own, and in chunks with drafts,
    several answers, and a pool of KV blocks so small that requests are preempted."""
    made, tally = prompts(), Tally()
    said = [generate(models[name].reference, ids) for ids in made]
    reference = Reference(made, [one for one, _ in said], [margins for _, margins in said])
    with engine_for(str(models[name].path), dtype="float32") as engine:
        compare(reference, run(engine, made)[0], tally)
        again, cached = run(engine, made)
        compare(reference, again, tally)
        assert max(cached) >= 32
        blocks = tightest(engine, max(map(len, made)) + 20)
    small = {"num_kv_blocks": blocks, "max_num_batched_tokens": 16, "speculative_config": NGRAM}
    with engine_for(str(models[name].path), dtype="float32", **small) as engine:
        for answers in run_several(engine, made):
            compare(reference, answers, tally)
        assert engine.stats().num_preemptions > 0
    if name == NAMES[0]:
        with engine_for(str(models[name].path), dtype="float32", multiprocess=True) as engine:
            compare(reference, run(engine, made)[0], tally)
    assert tally.ties < tally.compared // 20


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_stays_near(models: dict[str, Written], name: str, exact: bool, seed: int) -> None:
    given = tokens_of(seed, 23)
    wanted = reference_logits(models[name].reference, given)
    model = load(models[name].path, dtype="bfloat16", quantize_activations=not exact)
    assert cosine(PagedRun(model).prefill("a", given), wanted) > (0.999 if exact else 0.98)


WAYS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "in chunks": {"max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "eager": {"enforce_eager": True},
    "drafts": {"speculative_config": NGRAM},
    "preempted": {"num_kv_blocks": 0},
    "two threads": {"num_threads": 2},
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES[:2])
def test_bits_depend_on_nothing_but_the_request(
    models: dict[str, Written], name: str, exact: bool
) -> None:
    made, path = prompts(), models[name].path
    options = {"dtype": "bfloat16", "quantize_activations": not exact}
    wanted = tokens(path, made, **options)
    for way, more in WAYS.items():
        if "num_kv_blocks" in more:
            with engine_for(str(path), **options) as engine:
                more = {"num_kv_blocks": tightest(engine, max(map(len, made)) + 20)}
        assert tokens(path, made, **options, **more) == wanted, way


def test_a_draft_model_with_packed_weights_changes_no_token(models: dict[str, Written]) -> None:
    path, made = models["awq-tied-kept"].path, prompts()
    drafts = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    for exact in (False, True):
        options = {"dtype": "bfloat16", "quantize_activations": not exact}
        wanted = tokens(path, made, **options)
        assert tokens(path, made, **options, speculative_config=drafts) == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_are_recorded(
    models: dict[str, Written], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps, also with activation order, for which inputs are gathered."""
    replayed, launch = set(), Recording.launch

    def seen(self: Recording, meta: AttentionMeta) -> None:
        replayed.add(len(self.given))
        launch(self, meta)

    monkeypatch.setattr(Recording, "launch", seen)
    for name in NAMES[:3]:
        for exact in (False, True):
            replayed.clear()
            tokens(models[name].path, prompts(), dtype=dtype, quantize_activations=not exact)
            assert replayed, (name, exact)
