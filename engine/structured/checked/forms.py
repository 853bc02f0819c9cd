"""Checkers of the forms that requests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.messages.finite import without_endless
from engine.messages.structured import Grammar
from engine.structured.checked.checker import Checker
from engine.structured.checked.located import Layout, Opening
from engine.structured.schemas import SchemaError
from engine.structured.watched import needs_checker


def checker_of(form: Grammar) -> Checker | Layout | None:
    """The checker of a form; ``None`` where its grammar holds all of it. Raises ``SchemaError`` for
    what cannot be checked, unless the form passes over that."""
    if form.kind == "json":
        schema = _schema(msgspec.json.decode(form.text), form)
        return _checker(schema, form) if needs_checker(schema) else None
    if form.kind == "structural_tag":
        tags = msgspec.json.decode(form.text)["structures"]
        places = [(each["begin"], "", False, each["schema"], form) for each in tags]
    else:
        places = [
            (each.text, each.scope, each.follows, msgspec.json.decode(part.text), part)
            for each in form.openings
            if (part := form.parts[each.part]).kind == "json"
        ]
    openings = [*_openings(places)]
    return Layout(openings) if openings else None


Place = tuple[str, str, bool, Any, Grammar]  # an opening, and the schema that follows


def _openings(places: list[Place]) -> Iterator[Opening]:
    """Those of them after which some schema needs a checker."""
    together: dict[tuple[str, str, bool], list[tuple[Any, Grammar]]] = {}
    for text, scope, follows, schema, form in places:
        together.setdefault((text, scope, follows), []).append((_schema(schema, form), form))
    for (text, scope, follows), schemas in together.items():
        if any(needs_checker(schema) for schema, _ in schemas):
            checkers = tuple(_checker(schema, form) for schema, form in schemas)
            yield Opening(text.encode(), checkers, scope.encode(), follows)


def _schema(schema: Any, form: Grammar) -> Any:
    return without_endless(schema, is_closed=form.is_closed)


def _checker(schema: Any, form: Grammar) -> Checker:
    try:
        return Checker(schema)
    except SchemaError:
        if not form.is_lenient:
            raise
    # A call of a tool is still known by its name.
    name = schema.get("properties", {}).get("name", True) if isinstance(schema, dict) else True
    return Checker({"properties": {"name": name}} if isinstance(name, dict) else True)
