"""The rules that apply together to one value (a place), and their verdicts on the value.

A verdict is ``True``, the name of the keyword that failed, or ``None`` while both are possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from engine.structured.checked.demands import (
    OTHER,
    UNKNOWN,
    Judge,
    Verdict,
    demands_of,
    names_members,
)
from engine.structured.checked.exact import FALSE, NULL, TRUE, Exact, Number, kind_of
from engine.structured.checked.rules import MANY, Rule, num_values

Vector = tuple[Verdict, ...]  # the verdicts of several rules
Row = tuple[int, tuple[Judge, ...]]  # the judges of one rule, by its number in the place
MOST_MEMBERS = 4096  # cached names per place
MOST_CHARACTERS = 64  # of a string whose verdicts are cached
MOST_SCALARS = 16_384  # cached scalars per schema, about 150 bytes each


class Member:
    """The rules that apply to a property with a certain name, or to an item at a certain index."""

    def __init__(self, place: Place, demands: Sequence[tuple[int, str, Rule]]) -> None:
        """place: the rules for the value. demands: for each of its root rules, (number of the outer
        rule that contains it, keyword in the outer rule, root rule)."""
        self.place = place
        slots = {rule: slot for slot, rule in enumerate(place.roots)}
        found = [(number, keyword, slots[rule]) for number, keyword, rule in demands]
        self.wires = [each for each in found if each[1] not in APART]
        self.left = [(each[0], each[2]) for each in found if each[1].startswith("unevaluated")]
        self.held = [(each[0], each[2]) for each in found if each[1] == "contains"]
        self.evaluators = frozenset(number for number, key, _ in found if key != "contains")
        self.failing: tuple[tuple[int, str], ...] = ()  # rules that the name alone breaks


APART = ("contains", "unevaluatedProperties", "unevaluatedItems")


class Place:
    """The rules for one value: ``roots``, and the rules that they combine, as by ``allOf``."""

    def __init__(
        self, roots: tuple[Rule, ...], places: PlaceIndex, musts: tuple[bool, ...] = ()
    ) -> None:
        """musts: for each root rule, True if the whole text is invalid when that rule fails."""
        self.roots = roots
        self.is_must = all(musts) and bool(musts)
        self.places = places
        self.rules = _in_order(roots)
        self.numbers = {rule: number for number, rule in enumerate(self.rules)}
        self.ends = tuple(self.numbers[rule] for rule in roots)
        self.start: Vector = tuple("false" if rule.is_false else None for rule in roots)
        self._tables: dict[str, PlaceTable] = {}
        self._members: dict[Any, Member] = {}
        self._on_listed: dict[Exact, Vector] = {}
        self._on_scalars: dict[Exact, Vector] = {}
        self._listed: dict[str, list[Exact]] = {}
        self._options: dict[str, list[Exact] | None] = {}
        self.named = [n for n, rule in enumerate(self.rules) if names_members(rule)]
        self.has_patterns = any(rule.members.patterns for rule in self.rules)
        self.has_names = any(rule.members.names or rule.members.patterns for rule in self.rules)
        self.must = self._must(musts)
        self.prefix = max((len(rule.elements.prefix) for rule in self.rules), default=0)

    def _must(self, musts: tuple[bool, ...]) -> frozenset[int]:
        """Return the numbers of the rules that must hold for the whole text to be valid."""
        found: set[int] = set()
        waiting = [rule for rule, must in zip(self.roots, musts, strict=False) if must]
        while waiting:
            rule = waiting.pop()
            if (number := self.numbers[rule]) not in found:
                found.add(number)
                waiting += rule.all_of
        return frozenset(found)

    def table(self, kind: str) -> PlaceTable:
        """Return the functions that check a value of this kind against the rules."""
        if kind not in self._tables:
            self._tables[kind] = PlaceTable(self, kind)
        return self._tables[kind]

    def on_scalar(self, value: Exact) -> Vector:
        """Return the root rules' verdicts on a string, a number or a literal."""
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            return self._judged(value)
        # A mask tries the same short strings and numbers many times.
        if (found := self._on_scalars.get(value)) is None:
            self.places.note_scalar()
            found = self._on_scalars[value] = self._judged(value)
        return found

    def forget_scalars(self) -> None:
        """Clear the cached verdicts on strings, numbers and literals."""
        self._on_scalars.clear()

    def _judged(self, value: Exact) -> Vector:
        return Scalar(self.table(kind_of(value)), value).vector

    def on_others(self, kind: str) -> Vector:
        """The root rules' verdicts on any value of this kind that the schema does not list."""
        return Scalar(self.table(kind), OTHER).vector

    def on_listed(self, value: Exact) -> Vector:
        """Return the root rules' verdicts on a value that the schema lists, as in ``enum``."""
        if (found := self._on_listed.get(value)) is None:
            found = self._on_listed[value] = self._judged(value)
        return found

    @cached_property
    def known_names(self) -> list[str]:
        """All property names that occur in the rules."""
        names = [each.members.names for each in self.rules if each.members.names is not None]
        place = self.places.place(tuple(dict.fromkeys(names)))
        others = (name for rule in self.rules for name in rule.names)
        return [*dict.fromkeys([*others, *place.listed("string")])]

    @cached_property
    def is_endless(self) -> bool:
        """Whether the rules allow at least ``MANY`` values, as far as a quick estimate shows."""
        return all(num_values(rule) >= MANY for rule in self.roots)

    @cached_property
    def has_value(self) -> bool:
        """Whether any value at all satisfies these rules."""
        return self.is_easy or any(self._has_value(kind) for kind in KINDS)

    def _has_value(self, kind: str) -> bool:
        if not _may_hold(self.table(kind).vector):
            return False
        if values := KINDS[kind]:
            return any(_may_hold(self.on_scalar(value)) for value in values)
        return kind in ("object", "array") or self.own_options(kind) != []

    def own_options(self, kind: str) -> list[Exact] | None:
        """The allowed values if the schema lists all of them (as in ``enum``), else ``None``."""
        if kind not in self._options:
            found, listed = None, self.listed(kind)
            if listed and not _may_hold(self.on_others(kind)):
                found = [value for value in listed if _may_hold(self.on_listed(value))]
            self._options[kind] = found
        return self._options[kind]

    @cached_property
    def is_plain(self) -> bool:
        """Whether the grammar alone enforces all rules for strings, numbers and literals."""
        lists = [rule for rule in self.rules if rule.values is not None]
        return len(lists) <= 1 and not any(
            rule.one_of or rule.negated is not None or rule.condition is not None
            for rule in self.rules
        )

    @cached_property
    def most_number(self) -> Number | None:
        """The largest number that may be valid; ``None`` if there is no such limit."""
        found = [self.rules[number].most for number in self.must]
        return min((each for each in found if each is not None), default=None)

    @cached_property
    def least_number(self) -> Number | None:
        """The smallest number that may be valid; ``None`` if there is no such limit."""
        found = [self.rules[number].least for number in self.must]
        return max((each for each in found if each is not None), default=None)

    @cached_property
    def is_of_whole_numbers(self) -> bool:
        """Whether numbers must be integers, and meet rules that the grammar cannot enforce."""
        own = [self.rules[number] for number in self.must]
        is_whole = any(rule.types is not None and "number" not in rule.types for rule in own)
        return is_whole and not (self.is_plain and self.is_must)

    @cached_property
    def is_shaped(self) -> bool:
        """Whether a rule limits strings, for example by a pattern or a length."""
        return any(rule.texts for rule in self.rules)

    @cached_property
    def is_easy(self) -> bool:
        """True if no rule limits the values to a few, according to a quick test."""
        return not any(_is_narrow(rule) for rule in self.rules)

    def listed(self, kind: str) -> list[Exact]:
        """Return the values of this kind that the rules list, as in ``enum``."""
        if kind not in self._listed:
            lists = [
                each for rule in self.rules for each in (rule.values, rule.domain, rule.few_texts)
            ]
            every = (value for each in lists for value in each or ())
            self._listed[kind] = [*dict.fromkeys(v for v in every if kind_of(v) == kind)]
        return self._listed[kind]

    @cached_property
    def others(self) -> Member:
        """Return the rules for a property whose name the schema does not mention."""
        demands = [
            (number, keyword, rule)
            for number in self.named
            for keyword, rule in _of_others(self.rules[number])
        ]
        found = self._made(demands)
        found.failing = tuple(self._failing_names(None))
        return found

    def property(self, name: str) -> Member:
        """Return the rules for a property with this name."""
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
        musts = dict.fromkeys((rule for _, _, rule in demands), False)
        for number, keyword, rule in demands:
            musts[rule] = musts[rule] or (number in self.must and keyword not in APART)
        return Member(self.places.place(tuple(musts), tuple(musts.values())), demands)

    def _keep(self, key: Any, member: Member) -> None:
        if len(self._members) >= MOST_MEMBERS:
            self._members.clear()
        self._members[key] = member

    def _failing_names(self, name: str | None) -> Iterator[tuple[int, str]]:
        rules = [
            (n, rule.members.names)
            for n, rule in enumerate(self.rules)
            if rule.members.names is not None
        ]
        if not rules:
            return
        place = self.places.place(tuple(dict.fromkeys(rule for _, rule in rules)))
        vector = place.on_others("string") if name is None else place.on_scalar(name)
        verdicts = dict(zip(place.roots, vector, strict=True))
        for number, rule in rules:
            if isinstance(verdicts[rule], str):
                yield number, "propertyNames"


