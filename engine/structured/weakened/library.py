"""What the library says of patterns, in its dialect."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def is_taken(pattern: str) -> bool:
    """Whether it takes a pattern."""
    said = _said({"type": "string", "pattern": pattern})
    return not said or "Unsatisfiable" in said


@lru_cache(maxsize=4096)
def no_name_matches(one: str, other: str) -> bool:
    """Whether there is no text that both patterns match."""
    return not _said({"type": "object", "patternProperties": {one: {}, other: {}}})


@lru_cache(maxsize=4096)
def no_text_matches(one: str, other: str) -> bool:
    """Whether there is no string that both patterns match somewhere."""
    both = [{"pattern": one}, {"pattern": other}]
    return "Unsatisfiable" in _said({"type": "string", "allOf": both})


def _said(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    found: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return found
