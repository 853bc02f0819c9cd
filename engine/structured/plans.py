"""What a form asks of a JSON schema: the schema that is enforced, and the grammar's part of it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from engine.messages.finite import without_endless
from engine.messages.structured import Grammar
from engine.structured.closed import closed, only_named
from engine.structured.schemas import check_size
from engine.structured.weakened.writer import written

Others = Literal["named", "closed", "open"]
"""Other properties: none but those named in each schema by itself, none but those named for the
object as a whole, or any."""
MAX_KEPT = 4  # of those made last: grammar and checker ask one after the other


class SchemaPlan(NamedTuple):
    """A schema as it is enforced."""

    schema: Any
    """All that must hold, in standard keywords."""
    written: Any
    """The schema, or less of it, in words that the grammar's library takes."""
    needs_checker: bool
    """Whether it is less."""
    may_repeat: bool
    """Whether the grammar lets a name come twice in an object."""


def plan_of(schema: Any, form: Grammar) -> SchemaPlan:
    """How a schema of the form is enforced. Raises ``SchemaError`` for what cannot be."""
    others: Others = "named" if form.is_closed else form.additional_properties or "closed"
    is_free = form.property_order == "free"
    return _plan(msgspec.json.encode(schema), others, is_free, form.is_lenient)


@lru_cache(maxsize=MAX_KEPT)
def _plan(text: bytes, others: Others, is_free: bool, is_lenient: bool) -> SchemaPlan:
    schema = msgspec.json.decode(text)
    check_size(schema)
    schema = without_endless(schema, is_closed=others == "named")
    if others == "named":
        schema = only_named(schema)
    elif others == "closed":
        schema = closed(schema)
    is_closed = others == "closed"
    made = written(schema, is_free=is_free, is_lenient=is_lenient, is_closed=is_closed)
    return SchemaPlan(schema, made.schema, made.needs_checker, made.may_repeat)
