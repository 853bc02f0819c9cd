"""Plans how a JSON schema is enforced: by llguidance's grammar, by our checker, or by both."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec

from engine.messages.finite import without_endless
from engine.messages.structured import Grammar
from engine.structured.closed import closed, only_named
from engine.structured.fault_places import with_place
from engine.structured.schemas import SchemaError, check_size
from engine.structured.weakened.writer import written

Others = Literal["named", "closed", "open"]
"""Which properties an object may have: only those that each of its schemas names by itself, those
that all of its schemas name together, or any."""
MAX_KEPT = 4  # recent plans: the grammar and the checker need the same one in turn


class SchemaPlan(NamedTuple):
    """A schema, its version for llguidance, and what the checker must enforce in addition."""

    schema: Any
    """The full schema, in standard keywords."""
    written: Any
    """The schema, or a wider one, in the keywords that llguidance supports."""
    needs_checker: bool
    """Whether ``written`` is wider than ``schema``."""
    may_repeat: bool
    """Whether the grammar of ``written`` allows the same name twice in an object."""


def plan_of(schema: Any, grammar: Grammar) -> SchemaPlan:
    """Plan how to enforce a schema. Raises ``SchemaError`` if it cannot be enforced."""
    others: Others = "named" if grammar.is_closed else grammar.additional_properties or "closed"
    is_free = grammar.property_order == "free"
    return _plan(msgspec.json.encode(schema), others, is_free, grammar.is_lenient)


@lru_cache(maxsize=MAX_KEPT)
def _plan(text: bytes, others: Others, is_free: bool, is_lenient: bool) -> SchemaPlan:
    given = msgspec.json.decode(text)
    check_size(given)
    schema = without_endless(given, is_closed=others == "named")
    if others == "named":
        schema = only_named(schema)
    elif others == "closed":
        schema = closed(schema)
    is_closed = others == "closed"
    try:
        made = written(schema, is_free=is_free, is_lenient=is_lenient, is_closed=is_closed)
    except SchemaError as error:
        raise with_place(error, given, is_lenient=is_lenient) from error
    return SchemaPlan(schema, made.schema, made.needs_checker, made.may_repeat)
