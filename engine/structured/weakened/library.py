"""Checks patterns with llguidance, in its dialect."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


@lru_cache(maxsize=4096)
def is_taken(pattern: str) -> bool:
    """Whether llguidance accepts a pattern."""
    refusal = _refusal({"type": "string", "pattern": pattern})
    return not refusal or "Unsatisfiable" in refusal


@lru_cache(maxsize=4096)
def no_name_matches(one: str, other: str) -> bool:
    """Whether llguidance can prove that no property name matches both patterns."""
    return not _refusal({"type": "object", "patternProperties": {one: {}, other: {}}})


@lru_cache(maxsize=4096)
def no_text_matches(one: str, other: str) -> bool:
    """Whether llguidance can prove that no string contains a match of both patterns."""
    both = [{"pattern": one}, {"pattern": other}]
    return "Unsatisfiable" in _refusal({"type": "string", "allOf": both})


def _refusal(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    found: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
    return found
