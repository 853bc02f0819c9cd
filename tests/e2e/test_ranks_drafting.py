"""Two ranks verify drafts of every method, also with windows, states and grammars, as one worker
does: in chunks, preempted, and from a warm prefix cache."""

from __future__ import annotations

from typing import Any

import pytest
from e2e.references import engine_for, prompts, run
from e2e.test_drafts_everywhere import METHODS, drafting
from e2e.test_equality import MODES
from e2e.test_ngram import ASKED, BOX, answers
from e2e.test_tensor_parallel import OTHERS, assert_close
from e2e.tiny_models import TinyModels

from engine import EngineArgs, LLMEngine

pytestmark = pytest.mark.slow
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
NUM_NEW = 24


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3.5", "lfm2"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_without_drafts_of_one_worker(
    tiny_models: TinyModels, name: str, method: str
) -> None:
    path = str(tiny_models.path(name))
    made = [(ids * 3)[:50] for ids in prompts()]  # texts that repeat themselves
    with engine_for(path, dtype="float32") as engine:
        wanted, _ = run(engine, made, NUM_NEW)
    options = {**MODES["preempted-depth-2"], **drafting(method, path), **TWO}
    with engine_for(path, dtype="float32", **options) as engine:
        for _ in range(2):
            assert run(engine, made, NUM_NEW)[0] == wanted
        assert engine.stats().counters["drafts.num_drafts"] > 0


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_grammars_and_scores_are_those_of_one_worker(method: str) -> None:
    params = [*(make() for make in ASKED.values()), *OTHERS]
    with LLMEngine.from_engine_args(EngineArgs(**BOX)) as alone:
        wanted, _ = answers(alone, params)
    options = {**BOX, **TWO, **drafting(method, "")}
    with LLMEngine.from_engine_args(EngineArgs(**options)) as together:
        found, _ = answers(together, params)
        assert together.stats().counters["drafts.num_drafts"] > 0
    assert [each[:2] + each[3:] for each in found] == [each[:2] + each[3:] for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert_close(one.logprobs, other.logprobs)
