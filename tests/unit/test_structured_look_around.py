"""Patterns that look ahead or back: refused where a text could go on for ever."""

import pytest

from engine.messages.structured import Grammar
from engine.structured.plans import plan_of
from engine.structured.schemas import SchemaError


@pytest.mark.parametrize("pattern", ["^(?!a)b$", "(?=a)[a-z]+", "^x(?<!y)$", "^(?<=a)b$"])
def test_a_string_that_nothing_else_holds_is_refused(pattern: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    with pytest.raises(SchemaError, match="look-around: write it without"):
        plan_of(schema, Grammar("json", ""))
    assert plan_of(schema, Grammar("json", "", is_lenient=True)).needs_checker


def test_a_format_ends_the_text_and_names_are_few() -> None:
    dated = {"type": "string", "format": "date", "pattern": "^(?!2024)"}
    named = {"type": "object", "patternProperties": {"^(?!x)[a-z]$": {"type": "integer"}}}
    for schema in (dated, named):
        assert plan_of(schema, Grammar("json", "")).needs_checker
