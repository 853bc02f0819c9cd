"""What the grammar of a schema leaves to the checker."""

from __future__ import annotations

from typing import Any

import pytest

from engine.structured.watched import WATCHED, is_idle, needs_checker

PLAIN: dict[str, Any] = {
    "types": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "a set that need not be one": {"type": "array", "uniqueItems": False},
    "no names to depend on": {"type": "object", "dependentRequired": {}},
    "a constant that looks like a keyword": {"const": {"not": {}}},
    "a property that is named like one": {"properties": {"not": {}, "if": {}}},
}


@pytest.mark.parametrize("schema", PLAIN.values(), ids=PLAIN)
def test_a_schema_that_the_grammar_holds_needs_no_checker(schema: dict[str, Any]) -> None:
    assert not needs_checker(schema)


def test_a_value_that_allows_everything_needs_nobody() -> None:
    assert is_idle("uniqueItems", False) and not is_idle("uniqueItems", True)
    assert is_idle("propertyNames", True) and not is_idle("minProperties", 1)
    assert "uniqueItems" in WATCHED
