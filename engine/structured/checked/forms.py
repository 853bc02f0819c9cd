"""Checkers of the forms that requests ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from engine.messages.structured import Grammar
from engine.structured.checked.checker import Checker
from engine.structured.checked.located import Layout, PartOpening
from engine.structured.plans import SchemaPlan, plan_of
from engine.structured.schemas import SchemaError


def checker_of(form: Grammar) -> Checker | Layout | None:
    """The checker of a form; ``None`` where its grammar holds all of it. Raises ``SchemaError`` for
    what cannot be checked, unless the form passes over that."""
    if form.kind in ("json", "json_object"):
        schema = msgspec.json.decode(form.text) if form.kind == "json" else {"type": "object"}
        plan = plan_of(schema, form)
        if plan.needs_checker:
            return _checker(plan, form)
        return Checker(True) if plan.may_repeat else None  # of names that come twice
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


def _openings(places: list[Place]) -> Iterator[PartOpening]:
    """The openings after which some schema needs a checker."""
    together: dict[tuple[str, str, bool], list[tuple[SchemaPlan, Grammar]]] = {}
    for text, scope, follows, schema, form in places:
        plan = plan_of(schema, form)
        together.setdefault((text, scope, follows), []).append((plan, form))
    for (text, scope, follows), plans in together.items():
        if any(plan.needs_checker for plan, _ in plans):
            checkers = tuple(_checker(plan, form) for plan, form in plans)
            yield PartOpening(text.encode(), checkers, scope.encode(), follows)


def _checker(plan: SchemaPlan, form: Grammar) -> Checker:
    try:
        return Checker(plan.schema)
    except SchemaError:
        if not form.is_lenient:
            raise
    schema = plan.schema
    # A call of a tool is still known by its name.
    name = schema.get("properties", {}).get("name", True) if isinstance(schema, dict) else True
    return Checker({"properties": {"name": name}} if isinstance(name, dict) else True)
