"""Schemas that a grammar cannot hold, with a model: in every mode the same answers, all valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e.test_structured import answers, make
from e2e.test_structured_drafts import MODES, SPEC
from jsonschema import Draft202012Validator

from engine import LLMEngine, SamplingParams, StructuredOutputsParams
from engine.core.replay import replay

COLOURS = {"enum": ["red", "green", "blue"]}
THING = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["round", "square"]},
        "sides": {"type": "integer", "minimum": 0, "maximum": 4},
        "colours": {"type": "array", "items": COLOURS, "uniqueItems": True, "minItems": 2},
        "mark": {"type": "string", "maxLength": 6, "not": {"enum": ["", "none"]}},
    },
    "required": ["kind", "colours"],
    "additionalProperties": False,
    "minProperties": 3,
    "if": {"properties": {"kind": {"const": "square"}}},
    "then": {"properties": {"sides": {"const": 4}}, "required": ["sides"]},
}
CHOICE = {
    "oneOf": [
        {"required": ["a"], "properties": {"a": {"type": "integer", "multipleOf": 3}}},
        {"required": ["b"], "properties": {"b": {"type": "boolean"}}},
    ],
    "type": "object",
    "propertyNames": {"enum": ["a", "b"]},
    "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 40},
}
ALL = (THING, CHOICE)


def form(schema: dict[str, Any], seed: int, **options: Any) -> SamplingParams:
    asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return SamplingParams(
        structured_outputs=asked, temperature=1.0, seed=seed, max_tokens=120, **options
    )


def everything() -> list[SamplingParams]:
    own = [form(schema, seed) for seed, schema in enumerate(ALL * 4)]
    return [*own, form(THING, 30, n=3), form(CHOICE, 31, logprobs=1)]


def told(engine: LLMEngine, asked: list[SamplingParams]) -> list[Any]:
    return [(out.text, list(out.token_ids), out.finish_reason) for out in answers(engine, asked)]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    with make(dtype="float32") as engine:
        return told(engine, everything())


def test_answers_are_valid(wanted: list[Any]) -> None:
    for seed, (text, _, reason) in enumerate(wanted[:8]):
        assert reason == "stop", text
        assert Draft202012Validator(ALL[seed % 2]).is_valid(json.loads(text)), text


@pytest.mark.parametrize("mode", ["preempted", "by n-grams too"])
def test_answers_are_the_same_in_every_mode(mode: str, wanted: list[Any]) -> None:
    with make(dtype="float32", **{"speculative_config": SPEC, **MODES[mode]}) as engine:
        assert told(engine, everything()) == wanted


def test_a_step_log_is_replayed(tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    with make(step_log=str(log), dtype="float32", **MODES["preempted"]) as engine:
        told(engine, everything())
    assert replay(log).difference is None


def test_a_dead_end_is_an_error_that_names_the_keyword() -> None:
    """Four colours are not to be had of three, which no grammar sees."""
    wrong = {"type": "array", "items": COLOURS, "uniqueItems": True, "minItems": 4}
    with make(dtype="float32") as engine:
        asked = [form(wrong, 1), form(THING, 2)]
        bad, good = answers(engine, asked)
    assert bad.finish_reason == "error" and "uniqueItems" in str(bad.error)
    assert good.finish_reason == "stop"
