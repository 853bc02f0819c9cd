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
from structured.written import Asked, compiled, walk

KEPT = Path(structured.__file__).with_name("kept") / "schemas.jsonl"
NUM_WALKS = 2
MAX_BYTES = 200


@cache
def bench() -> Bench:
    return Bench()


def kept() -> list[Asked]:
    lines = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())
    return [Asked(line["name"], line["schema"]) for line in lines]


def faults(asked: Asked) -> list[str]:
    """What a few random walks through the masks show."""
    found = compiled(bench(), asked, {})
    if found.refusal:
        return [f"refused: {found.refusal}"]
    walk(bench(), found, NUM_WALKS, MAX_BYTES, {})
    return [f"invalid: {text}" for text in found.invalid]


def test_the_list_of_real_schemas_names_enough_of_many_packages() -> None:
    listed = sources()
    assert len({source.sha256 for source in listed}) == len(listed) >= 60
    assert len({source.package for source in listed}) >= 40


WHAT_OTHERS_WROTE = [*kept(), *pydantic_models.asked(), *zod.asked()[::4]]


@pytest.mark.parametrize("asked", WHAT_OTHERS_WROTE, ids=lambda asked: asked.name)
def test_what_others_wrote_is_followed_and_accepted_by_them(asked: Asked) -> None:
    assert faults(asked) == []