class PlaceIndex:
    """Creates each ``Place`` (the rules for one value) of a schema on first use, and caches it."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[Rule, ...], tuple[bool, ...]], Place] = {}
        self._num_scalars = 0

    def place(self, roots: tuple[Rule, ...], musts: tuple[bool, ...] = ()) -> Place:
        """Return the ``Place`` of these rules, the same object for equal arguments. musts: for each
        rule, True if the whole text is invalid when it fails."""
        key = roots, musts
        if key not in self._places:
            self._places[key] = Place(roots, self, musts)
        return self._places[key]

    def note_scalar(self) -> None:
        """Count a cached verdict. If there are too many, clear the caches of all places."""
        self._num_scalars += 1
        if self._num_scalars > MOST_SCALARS:
            for place in self._places.values():
                place.forget_scalars()
            self._num_scalars = 1


class PlaceTable:
    """The functions that check values of one kind (such as objects) against rules of a place."""

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
        self.is_watchful = any(map(self._is_watchful, is_open))
        self.quiet = self._quiet() if kind == "object" else frozenset()
        self.keeps = kind in ("array", "object") and any(rule.values for rule in is_open)

    @cached_property
    def vector(self) -> Vector:
        """The root rules' verdicts on a value of this kind, as far as the kind alone decides."""
        if self.kind in ("object", "array"):
            return tuple([self.start[number] for number in self.place.ends])
        return Scalar(self, UNKNOWN).vector

    def _is_watchful(self, rule: Rule) -> bool:
        """Whether the grammar cannot enforce all that a rule demands of objects or arrays."""
        at, start = self.place.numbers, self.start
        if any(each is not None for each in (rule.negated, rule.condition)) or rule.values:
            return True
        for group in rule.any_of + rule.one_of:
            if sum(start[at[each]] is None for each in group) > 1:
                return True
        if self.kind == "array":
            own, items = rule.elements, range(self.place.prefix + 1)
            if own.is_unique and not all(self.place.item(at).place.is_endless for at in items):
                return True
            return any(each is not None for each in (own.contained, own.unevaluated))
        members = rule.members
        others = (members.names, members.most)
        is_bound = members.dependent_names or rule.dependents or members.least
        if members.unevaluated is not None and len(self.place.must) < len(at):
            return True
        return bool(is_bound) or any(each is not None for each in others)

    def _quiet(self) -> frozenset[str]:
        """Names whose presence does not change which other names are required or allowed."""
        loud: set[str] = set()
        for number, rule in enumerate(self.place.rules):
            own, is_must = rule.members, number in self.place.must
            if self.start[number] is not None:
                continue
            if own.least or own.most is not None:
                return frozenset()
            for name, others in own.dependent_names:
                loud |= {name, *others}
            loud |= {name for name, _ in rule.dependents}
            if is_must:
                continue
            rest = (own.additional, own.names, own.unevaluated)
            if own.patterns or any(each is not None for each in rest):
                return frozenset()
            loud |= {*own.properties, *own.required}
        return frozenset(self.place.known_names) - loud

    def judge(self, frame: Any) -> None:
        """Update the verdicts of all rules on a frame, starting with the innermost rules."""
        verdicts = frame.verdicts
        for number, parts in self.rows:
            if verdicts[number] is None:
                verdicts[number] = _of_all(parts, frame)


