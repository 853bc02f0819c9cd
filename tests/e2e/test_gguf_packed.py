"""GGUF files of many types: their matrices stay packed, and nothing about a batch changes tokens.

Queries, keys and values of a layer are of three types, so that their products are joined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.gguf_models import WIDE_FAMILIES, WIDE_GENERAL, GgufModels, Kind
from e2e.references import (
    Reference,
    compare,
    engine_for,
    generate,
    pool_for,
    prompts,
    run,
    run_several,
)
from e2e.tiny_models import reference
from support.box_gguf import box_as_gguf

from engine import LLM, EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from engine.core.replay import replay

PROMPTS = prompts()[1:5]
NUM_NEW = 10
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
MODES: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "chunks": {"max_num_batched_tokens": 8, "max_num_seqs": 4, "async_scheduling": True},
    "drafts": {"speculative_config": DRAFTS},
    "process": {"multiprocess": True},
}


@pytest.fixture(scope="module")
def gguf_models(tmp_path_factory: pytest.TempPathFactory) -> GgufModels:
    return GgufModels(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("name", [*WIDE_FAMILIES, *WIDE_GENERAL])
def test_tokens_are_those_of_transformers(name: str, gguf_models: GgufModels, tally) -> None:
    """With chunks, drafts, several answers of requests that are preempted, and prefixes that are
    found again."""
    model = gguf_models.mixed(name)
    theirs = reference(model.twin)
    answers = [generate(theirs, ids, NUM_NEW) for ids in PROMPTS]
    right = Reference(PROMPTS, [each[0] for each in answers], [each[1] for each in answers])
    options = {
        "dtype": "float32",
        "block_size": 4,
        "max_num_batched_tokens": 16,
        "speculative_config": DRAFTS,
    }
    with engine_for(str(model.file), **options) as engine:
        size = pool_for(engine, [max(map(len, PROMPTS)) + NUM_NEW]) * 5 // 4
        tokens, _ = run(engine, PROMPTS, NUM_NEW)
        compare(right, tokens, tally)
        again, cached = run(engine, PROMPTS, NUM_NEW)
        compare(right, again, tally)
        assert max(cached) >= 32
    with engine_for(str(model.file), **options, num_kv_blocks=size) as engine:
        for answers in run_several(engine, PROMPTS, NUM_NEW):
            compare(right, answers, tally)
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            name, mode, marks=[pytest.mark.slow] * ((row + column) % len(WIDE_FAMILIES) > 0)
        )
        for row, name in enumerate(WIDE_FAMILIES)
        for column, mode in enumerate(MODES)
    ],
)
def test_tokens_in_bfloat16_do_not_depend_on_the_batch(
    name: str, mode: str, gguf_models: GgufModels
) -> None:
    path = str(gguf_models.mixed(name).file)
    with engine_for(path, dtype="bfloat16") as engine:
        wanted, _ = run(engine, PROMPTS, NUM_NEW)
        assert run(engine, PROMPTS, NUM_NEW)[0] == wanted
    with engine_for(path, dtype="bfloat16", **MODES[mode]) as engine:
        assert run(engine, PROMPTS, NUM_NEW)[0] == wanted


def test_grammars_and_the_replay_of_a_step_log(tmp_path: Path) -> None:
    path, log = tmp_path / "box.gguf", tmp_path / "steps.log"
    box_as_gguf(path, Kind.Q4_0, {"attn_v": Kind.Q5_1, "token_embd": Kind.Q8_0})
    sizes = {"num_threads": 1, "max_model_len": 128, "log_level": "error"}
    form = StructuredOutputsParams(regex=r"[0-9]{3}-[a-z]{4}")
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=24, structured_outputs=form)
    args = EngineArgs(model=str(path), step_log=log, num_kv_blocks=10, **sizes)
    with LLMEngine.from_engine_args(args) as engine:
        for number in range(4):
            engine.add_request(str(number), "A number: " * (1 + 2 * number), params)
        texts = {}
        while engine.has_unfinished_requests():
            texts |= {out.request_id: [one.text for one in out.outputs] for out in engine.step()}
    found = [text for both in texts.values() for text in both]
    assert len(found) == 8
    assert all(len(text) == 8 and text[:3].isdigit() for text in found), texts
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_requests == 8  # one for each answer
    with LLM(str(path), speculative_config=DRAFTS, num_kv_blocks=200, **sizes) as llm:
        found = llm.generate(["A number: "], params, use_tqdm=False)
        assert [one.text for one in found[0].outputs] == texts["0"]
