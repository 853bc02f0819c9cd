"""Texts whose form xgrammar follows, from the API to the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from e2e.test_structured import EXACT, answers, make, params

from engine import LLM, LLMEngine, SamplingParams, StructuredOutputsParams
from engine.assets import BOX_MODEL
from engine.core.replay import replay
from engine.structured import xgrammar

WORD = {"type": "string", "pattern": "^[a-z]{2,8}$"}
SIZE = {
    "oneOf": [
        {"type": "integer", "minimum": 0, "maximum": 3},
        {"type": "integer", "minimum": 50, "maximum": 99},
    ]
}
ITEM = {
    "$defs": {"named": {"properties": {"name": WORD}, "required": ["name"]}},
    "type": "object",
    "allOf": [{"$ref": "#/$defs/named"}],
    "properties": {"day": {"type": "string", "format": "date"}, "left": {"type": "boolean"}},
    "required": ["day"],
    "unevaluatedProperties": False,
}
COUNTS = {
    "type": "object",
    "propertyNames": {"pattern": "^[a-z]{2,6}$"},
    "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99},
    "minProperties": 1,
    "maxProperties": 3,
}
FLAGS = {
    "type": "object",
    "properties": {name: {"type": "boolean"} for name in ("open", "free", "new")},
    "minProperties": 1,
    "maxProperties": 2,
}
ASKED: dict[str, dict[str, Any]] = {
    "size": {"json": SIZE},
    "item": {"json": ITEM},
    "item, dense": {"json": ITEM, "disable_any_whitespace": True},
    "counts": {"json": COUNTS},
    "flags": {"json": FLAGS},
}


def form(name: str, seed: int | None, **options: Any) -> SamplingParams:
    asked = StructuredOutputsParams(**ASKED[name], backend="xgrammar")
    temperature = 0.0 if seed is None else 1.0
    options = {"max_tokens": 120, "temperature": temperature, "seed": seed, **options}
    return SamplingParams(structured_outputs=asked, **options)


def everything() -> list[SamplingParams]:
    """With some of llguidance's and some without a form beside them."""
    mixed = [form(name, seed) for seed, name in enumerate([*ASKED, *ASKED])]
    plain = SamplingParams(temperature=1.0, seed=3, max_tokens=30)
    return [*mixed, params("person", 4, max_tokens=120), params("choice", 5), plain]


def test_without_it_a_request_that_names_it_fails_alone_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(xgrammar, "is_installed", lambda: False)
    with make() as engine:
        named, other = answers(engine, [form("flags", 1), params("choice")])
    assert named.error is not None and "backend is 'xgrammar'" in named.error
    assert "pip install metronome-engine[xgrammar]" in named.error
    assert other.finish_reason == "stop"


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    pytest.importorskip("xgrammar")
    with make() as made:
        yield made


@pytest.mark.parametrize("name", ASKED)
def test_every_text_that_ends_is_right(engine: LLMEngine, name: str) -> None:
    found = answers(engine, [form(name, None), *(form(name, seed) for seed in range(15))])
    ended = [one for one in found if one.finish_reason == "stop"]
    assert {one.finish_reason for one in found} <= {"stop", "length"}, found
    assert len(ended) >= 10, [one.text for one in found]
    for one in ended:
        value = json.loads(one.text)
        judge = jsonschema.Draft202012Validator(
            ASKED[name]["json"], format_checker=jsonschema.FormatChecker()
        )
        assert judge.is_valid(value), one.text
        if "disable_any_whitespace" in ASKED[name]:
            assert one.text == json.dumps(value, separators=(",", ":"))


MODES: dict[str, dict[str, Any]] = {
    "two steps in flight": {"async_scheduling": True},
    "preempted": {"num_kv_blocks": 26, "block_size": 8, "enable_prefix_caching": False},
    "drafts": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "forced text": {
        "speculative_config": {"method": "grammar", "num_speculative_tokens": 4, "adaptive": False}
    },
}


@pytest.fixture(scope="module")
def told() -> list[list[int]]:
    pytest.importorskip("xgrammar")
    with make(**EXACT, async_scheduling=False) as engine:
        return [one.token_ids for one in answers(engine, everything())]


@pytest.mark.parametrize("mode", MODES)
def test_the_same_in_every_way(mode: str, told: list[list[int]]) -> None:
    with make(**EXACT, **MODES[mode]) as engine:
        assert [one.token_ids for one in answers(engine, everything())] == told
        if mode in ("drafts", "forced text"):
            assert engine.stats().counters["drafts.num_accepted_tokens"] > 0


def test_a_core_in_a_process_of_its_own(told: list[list[int]]) -> None:
    options: dict[str, Any] = {"num_threads": 1, "num_kv_blocks": 500, "log_level": "error"}
    with LLM(str(BOX_MODEL), **EXACT, **options, multiprocess=True) as llm:
        asked = everything()
        found = llm.generate(["A small example:"] * len(asked), asked)
    assert [one.outputs[0].token_ids for one in found] == told


def test_what_neither_enforces_fails_its_request_alone(engine: LLMEngine) -> None:
    wrong = StructuredOutputsParams(json={"type": "text"})
    asked = SamplingParams(structured_outputs=wrong, max_tokens=9)
    bad, good = answers(engine, [asked, form("size", 1)])
    assert bad.finish_reason == "error" and bad.error is not None
    assert "xgrammar refuses it too: type is 'text'" in bad.error
    assert good.finish_reason == "stop"


def test_a_step_log_is_replayed(tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    log = tmp_path / "steps.log"
    with make(step_log=str(log), **EXACT) as engine:
        answers(engine, everything())
    assert replay(log).difference is None
