"""Makes the checkers of parsed grammars."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.messages.structured import Grammar
from engine.structured.checked.checker import Checker
from engine.structured.checked.located import Layout, PartOpening
from engine.structured.plans import SchemaPlan, plan_of
from engine.structured.schemas import SchemaError


def checker_of(grammar: Grammar) -> Checker | Layout | None:
    """Make the checker of a grammar; ``None`` if it needs none. Raises ``SchemaError`` for a schema
    that cannot be checked, unless the grammar is lenient."""
    if grammar.kind in ("json", "json_object"):
        schema = msgspec.json.decode(grammar.text) if grammar.kind == "json" else {"type": "object"}
        plan = plan_of(schema, grammar)
        if plan.needs_checker:
            return _checker(plan, grammar)
        return Checker(True) if plan.may_repeat else None  # refuses repeated names
    if grammar.kind == "structural_tag":
        tags = msgspec.json.decode(grammar.text)["structures"]
        places = [(each["begin"], "", False, each["schema"], grammar) for each in tags]
    else:
        places = [
            (each.text, each.scope, each.follows, msgspec.json.decode(part.text), part)
            for each in grammar.openings
            if (part := grammar.parts[each.part]).kind == "json"
        ]
    openings = [*_openings(places)]
    return Layout(openings) if openings else None


Place = tuple[str, str, bool, Any, Grammar]  # an opening with the schema that follows it


def _openings(places: list[Place]) -> Iterator[PartOpening]:
    """Yield each text that begins a JSON part in need of a checker, with the part's checkers."""
    together: dict[tuple[str, str, bool], list[tuple[SchemaPlan, Grammar]]] = {}
    for text, scope, follows, schema, grammar in places:
        plan = plan_of(schema, grammar)
        together.setdefault((text, scope, follows), []).append((plan, grammar))
    for (text, scope, follows), plans in together.items():
        if any(plan.needs_checker for plan, _ in plans):
            checkers = tuple(_checker(plan, grammar) for plan, grammar in plans)
            yield PartOpening(text.encode(), checkers, scope.encode(), follows)


def _checker(plan: SchemaPlan, grammar: Grammar) -> Checker:
    try:
        return Checker(plan.schema)
    except SchemaError:
        if not grammar.is_lenient:
            raise
    schema = plan.schema
    # Several tools may share an opening: at least the name in a call is checked.
    name = schema.get("properties", {}).get("name", True) if isinstance(schema, dict) else True
    return Checker({"properties": {"name": name}} if isinstance(name, dict) else True)
