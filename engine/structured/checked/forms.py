"""Checkers of the forms that requests ask for."""

from __future__ import annotations

import msgspec

from engine.messages.finite import without_endless
from engine.messages.structured import Grammar
from engine.structured.checked.checker import Checker
from engine.structured.schemas import SchemaError
from engine.structured.watched import needs_checker


def checker_of(form: Grammar) -> Checker | None:
    """The checker of a form; ``None`` where its grammar holds all of it. Raises ``SchemaError`` for
    what cannot be checked, unless the form passes over that."""
    if form.kind != "json":
        return None
    schema = without_endless(msgspec.json.decode(form.text), is_closed=form.is_closed)
    if not needs_checker(schema):
        return None
    try:
        return Checker(schema)
    except SchemaError:
        if form.is_lenient:
            return None
        raise
