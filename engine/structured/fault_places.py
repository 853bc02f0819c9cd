"""Finds where in a schema an error is, so that its message names the place.

A schema is rewritten before it is read, and errors are rare: the place is searched for only after
an error, in the schema as the user wrote it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.structured.checked.documents import ALONE, BY_NAME, IN_LISTS
from engine.structured.keywords import check_shapes
from engine.structured.schemas import SchemaError, types_of

MOST_OF_NAME = 40  # characters of a property's name in a path
MOST_OF_PATH = 200  # characters

Placed = tuple[str, Any]  # a schema after its path, such as "properties.age."


def with_place(error: SchemaError, schema: Any, *, is_lenient: bool) -> SchemaError:
    """Return the error of a keyword with the path to it, such as ``properties.age.type``; another
    error unchanged."""
    for path, each in _all_parts(schema):
        try:
            check_shapes(each, is_lenient=is_lenient)
            types_of(each)
        except SchemaError as found:
            if str(found) == str(error):
                end = path if len(path) <= MOST_OF_PATH else f"... {path[-MOST_OF_PATH:]}"
                return SchemaError(f"the schema's {end}{error}")
    return error


def _all_parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema and all schemas inside it, each after its path."""
    waiting: list[Iterator[Placed]] = [iter([("", schema)])]
    while waiting:
        if (placed := next(waiting[-1], None)) is None:
            waiting.pop()
            continue
        path, each = placed
        if isinstance(each, dict):
            yield path, each
            waiting.append(_parts(path, each))


def _parts(path: str, schema: dict[str, Any]) -> Iterator[Placed]:
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            for name, part in value.items():
                yield f"{path}{key}.{name:.{MOST_OF_NAME}}.", part
        elif key in IN_LISTS and isinstance(value, list):
            for at, part in enumerate(value):
                yield f"{path}{key}[{at}].", part
        elif key in ALONE:
            yield f"{path}{key}.", value
