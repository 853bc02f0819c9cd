"""What is known of one value: the rules that hold for it together, and how each stands.

A verdict is ``True``, ``None`` while it may still become either, or the name of the keyword that
failed. Once it is not ``None`` it stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.structured.checked.demands import Part, Verdict, demands_of, names_members
from engine.structured.checked.exact import Exact, kind_of
from engine.structured.checked.rules import Rule

Vector = tuple[Verdict, ...]  # of several rules
Row = tuple[int, tuple[Part, ...]]  # the demands of one rule, by its number in the place
MOST_MEMBERS = 4096  # whose names are remembered


class Member:
    """What holds for a property of some name, or an item at some place."""

    def __init__(self, place: Place, demands: Sequence[tuple[int, str, Rule]]) -> None:
        """place: of the value. demands: rules of the value by the number of the rule that has them,
        with the keyword."""
        self.place = place
        slots = {rule: slot for slot, rule in enumerate(place.roots)}
        found = [(number, keyword, slots[rule]) for number, keyword, rule in demands]
        self.wires = [each for each in found if each[1] not in APART]
        self.left = [(each[0], each[2]) for each in found if each[1].startswith("unevaluated")]
        self.held = [(each[0], each[2]) for each in found if each[1] == "contains"]
        self.evaluators = frozenset(number for number, key, _ in found if key != "contains")
        self.failing: tuple[tuple[int, str], ...] = ()  # by its name alone


APART = ("contains", "unevaluatedProperties", "unevaluatedItems")


class Place:
    """Rules that are looked at for one value, and those they lead to for the same value."""

    def __init__(self, roots: tuple[Rule, ...], places: Places) -> None:
        self.roots = roots
        self.places = places
        self.rules = _in_order(roots)
        self.numbers = {rule: number for number, rule in enumerate(self.rules)}
        self.ends = tuple(self.numbers[rule] for rule in roots)
        self.start: Vector = tuple("false" if rule.is_false else None for rule in roots)
        self._tables: dict[str, Table] = {}
        self._members: dict[Any, Member] = {}
        self.named = [n for n, rule in enumerate(self.rules) if names_members(rule)]
        self.has_names = any(rule.members.names or rule.members.patterns for rule in self.rules)
        self.prefix = max((len(rule.elements.prefix) for rule in self.rules), default=0)

    def table(self, kind: str) -> Table:
        """The demands on a value of this kind."""
        if kind not in self._tables:
            self._tables[kind] = Table(self, kind)
        return self._tables[kind]

    def on_scalar(self, value: Exact) -> Vector:
        """The verdicts of the roots on a string, a number or a literal."""
        found = Scalar(self.table(kind_of(value)), value).verdicts
        return tuple([found[number] for number in self.ends])

    def property(self, name: str) -> Member:
        """What holds for a property of this name."""
        is_named = any(name in self.rules[number].members.properties for number in self.named)
        key = name if is_named or self.has_names else None
        if (found := self._members.get(key)) is None:
            demands = [
                (number, keyword, rule)
                for number in self.named
                for keyword, rule in _of_property(self.rules[number], name)
            ]
            found = self._made(demands)
            found.failing = tuple(self._failing_names(name))
            self._keep(key, found)
        return found

    def item(self, index: int) -> Member:
        key = min(index, self.prefix)
        if (found := self._members.get(key)) is None:
            demands = [
                (number, keyword, each)
                for number, rule in enumerate(self.rules)
                for keyword, each in _of_item(rule, index)
            ]
            found = self._made(demands)
            self._keep(key, found)
        return found

    def _made(self, demands: list[tuple[int, str, Rule]]) -> Member:
        rules = tuple(dict.fromkeys(rule for _, _, rule in demands))
        return Member(self.places.place(rules), demands)

    def _keep(self, key: Any, member: Member) -> None:
        if len(self._members) >= MOST_MEMBERS:
            self._members.clear()
        self._members[key] = member

    def _failing_names(self, name: str) -> Iterator[tuple[int, str]]:
        rules = [
            (n, rule.members.names)
            for n, rule in enumerate(self.rules)
            if rule.members.names is not None
        ]
        if not rules:
            return
        place = self.places.place(tuple(dict.fromkeys(rule for _, rule in rules)))
        verdicts = dict(zip(place.roots, place.on_scalar(name), strict=True))
        for number, rule in rules:
            if verdicts[rule] is not True:
                yield number, "propertyNames"


class Places:
    """All places of a schema, made as they are met."""

    def __init__(self) -> None:
        self._places: dict[tuple[Rule, ...], Place] = {}

    def place(self, roots: tuple[Rule, ...]) -> Place:
        if roots not in self._places:
            self._places[roots] = Place(roots, self)
        return self._places[roots]


class Table:
    """The demands of a place on values of one kind."""

    def __init__(self, place: Place, kind: str) -> None:
        self.place = place
        self.kind = kind
        self.rows: list[Row] = []
        self.start: list[Verdict] = [None] * len(place.rules)
        for number, rule in enumerate(place.rules):
            if (verdict := _at_once(rule, kind)) is not None:
                self.start[number] = verdict
            elif parts := demands_of(rule, place.numbers, kind):
                self.rows.append((number, parts))
            else:
                self.start[number] = True
        is_open = [rule for n, rule in enumerate(place.rules) if self.start[n] is None]
        self.is_unique = kind == "array" and any(rule.elements.is_unique for rule in is_open)
        self.keeps = kind in ("array", "object") and any(rule.values for rule in is_open)

    def judge(self, frame: Any) -> None:
        """Bring the verdicts up to date with what is written, those of parts first."""
        verdicts = frame.verdicts
        for number, parts in self.rows:
            if verdicts[number] is None:
                verdicts[number] = _of_all(parts, frame)


_TYPES = {"number": {"number", "integer"}}


class Scalar:
    """A string, a number or a literal, whole."""

    is_over = True

    def __init__(self, table: Table, value: Exact) -> None:
        self.exact = value
        self.verdicts = table.start.copy()
        table.judge(self)


def _of_all(parts: tuple[Part, ...], frame: Any) -> Verdict:
    found: Verdict = True
    for part in parts:
        verdict = part(frame)
        if verdict is None:
            found = None
        elif verdict is not True:
            return verdict
    return found


def _at_once(rule: Rule, kind: str) -> Verdict:
    """What the kind of a value alone decides."""
    if rule.is_false:
        return "false"
    if rule.types is not None and not rule.types & _TYPES.get(kind, {kind}):
        return "type"
    if rule.values is not None and all(kind_of(each) != kind for each in rule.values):
        return "enum"
    return None


def _in_order(roots: Sequence[Rule]) -> list[Rule]:
    """All of them and what they lead to, each once and after its own parts."""
    found: dict[Rule, None] = {}
    waiting = [(rule, False) for rule in reversed(roots)]
    while waiting:
        rule, is_left = waiting.pop()
        if rule in found:
            continue
        if is_left:
            found[rule] = None
            continue
        waiting.append((rule, True))
        waiting.extend((each, False) for each in rule.same)
    return list(found)


def _of_property(rule: Rule, name: str) -> Iterator[tuple[str, Rule]]:
    is_named = name in rule.members.properties
    if is_named:
        yield "properties", rule.members.properties[name]
    for matches, each in rule.members.patterns:
        if matches(name):
            is_named = True
            yield "patternProperties", each
    if is_named:
        return
    if rule.members.additional is not None:
        yield "additionalProperties", rule.members.additional
    elif rule.members.unevaluated is not None:
        yield "unevaluatedProperties", rule.members.unevaluated


def _of_item(rule: Rule, index: int) -> Iterator[tuple[str, Rule]]:
    if index < len(rule.elements.prefix):
        yield "prefixItems", rule.elements.prefix[index]
    elif rule.elements.items is not None:
        yield "items", rule.elements.items
    elif rule.elements.unevaluated is not None:
        yield "unevaluatedItems", rule.elements.unevaluated
    if rule.elements.contained is not None:
        yield "contains", rule.elements.contained
