"""Drafts change no token of any family: chunks, preemption, prefix hits, two steps in flight."""

from __future__ import annotations

from typing import Any

import pytest
from e2e.general_models import make_general_model
from e2e.references import Reference, Tally, compare, engine_for, generate, prompts, run
from e2e.test_equality import MODES
from e2e.test_ngram import NGRAM
from e2e.test_suffix import SUFFIX
from e2e.tiny_models import CASES, TinyModels

METHODS = ("ngram", "suffix", "draft_model")  # of which all that is proposed is verified
NUM_NEW = 24
QUICK = ("qwen3-window-biased",)


# Transformers takes other tables of positions from a length on that is passed here, for new tokens
# alone: there the engine without drafts says what is right.
CHANGING = ("llama-longrope", "phi3-longrope")
FAMILIES = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tiny_models: TinyModels) -> tuple[str, Reference]:
    made = [(ids * 3)[:50] for ids in prompts()]  # texts that say things again
    path = str(tiny_models.path(request.param))
    if request.param in CHANGING:
        with engine_for(path, dtype="float32") as engine:
            said, _ = run(engine, made, NUM_NEW)
        return path, Reference(made, said, [[1.0] * NUM_NEW for _ in made])
    told = [generate(tiny_models.reference(request.param), ids, NUM_NEW) for ids in made]
    return path, Reference(made, *map(list, zip(*told, strict=True)))


def drafting(method: str, path: str) -> dict[str, Any]:
    """Options for drafts; a draft model is the model itself."""
    if method == "draft_model":
        own = {"model": path, "num_speculative_tokens": 3, "adaptive": False}
        return {"speculative_config": {"method": method, **own}}
    return {"ngram": NGRAM, "suffix": SUFFIX}[method]


@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_as_transformers(
    case: tuple[str, Reference], method: str, tally: Tally
) -> None:
    path, reference = case
    for mode in ("batched", "chunk-7", "preempted-depth-2"):
        options = {**MODES[mode], **drafting(method, path)}
        with engine_for(path, dtype="float32", **options) as engine:
            for _ in range(2):  # from a warm cache, if there is one, and with what was said before
                tokens, _ = run(engine, reference.prompts, NUM_NEW)
                compare(reference, tokens, tally)
            counters = engine.stats().counters
            assert counters["drafts.num_drafts"] > 0, mode
            if method == "draft_model":
                right = counters["drafts.num_accepted_tokens"]
                assert right == counters["drafts.num_draft_tokens"], mode


@pytest.mark.parametrize("name", ["gpt2", "cohere"])
def test_a_model_that_runs_through_transformers_drafts_too(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = str(make_general_model(name, tmp_path_factory.mktemp("general")))
    made, told = prompts(), []
    for options in ({}, drafting("draft_model", path)):
        with engine_for(path, dtype="float32", **options) as engine:
            told.append(run(engine, made, NUM_NEW)[0])
            counters = engine.stats().counters
    assert told[0] == told[1]
    assert counters["drafts.num_accepted_tokens"] == counters["drafts.num_draft_tokens"] > 0
