"""Schemas that are measured, free of imports: also for engines of other environments."""

from __future__ import annotations

from typing import Any

ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "kind": {"enum": ["red", "green", "blue"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}


def long_schema() -> dict[str, Any]:
    """More objects than a request has tokens for, so that all loads have as many."""
    return {"type": "array", "items": ITEM, "minItems": 500, "maxItems": 600}


def simple_schema(number: int) -> dict[str, Any]:
    """One that was never seen before."""
    fields = {f"field_{number}": {"type": "string"}, "count": {"type": "integer"}}
    return {"type": "object", "properties": fields, "required": list(fields)}
