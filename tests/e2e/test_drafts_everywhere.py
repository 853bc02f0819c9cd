"""Drafts change no token of any family: chunks, preemption, prefix hits, two steps in flight."""

from __future__ import annotations

import pytest
from e2e.references import Reference, Tally, compare, engine_for, generate, prompts, run
from e2e.test_equality import MODES
from e2e.test_ngram import NGRAM
from e2e.test_suffix import SUFFIX
from e2e.tiny_models import CASES, TinyModels

METHODS = {"ngram": NGRAM, "suffix": SUFFIX}  # of which all that is proposed is verified
NUM_NEW = 24
QUICK = ("qwen3-window-biased", "olmo2", "granite")  # beside those that other files have


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


@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_as_transformers(
    case: tuple[str, Reference], method: str, tally: Tally
) -> None:
    path, reference = case
    for mode in ("batched", "chunk-7", "preempted-depth-2"):
        with engine_for(path, dtype="float32", **MODES[mode], **METHODS[method]) as engine:
            for _ in range(2):  # from a warm cache, if there is one, and with what was said before
                tokens, _ = run(engine, reference.prompts, NUM_NEW)
                compare(reference, tokens, tally)
            assert engine.stats().counters["drafts.num_drafts"] > 0, mode
