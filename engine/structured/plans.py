"""What a form asks of a JSON schema: the schema that is enforced, and the grammar's part of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from engine.messages.finite import without_endless
from engine.messages.structured import Grammar
from engine.structured.closed import closed, only_named
from engine.structured.schemas import check_size
from engine.structured.weakened.writer import written

MAX_KEPT = 4  # of those made last: grammar and checker ask one after the other


class Plan(NamedTuple):
    """A schema as it is enforced."""

    schema: Any
    """All that must hold, in standard keywords."""
    written: Any
    """The same or less, in words that the grammar's library takes."""
    needs_checker: bool
    """Whether it is less."""
    may_repeat: bool
    """Whether the grammar lets a name come twice in an object."""


def plan_of(schema: Any, form: Grammar) -> Plan:
    """How a schema of the form is enforced. Raises ``SchemaError`` for what cannot be."""
    is_open = form.additional_properties == "open"
    is_free = form.property_order == "free"
    text = msgspec.json.encode(schema)
    return _plan(text, form.is_closed, is_open, is_free, form.is_lenient)


@lru_cache(maxsize=MAX_KEPT)
def _plan(text: bytes, is_closed: bool, is_open: bool, is_free: bool, is_lenient: bool) -> Plan:
    schema = msgspec.json.decode(text)
    check_size(schema)
    schema = without_endless(schema, is_closed=is_closed)
    if is_closed:
        schema = only_named(schema)
    elif not is_open:
        schema = closed(schema)
    is_closed = not (is_closed or is_open)
    made = written(schema, is_free=is_free, is_lenient=is_lenient, is_closed=is_closed)
    return Plan(schema, made.schema, made.needs_checker, made.may_repeat)
