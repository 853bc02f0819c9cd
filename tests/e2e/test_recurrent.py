"""Models with recurrent states give the same tokens whatever the engine does meanwhile."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import WITH_STATES as GENERAL
from e2e.general_models import make_general_model
from e2e.references import engine_for, prompts
from e2e.test_draft_model import ROUGH
from e2e.test_ngram import NGRAM
from e2e.test_poison_drafts import vulnerable
from e2e.test_suffix import SUFFIX
from e2e.tiny_models import CASES, Case, TinyModels, config_of, random_model, save

from engine import LLM, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.worker import worker

WITH_STATES = ("Lfm2", "Qwen3Next", "Qwen3_5", "GraniteMoeHybrid", "Bamba", "NemotronH")
WITH_STATES += ("FalconH1", "Jamba", "Mamba", "FalconMamba")
NAMES = [name for name in CASES if CASES[name].family.startswith(WITH_STATES)]
# The first configuration of each family.
FIRST = list({CASES[name].family: name for name in reversed(NAMES)}.values())[::-1]
# Few tokens are allowed, so that some drafts are right.
SEEDED = [
    SamplingParams(
        temperature=0.7, seed=n, max_tokens=40, ignore_eos=True, n=n, allowed_token_ids=[5, 6, 7]
    )
    for n in (1, 3, 1, 2, 1, 1)
]
# A draft model drafts any token, so it needs requests that may use any.
FREE = [
    SamplingParams(temperature=0.7, seed=n, max_tokens=40, ignore_eos=True, n=n)
    for n in (1, 3, 1, 2, 1, 1)
]
TIGHT = {"num_kv_blocks": 36, "async_scheduling": True}
WAYS: dict[str, dict[str, Any]] = {
    "chunks, preempted, two in flight": {**TIGHT, "max_num_batched_tokens": 17},
    "drafts, preempted": {**NGRAM, **TIGHT},
    "together": {},
    "chunks of 5": {"max_num_batched_tokens": 5, "max_num_seqs": 5},
    "two in flight": {"async_scheduling": True, "max_num_batched_tokens": 33},
    "drafts in chunks": {**NGRAM, "max_num_batched_tokens": 13, "async_scheduling": True},
    "core in a process": {"multiprocess": True},
    "drafts of a suffix tree": SUFFIX,
    "drafts of a draft model": {"speculative_config": ROUGH},
}
RAISES, NAN = 291, 292
DIGITS = r"[0-9]{2,6}(-[a-f]{3})?"


def texts() -> list[list[int]]:
    """Prompts with the allowed tokens in many orders."""
    return [[*ids[:40], *(5 + (i * i + i // 3) % 3 for i in range(40))] for ids in prompts()]


def told(
    path: str, *, may_be_any: bool = False, **options: Any
) -> tuple[list[list[list[int]]], dict[str, float]]:
    """The tokens of each answer of each seeded request, all added at once; and the counters."""
    requests = zip(texts(), FREE if may_be_any else SEEDED, strict=True)
    with engine_for(path, dtype="float32", **options) as engine:
        for number, (ids, params) in enumerate(requests):
            engine.add_request(str(number), ids, params)
        last = {}
        while engine.has_unfinished_requests():
            for out in engine.step():
                last[int(out.request_id)] = out
        stats = engine.stats()
        counters = {**stats.counters, "preemptions": stats.num_preemptions}
    return [[list(one.token_ids) for one in last[n].outputs] for n in sorted(last)], counters


def few(always: Iterable[str]) -> list[Any]:
    """All models, of which only some are tested always."""
    chosen = set(always)
    return [
        pytest.param(name, marks=[] if name in chosen else [pytest.mark.slow]) for name in NAMES
    ]


def each_in_one_way() -> Iterator[Any]:
    """Each model in each way; always, each family in one way."""
    for name in NAMES:
        own = FIRST.index(name) % len(WAYS) if name in FIRST else None
        for place, way in enumerate(WAYS):
            yield pytest.param(name, way, marks=[] if place == own else [pytest.mark.slow])


@cache
def alone(path: str, may_be_any: bool = False) -> list[list[list[int]]]:
    """The tokens of requests that run one after the other."""
    tokens, _ = told(path, may_be_any=may_be_any, max_num_seqs=1, enforce_eager=True)
    assert [len(answers) for answers in tokens] == [params.n for params in SEEDED]
    return tokens


def check_way(path: str, way: str) -> None:
    """Compare the tokens of requests that run in a way with those of requests that run alone."""
    options = dict(WAYS[way])
    has_model = options.get("speculative_config") is ROUGH
    if has_model:
        options["speculative_config"] = {**ROUGH, "model": path}
    tokens, counters = told(path, may_be_any=has_model, **options)
    assert tokens == alone(path, has_model)
    assert "preempted" not in way or counters["preemptions"] > 0
    if "drafts" in way:
        accepted = counters["drafts.num_accepted_tokens"]
        assert 0 < accepted < counters["drafts.num_draft_tokens"]


@pytest.mark.parametrize(("name", "way"), list(each_in_one_way()))
def test_seeded_requests_sample_the_same_in_every_way(
    name: str, way: str, tiny_models: TinyModels
) -> None:
    check_way(str(tiny_models.path(name)), way)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERAL)
def test_modules_of_transformers_sample_the_same_in_every_way(name: str, tmp_path: Path) -> None:
    path = str(make_general_model(name, tmp_path))
    for way in WAYS:
        if way != "drafts of a draft model":
            check_way(path, way)


@pytest.mark.parametrize("name", few(["lfm2", "mamba2"]))
def test_a_run_replays_to_identical_plans(
    name: str, tiny_models: TinyModels, tmp_path: Path
) -> None:
    log = tmp_path / "steps.log"
    told(str(tiny_models.path(name)), step_log=log, **NGRAM, **TIGHT)
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_steps > 20


def test_too_little_memory_for_copies_of_states_means_fewer_drafts(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    path, log = str(tiny_models.path("lfm2")), tmp_path / "steps.log"
    little = {**NGRAM, "memory_utilization": 1e-9}
    with engine_for(path, **little) as engine:
        speculative = engine.session.client.decided.scheduler.speculative_config
    assert speculative == {**NGRAM["speculative_config"], "num_speculative_tokens": 1}
    tokens, counters = told(path, step_log=log, **little, **TIGHT)
    assert tokens == told(path)[0]
    assert counters["drafts.num_accepted_tokens"] > 0
    assert replay(log).difference is None


@pytest.mark.parametrize("options", [{}, {**NGRAM, "async_scheduling": True}], ids=["", "drafts"])
@pytest.mark.parametrize("name", few(["lfm2", "falcon-h1", "qwen3.5"]))
def test_requests_that_fail_hurt_no_others(
    name: str, options: dict[str, Any], tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One raises, so that its step is computed again in halves; one leaves NaN in its state, whose
    slot another request takes over."""
    path, hurt = str(tiny_models.path(name)), Counter[int]()
    healthy = texts()
    params = SamplingParams(
        temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=list(range(3, 290))
    )
    with engine_for(path, dtype="float32", max_num_seqs=1) as engine:
        right = [told_greedy(engine, [ids], params)[0] for ids in healthy]
    loaded = vulnerable(worker.load_model, RAISES, NAN, hurt)
    monkeypatch.setattr(worker, "load_model", loaded)
    sick = [[5, 6, 7, RAISES, 9], [8, NAN, 4, 4], [*range(3, 30), NAN], [RAISES]]
    mixed = [ids for pair in zip(healthy, [*sick, *sick[:2]], strict=True) for ids in pair]
    with engine_for(path, dtype="float32", max_num_seqs=4, **options) as engine:
        found = told_greedy(engine, mixed, params)
    assert found[::2] == right
    assert found[1::2] == [None] * len(healthy)
    assert hurt[RAISES] and hurt[NAN]


