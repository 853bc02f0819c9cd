"""A part of what `tools/schema_suite.py` does with the whole JSON-Schema-Test-Suite."""

from __future__ import annotations

from functools import cache

import pytest
from structured.checks import Bench
from structured.suite import DRAFTS, OPENED, PART, Followed, follow, groups_of, refers_elsewhere


@cache
def followed(draft: str) -> list[Followed]:
    bench = Bench()
    return [follow(bench, group, OPENED) for group in groups_of(PART, [draft])]


@pytest.mark.parametrize("draft", DRAFTS)
def test_every_invalid_instance_is_refused(draft: str) -> None:
    found = followed(draft)
    assert len(found) > 40
    assert [(one.group.name, one.not_refused) for one in found if one.not_refused] == []


@pytest.mark.parametrize(
    ("schema", "does"),
    [
        ({"$ref": "#/$defs/a"}, False),
        ({"$ref": "https://json-schema.org/draft/2020-12/schema"}, True),
        ({"$id": "http://a/b", "$defs": {"c": {"$id": "d"}}, "$ref": "d#/e"}, False),
        ({"$id": "http://a/b", "$ref": "http://a/d"}, True),
        ({"const": {"$ref": "elsewhere"}}, False),
        ({"properties": {"$ref": {"$ref": "elsewhere"}}}, True),
    ],
)
def test_references_to_other_documents_are_noticed(schema: dict[str, object], does: bool) -> None:
    assert refers_elsewhere(schema) == does