# All values of each kind, or none where there are many.
KINDS: dict[str, tuple[Exact, ...]] = {
    **dict.fromkeys(("object", "array", "string", "number"), ()),
    "boolean": (TRUE, FALSE),
    "null": (NULL,),
}
_TYPES = {"number": {"number", "integer"}}


class Scalar:
    """A complete string, number or literal, in a form that ``PlaceTable.judge`` accepts."""

    is_over = True
    vector: Vector

    def __init__(self, table: PlaceTable, value: Exact) -> None:
        self.exact = value
        self.is_vague = value is UNKNOWN
        self.verdicts = table.start.copy()
        table.judge(self)
        self.vector = tuple([self.verdicts[number] for number in table.place.ends])


def _of_all(parts: tuple[Judge, ...], frame: Any) -> Verdict:
    found: Verdict = True
    for part in parts:
        verdict = part(frame)
        if verdict is None:
            found = None
        elif verdict is not True:
            return verdict
    return found


def _at_once(rule: Rule, kind: str) -> Verdict:
    """Return the rule's verdict if it is the same for all values of this kind, else ``None``."""
    if rule.is_false:
        return "false"
    if rule.types is not None and not rule.types & _TYPES.get(kind, {kind}):
        return "type"
    if rule.values is not None and all(kind_of(each) != kind for each in rule.values):
        return "enum"
    return None


def _may_hold(vector: Vector) -> bool:
    return not any(isinstance(verdict, str) for verdict in vector)


def _is_narrow(rule: Rule) -> bool:
    """Whether the rule may limit a value to few choices, or to none."""
    if rule.is_false or rule.one_of or rule.lists:
        return True
    if rule.negated is not None or rule.condition is not None:
        return True
    return rule.types is not None and not rule.types - {"boolean", "null"}


def _in_order(roots: Sequence[Rule]) -> list[Rule]:
    """List ``roots`` and all rules that they apply to the same value, inner rules first."""
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
    if not is_named:
        yield from _of_others(rule)


def _of_others(rule: Rule) -> Iterator[tuple[str, Rule]]:
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
