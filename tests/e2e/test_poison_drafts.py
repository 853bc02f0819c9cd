"""Requests that hurt, beside healthy ones with grammars and with drafts, who must not notice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from engine import EngineArgs, LLMEngine, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.messages.requests import RequestOutput
from engine.spec import compute
from engine.worker import worker

FEW = {"num_speculative_tokens": 3, "adaptive": False}
DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", **FEW, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "draft_model": {"method": "draft_model", "model": str(BOX_MODEL), **FEW},
}
NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 90, "maxItems": 99}
FORMS: tuple[dict[str, Any], ...] = (
    {"regex": "([a-z]{2,7} ){90,99}"},
    {"json": NUMBERS, "disable_any_whitespace": True},
    {"grammar": 'start: "[" start "]" /[0-9]{1,3}/ start | "."\n'},
)
RAISES, NAN = 4001, 4002  # tokens that a model cannot bear, and of which it makes NaN
PROMPT = [40, 41, 42, 40, 41, 42, 40, 41]
CHOICE = StructuredOutputsParams(choice=["yes", "no"])


def engine_of(**options: Any) -> LLMEngine:
    args = EngineArgs(
        model=str(BOX_MODEL),
        dtype="float32",
        num_threads=1,
        num_kv_blocks=400,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=True,
        log_level="error",
        **options,
    )
    return LLMEngine.from_engine_args(args)


def late(params: SamplingParams, prompt: list[int]) -> Callable[..., Any] | None:
    """Raises, or makes NaN of the logits, once a request has said five tokens."""
    sick = (params.extra_args or {}).get("sick")
    if sick is None:
        return None

    def process(said: list[int], logits: Any) -> Any:
        if len(said) >= 5 and sick == "raises":
            raise ArithmeticError("no sixth token")
        if len(said) >= 5:
            logits[:] = torch.nan
        return logits

    return process


def free(seed: int = 0, **options: Any) -> SamplingParams:
    options = {"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, **options}
    return SamplingParams(seed=seed, **options)


def healthy() -> dict[str, tuple[list[int], SamplingParams]]:
    forms = [StructuredOutputsParams(**form) for form in FORMS]
    asked = [free(seed, structured_outputs=f, ignore_eos=False) for seed, f in enumerate(forms)]
    asked += [free(8), free(9, temperature=0.0), free(10, logprobs=1)]
    return {f"healthy {n}": (PROMPT, params) for n, params in enumerate(asked)}


SICK: dict[str, tuple[list[int], SamplingParams, str]] = {
    "a token that it cannot bear": ([*PROMPT, RAISES], free(1), "cannot bear"),
    "the same with a grammar": (
        [RAISES, *PROMPT],
        free(1, structured_outputs=CHOICE, ignore_eos=False),
        "cannot bear",
    ),
    "logits that are NaN": ([*PROMPT, NAN], free(2), "NaN"),
    "a processor that raises": (PROMPT, free(3, extra_args={"sick": "raises"}), "no sixth token"),
    "a processor that makes NaN": (PROMPT, free(4, extra_args={"sick": "NaN"}), "NaN"),
    "the same with a grammar, of NaN": (
        PROMPT,
        free(
            5,
            structured_outputs=StructuredOutputsParams(**FORMS[0]),
            ignore_eos=False,
            extra_args={"sick": "NaN"},
        ),
        "NaN",
    ),
    "a grammar that cannot go on": (
        PROMPT,
        free(6, structured_outputs=CHOICE, ignore_eos=False, allowed_token_ids=[5, 6]),
        "no token is left",
    ),
    "a grammar that is none": (
        PROMPT,
        free(7, structured_outputs=StructuredOutputsParams(regex="(ab"), ignore_eos=False),
        "grammar cannot be used",
    ),
}


def vulnerable(
    load: Callable[..., Any], raises: int, nan: int, hurt: Counter[int]
) -> Callable[..., Any]:
    """Loads a model that raises where one token is computed, and gives NaN behind another. hurt:
    counts how often it came to either."""

    def load_model(*args: Any, **options: Any) -> Any:
        model = load(*args, **options)
        embedding = model.embedding

        def embed(ids: torch.Tensor, embeds: Any = None) -> torch.Tensor:
            hurt.update(token for token in (raises, nan) if (ids == token).any())
            if (ids == raises).any():
                raise RuntimeError(f"cannot bear {raises}")
            x: torch.Tensor = embedding(ids, embeds)
            x[ids == nan] = torch.nan
            return x

        model.embedding = embed
        return model

    return load_model


@pytest.fixture
def hurt(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """A model that is hurt by two tokens, and draft models by two others; how often that was."""
    counts: Counter[int] = Counter()
    of_model = vulnerable(worker.load_model, RAISES, NAN, counts)
    of_drafts = vulnerable(compute.load_model, RAISES + 10, NAN + 10, counts)
    monkeypatch.setattr(worker, "load_model", of_model)
    monkeypatch.setattr(compute, "load_model", of_drafts)
    return counts


def told(engine: LLMEngine, asked: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, Any]:
    """The last output of each request; they come one after the other, while others run."""
    last: dict[str, RequestOutput] = {}
    for name, (prompt, params) in asked.items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        last |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


@cache
def alone() -> dict[str, tuple[int, ...]]:
    """What healthy requests say each for itself, without drafts; of all that are asked below."""
    asked = {**healthy(), **hurting_drafts()}
    with engine_of() as engine:
        found = {name: told(engine, {name: one})[name] for name, one in asked.items()}
    return {name: tuple(output.outputs[0].token_ids) for name, output in found.items()}


def hurting_drafts() -> dict[str, tuple[list[int], SamplingParams]]:
    """Healthy for the model; a draft model cannot bear their prompts."""
    forms = [None, StructuredOutputsParams(**FORMS[1])]
    return {
        f"drafts {token} {form is None}": (
            [*PROMPT, token, 7],
            free(token, structured_outputs=form, ignore_eos=form is None),
        )
        for token in (RAISES + 10, NAN + 10)
        for form in forms
    }


@pytest.mark.parametrize(
    ("method", "overlapped"),
    [
        pytest.param(method, overlapped, marks=[pytest.mark.slow] * (number % 2 != overlapped))
        for number, method in enumerate(DRAFTS)
        for overlapped in (False, True)
    ],
)
def test_only_the_sick_fail_and_are_told_why(
    method: str, overlapped: bool, hurt: Counter[int]
) -> None:
    sick = {name: (prompt, params) for name, (prompt, params, _) in SICK.items()}
    mixed = [*hurting_drafts().items(), *healthy().items(), *sick.items()]
    mixed = mixed[::2] + mixed[1::2]
    with engine_of(
        speculative_config=DRAFTS[method], async_scheduling=overlapped, logits_processors=[late]
    ) as engine:
        for _ in range(2):  # again, with what the first ones have left in the cache
            found = told(engine, dict(mixed))
            for name, tokens in alone().items():
                assert tuple(found[name].outputs[0].token_ids) == tokens, name
                assert found[name].outputs[0].finish_reason in ("length", "stop"), name
            for name, (_, _, reason) in SICK.items():
                assert found[name].outputs[0].finish_reason == "error", name
                assert reason in str(found[name].outputs[0].error), (
                    name,
                    found[name].outputs[0].error,
                )
        stats = engine.stats()
        assert stats.counters["drafts.num_accepted_tokens"] > 0
        tokens = (RAISES, NAN, RAISES + 10, NAN + 10) if method == "draft_model" else (RAISES, NAN)
        assert all(hurt[token] for token in tokens), hurt
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
