"""The checker of schemas: a text that it lets pass is valid, and a valid one passes."""

from __future__ import annotations

import json
import os
import random
import tracemalloc

import pytest
from jsonschema import Draft202012Validator

from engine.structured.checked.checker import Checker
from engine.structured.checked.places import PlaceIndex
from engine.structured.checked.rules import rules_of
from engine.structured.schemas import SchemaError
from tests.support.schema_makers import any_document, any_value

SEED = int(os.environ.get("METRONOME_SEED", "36"))


def passes(checker: Checker, text: str, cut: int = 1 << 20) -> bool:
    """Whether a text passes, in pieces of this many bytes, each with a look ahead of it."""
    state, data = checker.begin(), text.encode()
    for at in range(0, len(data), cut):
        piece = data[at : at + cut]
        looked = state.copy().feed(piece)
        assert looked == state.feed(piece), f"a copy goes another way: {text!r}"
        if not looked:
            return False
    return state.may_end


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] * (part > 2)) for part in range(8)]
)
def test_random_texts_pass_where_the_oracle_says_that_they_are_valid(part) -> None:
    for seed in range(SEED * 1000 + part * 50, SEED * 1000 + part * 50 + 50):
        dice = random.Random(seed)
        schema = any_document(dice)
        oracle = Draft202012Validator(schema)
        try:
            checker = Checker(schema)
        except SchemaError as error:
            assert "leads back to itself" in str(error), f"METRONOME_SEED: {seed}, {schema}"
            continue
        for _ in range(25):
            value = any_value(dice)
            text = json.dumps(value, ensure_ascii=dice.random() < 0.5)
            note = f"METRONOME_SEED: {seed}, {json.dumps(schema)}, {text}"
            for cut in (1, 3, 1 << 20):
                assert passes(checker, text, cut) == oracle.is_valid(value), note


@pytest.mark.parametrize(
    "more",
    [
        {"minProperties": 2},
        {"not": {"maxProperties": 1}},
        {"anyOf": [{"minProperties": 2}, {"required": ["Z"]}]},
        {"dependentSchemas": {"aa": {"minProperties": 2}}, "minProperties": 1},
    ],
)
def test_an_object_whose_names_only_a_pattern_knows_can_be_finished(more) -> None:
    named = {"patternProperties": {"^[a-z]+$": {}}, "additionalProperties": False}
    checker = Checker({"type": "object", **named, **more})
    assert passes(checker, '{"aa":1,"b":2}', 1)
    assert not passes(checker, '{"aa":1}', 1) and not passes(checker, '{"aa":1,"B":2}', 1)


def test_the_verdicts_that_are_kept_of_a_schema_are_bounded() -> None:
    """However many places it has: hundreds of schemas are kept."""
    places = PlaceIndex()
    strings = [places.place((rules_of({"maxLength": 60 + number}),)) for number in range(10)]
    tracemalloc.start()
    try:
        for number in range(1_700):
            for place in strings:
                assert place.on_scalar(f"a text of some fifty characters: {number:20}") == (True,)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 1 << 20
