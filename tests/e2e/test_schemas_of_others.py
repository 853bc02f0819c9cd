"""A part of what `tools/schemas_in_the_wild.py` does with the schemas of registry packages, and
with what pydantic and zod write."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import structured
from structured import pydantic_models, zod
from structured.checks import Bench
from structured.wild import sources
from structured.written import SchemaCase, compiled, walk

KEPT = Path(structured.__file__).with_name("kept") / "schemas.jsonl"
NUM_WALKS = 2
MAX_BYTES = 200


@cache
def bench() -> Bench:
    return Bench()


def kept() -> list[SchemaCase]:
    lines = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())
    return [SchemaCase(line["name"], line["schema"]) for line in lines]


def faults(case: SchemaCase) -> list[str]:
    """What a few random walks through the masks show."""
    found = compiled(bench(), case, {})
    if found.refusal:
        return [f"refused: {found.refusal}"]
    walk(bench(), found, NUM_WALKS, MAX_BYTES, {})
    return [f"invalid: {text}" for text in found.invalid]


def test_the_list_of_real_schemas_names_enough_of_many_packages() -> None:
    listed = sources()
    assert len({source.sha256 for source in listed}) == len(listed) >= 60
    assert len({source.package for source in listed}) >= 40


WHAT_OTHERS_WROTE = [*kept(), *pydantic_models.cases(), *zod.cases()[::4]]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (place % 6 > 0), id=case.name)
        for place, case in enumerate(WHAT_OTHERS_WROTE)
    ],
)
def test_what_others_wrote_is_followed_and_accepted_by_them(case: SchemaCase) -> None:
    assert faults(case) == []