def told_greedy(
    engine: Any, asked: list[list[int]], params: SamplingParams
) -> list[list[int] | None]:
    """The tokens of each prompt; ``None`` for a request that failed."""
    last = {}
    for number, ids in enumerate(asked):
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
        last |= {int(out.request_id): out.outputs[0] for out in engine.step()}
    while engine.has_unfinished_requests():
        last |= {int(out.request_id): out.outputs[0] for out in engine.step()}
    outs = [last[number] for number in range(len(asked))]
    return [None if out.finish_reason == "error" else list(out.token_ids) for out in outs]


@pytest.fixture(params=few(["lfm2", "mamba"]))
def model_with_texts(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tiny model with the tokenizer of the model in the package."""
    path = tmp_path / "model"
    config = json.loads((BOX_MODEL / "config.json").read_text())
    case = CASES[request.param]
    options = {**case.options, "vocab_size": config["vocab_size"]}
    save(random_model(config_of(Case(case.family, options)), seed=3), path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BOX_MODEL / name, path)
    return path


def test_texts_follow_grammars_with_and_without_drafts(model_with_texts: Path) -> None:
    structured = StructuredOutputsParams(regex=DIGITS)
    asked = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=24, structured_outputs=structured)
        for seed in range(6)
    ]
    said = []
    for options in (
        {},
        {"speculative_config": {"method": "grammar", "num_speculative_tokens": 3}},
        {**NGRAM, "async_scheduling": True},
    ):
        sizes = {"max_model_len": 128, "num_kv_blocks": 64, "num_threads": 1}
        with LLM(str(model_with_texts), log_level="error", **sizes, **options) as llm:
            outs = llm.generate(["Some digits: "] * len(asked), asked)
        said.append([out.outputs[0].text for out in outs])
    assert said[1] == said[0] == said[2]
    assert all(re.fullmatch(DIGITS, text) for text in said[0])
