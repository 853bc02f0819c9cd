"""Finds JSON schemas that no finite value satisfies. For example,

    {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}

requires an object in an object without end. A model would generate until its token limit, so such a
schema is refused. The search starts with schemas whose values need no nested values, and adds
schemas whose nested values satisfy schemas found before (a least fixed point).

Keywords that are not analysed (patterns, most ranges, ``if``, most of ``not``) count as satisfied,
so a schema with a finite value is never refused."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from engine.errors import RequestError
from engine.messages.references import REFERENCES, References
from engine.messages.structured import Grammar, grammar_from

Schema = dict[str, Any]
Path = tuple[str | int, ...]
Place = frozenset[int]  # numbers of schemas
MOST_STEPS = 20_000  # after this many steps the analysis stops and the schema is accepted
SCALARS = {"null", "boolean", "integer", "number", "string"}
EVERY_TYPE = SCALARS | {"array", "object"}
KINDS: dict[type, set[str]] = {
    bool: {"boolean"},
    int: {"integer", "number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
CHOICES = ("anyOf", "oneOf")
# Keywords that hold a dict of schemas, a list of schemas, one schema.
BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
ALONE = ("items", "additionalItems", "additionalProperties")
SAYS_NOTHING = {"title", "description", "$comment", "default", "examples"}


class Link(NamedTuple):
    """A schema's number, linked to the schema that contains or references it."""

    number: int
    led: Link | None = None


class Way(NamedTuple):
    """One way to build a JSON object or array: it needs values for all places in ``needed``, and
    for ``num_others`` of the places in ``others``. A place is a set of schemas for one value."""

    needed: tuple[Place, ...]
    others: tuple[Place, ...] = ()
    num_others: int = 0


@dataclass
class SchemaReading:
    """The schemas that one value must satisfy, while they are being collected."""

    waiting: list[Link]
    seen: set[int] = field(default_factory=set)
    schemas: list[Schema] = field(default_factory=list)

    def with_one_of(self, options: list[Link]) -> list[SchemaReading]:
        """Return one copy of this reading for each option, with that schema added to the copy."""
        return [
            SchemaReading([*self.waiting, each], set(self.seen), [*self.schemas])
            for each in options
        ]


class TooLargeError(Exception):
    """The analysis takes more than ``MOST_STEPS`` steps."""


@lru_cache(maxsize=32)
def check_finite(grammar: str) -> None:
    """Raise ``RequestError`` if a JSON schema in a text of ``grammar_of`` has no finite value."""
    if not any(key in grammar for key in REFERENCES):
        return  # without references there is no recursion
    whole = grammar_from(grammar)
    for form in (whole, *whole.parts):
        if form.kind not in ("json", "structural_tag"):
            continue
        try:
            found = msgspec.json.decode(form.text)
        except (ValueError, RecursionError):  # the grammar compiler reports this
            continue
        _check_form(found, form)


def _check_form(found: Any, form: Grammar) -> None:
    if form.kind == "json":
        _refuse("the json of structured_outputs", found, form)
        return
    for number, each in enumerate(found["structures"]):
        what = f"the schema of structures[{number}] in structural_tag of structured_outputs"
        _refuse(what, each["schema"], form)


def _refuse(what: str, schema: Any, form: Grammar) -> None:
    if why := endless(schema, is_closed=form.is_closed):
        raise RequestError(f"{what} {why}", param="structured_outputs", code="invalid_grammar")


def endless(schema: Any, *, is_closed: bool = False) -> str:
    """Explain why no finite value satisfies the schema. Returns a predicate whose subject is the
    schema ("has no finite value: ..."), or "" if a finite value may exist.

    is_closed: objects have only properties that the schema names.
    """
    places = Places(schema, is_closed=is_closed)
    start = places.place([schema])
    try:
        ways = places.reachable([start])
    except TooLargeError:
        return ""
    with_value = _least_fixed_point(ways)
    if start in with_value:
        return ""
    path = places.path(_cycle(start, ways, with_value))
    return (
        f"has no finite value: {path:.80} requires a value of its own kind inside itself without "
        "end. Make a property optional or allow null (anyOf), so that the recursion can end"
    )


def without_endless(schema: Any, *, is_closed: bool = False) -> Any:
    """Replace optional parts of a schema that no finite value satisfies by ``false``, since a model
    that began such a part would never finish it.

    A part that contains the target of a reference is kept. is_closed: objects have only properties
    that the schema names.
    """
    if not any(key in str(schema) for key in REFERENCES):
        return schema
    places = Places(schema, is_closed=is_closed)
    parts = {path: part for path, part in _parts(schema) if isinstance(part, dict)}
    starts = {path: places.place([part]) for path, part in parts.items()}
    try:
        with_value = _least_fixed_point(places.reachable([*starts.values()]))
    except TooLargeError:
        return schema
    found = {path for path, start in starts.items() if start not in with_value}
    found -= _led_into(places.references, parts)
    return _replaced(schema, found) if found else schema


def _parts(schema: Any) -> Iterator[tuple[Path, Any]]:
    """All schemas nested in a schema (properties, items, alternatives, ...), with their paths."""
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, found = waiting.pop()
        for key, value in found.items() if isinstance(found, dict) else ():
            inner: list[tuple[Path, Any]] = []
            if key in BY_NAME and isinstance(value, dict):
                inner = [((*path, key, name), each) for name, each in value.items()]
            elif key in IN_LISTS and isinstance(value, list):
                inner = [((*path, key, at), each) for at, each in enumerate(value)]
            elif key in ALONE:
                inner = [((*path, key), value)]
            yield from inner
            waiting += inner


def _led_into(references: References, parts: dict[Path, Any]) -> set[Path]:
    """Return the paths of all schemas that contain, at any depth, the target of a reference."""
    targets = {id(each) for part in references.schemas for each in references.targets(part)}
    found: set[Path] = set()
    for path, part in parts.items():
        if id(part) in targets:
            found.update(path[:length] for length in range(len(path)))
    return found


def _replaced(schema: Any, paths: set[Path]) -> Any:
    """A copy of the schema with ``false`` at these paths."""
    whole = msgspec.json.decode(msgspec.json.encode(schema))
    for path in sorted(paths, key=len, reverse=True):  # inner schemas first
        holder = whole
        for step in path[:-1]:
            holder = holder[step]
        holder[path[-1]] = False
    return whole


def _least_fixed_point(ways: dict[Place, list[Way]]) -> set[Place]:
    """Return the places that a finite JSON value can satisfy. A place is a set of schemas for one
    value; ``ways``: for each place, the ways to build a value."""
    users: dict[Place, list[Place]] = defaultdict(list)
    for place, found in ways.items():
        for each in {each for way in found for each in (*way.needed, *way.others)}:
            users[each].append(place)
    with_value: set[Place] = set()
    waiting = deque(reversed(ways))
    while waiting:
        place = waiting.popleft()
        if place not in with_value and any(_is_open(way, with_value) for way in ways[place]):
            with_value.add(place)
            waiting.extend(users[place])
    return with_value


def _is_open(way: Way, with_value: set[Place]) -> bool:
    if any(each not in with_value for each in way.needed):
        return False
    return sum(each in with_value for each in way.others) >= way.num_others


def _cycle(start: Place, ways: dict[Place, list[Way]], with_value: set[Place]) -> Place:
    """Find the place to name in an error: follow places without a finite value from ``start``, each
    one needed by the place before it, until one repeats."""
    place, seen = start, set[Place]()
    while place not in seen:
        seen.add(place)
        closed = (
            each
            for way in ways[place]
            for each in (*way.needed, *way.others)
            if each not in with_value
        )
        place = next(closed, place)
    return place


class Places:
    """The places of one JSON schema and the ways to build a value for each of them. A place is a
    set of schemas that must hold for one value."""

    def __init__(self, document: Any, *, is_closed: bool) -> None:
        self.references = References(document)
        self._is_closed = is_closed
        self._schemas: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._steps = 0

    def place(self, schemas: list[Any]) -> Place:
        """Return the numbers of these schemas, all of which a value must satisfy."""
        return frozenset(self._number(each) for each in schemas if each is not True)

    def path(self, place: Place) -> str:
        """The path of a place in the JSON schema, for an error message; "#" if none is known."""
        paths = self.references.paths
        for number in sorted(place):
            schema = self._schemas[number]
            targets = self.references.targets(schema) if isinstance(schema, dict) else []
            for each in (*targets, schema):
                if id(each) in paths:
                    return paths[id(each)]
        return "#"

    def reachable(self, starts: list[Place]) -> dict[Place, list[Way]]:
        """Return the ways to build a value for each place in ``starts`` and for each place that
        such a value needs, directly or not."""
        ways: dict[Place, list[Way]] = {}
        waiting = [*starts]
        while waiting:
            place = waiting.pop()
            if place in ways:
                continue
            ways[place] = [way for schemas in self._meanings(place) for way in self._ways(schemas)]
            waiting += [e for way in ways[place] for e in (*way.needed, *way.others)]
        return ways

    def _number(self, schema: Any) -> int:
        """The number of a schema object, assigned at its first use."""
        if id(schema) not in self._numbers:
            self._numbers[id(schema)] = len(self._schemas)
            self._schemas.append(schema)  # keeps the object alive, so that its id stays unique
        return self._numbers[id(schema)]

    def _count(self, num: int = 1) -> None:
        self._steps += num
        if self._steps > MOST_STEPS:
            raise TooLargeError

    def _meanings(self, place: Place) -> Iterator[list[Schema]]:
        """Yield the combinations of schemas that a value at this place can satisfy: one list of
        schemas for each choice among the alternatives of ``anyOf`` and ``oneOf``.

        Follows references and ``allOf``. Skips choices in which a schema requires itself for the
        same value."""
        readings = [SchemaReading([Link(number) for number in place])]
        while readings:
            reading = readings.pop()
            choices = self._read(reading)
            if choices is None:
                continue
            if not choices:
                yield reading.schemas
                continue
            found = [reading]
            for options in choices:
                found = [more for each in found for more in each.with_one_of(options)]
                self._count(len(found))
            readings += found

    def _read(self, reading: SchemaReading) -> list[list[Link]] | None:
        """Collect waiting schemas until one has ``anyOf`` or ``oneOf``, and return its
        alternatives. [] if none has; ``None`` if no value satisfies the schemas."""
        while reading.waiting:
            self._count()
            link = reading.waiting.pop()
            schema = self._schemas[link.number]
            if link.number in reading.seen:
                if self._is_in(link.number, link.led):
                    return None
                continue
            reading.seen.add(link.number)
            if schema is False:
                return None
            if not isinstance(schema, dict):
                continue
            if _is_all(schema.get("not")):
                return None
            reading.schemas.append(schema)
            parts = [*self.references.targets(schema), *_list(schema.get("allOf"))]
            reading.waiting += self._links(parts, link)
            choices = [_list(schema[key]) for key in CHOICES if _list(schema.get(key))]
            if choices:
                return [self._links(options, link) for options in choices]
        return []

    def _links(self, schemas: list[Any], led: Link) -> list[Link]:
        return [Link(self._number(each), led) for each in schemas]

    def _is_in(self, number: int, led: Link | None) -> bool:
        """True if schema ``number`` occurs in the chain of links that ends with ``led``."""
        while led is not None:
            self._count()
            if led.number == number:
                return True
            led = led.led
        return False

    def _ways(self, schemas: list[Schema]) -> Iterator[Way]:
        """The ways to build a value that satisfies all these schemas."""
        self._count()
        types = set(EVERY_TYPE)
        for each in schemas:
            types &= _types(each)
        if any("enum" in each or "const" in each for each in schemas):
            if any(_is_one(value, schemas, types) for value in _listed(schemas)):
                yield Way(())
            return
        if types & SCALARS - _empty(schemas):
            yield Way(())
        if "array" in types:
            yield from self._arrays(schemas)
        if "object" in types:
            yield from self._objects(schemas)

    def _arrays(self, schemas: list[Schema]) -> Iterator[Way]:
        contained = [each["contains"] for each in schemas if "contains" in each]
        counts = [_int(each.get("minContains"), 1) for each in schemas if "contains" in each]
        least = max([0, *counts, *(_int(each.get("minItems"), 0) for each in schemas)])
        if any(_int(each.get("maxItems"), least) < least for each in schemas):
            return
        num_named = max(0, *(len(_prefix(each)) for each in schemas)) if schemas else 0
        items = [
            self.place([_item(each, at) for each in schemas])
            for at in range(min(least, num_named + 1))
        ]
        any_item = [_item(each, num_named) for each in schemas]
        held = zip(contained, counts, strict=True)
        items += [self.place([*any_item, each]) for each, count in held if count and not num_named]
        yield Way(tuple(items))

    def _objects(self, schemas: list[Schema]) -> Iterator[Way]:
        names = {n for each in schemas for n in _list(each.get("required")) if isinstance(n, str)}
        least = max([0, *(_int(each.get("minProperties"), 0) for each in schemas)])
        if any(_int(each.get("maxProperties"), len(names)) < len(names) for each in schemas):
            return
        needed = tuple(self.place(self._property(schemas, name)) for name in sorted(names))
        missing = least - len(names)
        if missing <= 0:
            yield Way(needed)
            return
        named = {n for each in schemas for n in _dict(each.get("properties"))} - names
        others = tuple(self.place(self._property(schemas, name)) for name in sorted(named))
        yield Way(needed, others, missing)
        # Or with any number of properties that no schema names.
        unnamed = [self._additional(each) for each in schemas]
        if not any("patternProperties" in each for each in schemas):
            yield Way((*needed, self.place(unnamed)))
        else:
            yield Way(needed)

    def _property(self, schemas: list[Schema], name: str) -> list[Any]:
        """The schemas for property ``name`` in an object that satisfies all of ``schemas``."""
        found = []
        for each in schemas:
            properties = _dict(each.get("properties"))
            own = [properties[name]] if name in properties else []
            patterns = _dict(each.get("patternProperties"))
            own += [p for pattern, p in patterns.items() if _matches(pattern, name)]
            found += own or [True if _is_unsure(patterns) else self._additional(each)]
        return found

    def _additional(self, schema: Schema) -> Any:
        is_open = "properties" not in schema and "patternProperties" not in schema
        if self._is_closed and not (is_open and schema.get("type") != "object"):
            return schema.get("additionalProperties", False)
        return schema.get("additionalProperties", True)


def _is_all(schema: Any) -> bool:
    """True if every value satisfies the schema."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= SAYS_NOTHING)


def _types(schema: Schema) -> set[str]:
    given = schema.get("type", list(EVERY_TYPE))
    found = {given} if isinstance(given, str) else {e for e in _list(given) if isinstance(e, str)}
    if not found or not found <= EVERY_TYPE:
        return EVERY_TYPE  # the grammar compiler reports unknown types
    return {*found, "integer"} if "number" in found else found


def _listed(schemas: list[Schema]) -> list[Any]:
    """The values of the first ``enum`` or ``const`` in these schemas."""
    first = next(each for each in schemas if "enum" in each or "const" in each)
    return [first["const"]] if "const" in first else _list(first["enum"])


def _is_one(value: Any, schemas: list[Schema], types: set[str]) -> bool:
    """True if the value satisfies every ``enum`` and ``const`` and has an allowed type."""
    if type(value) in KINDS and not types & KINDS[type(value)]:
        return False
    lists = [_list(each["enum"]) for each in schemas if "enum" in each]
    lists += [[each["const"]] for each in schemas if "const" in each]
    return all(value in each for each in lists)


def _empty(schemas: list[Schema]) -> set[str]:
    """The JSON types without valid values: a minimum exceeds a maximum, for numbers or for the
    length of strings."""
    found: set[str] = set()
    if _is_empty(schemas, ("minLength",), ("maxLength",)):
        found.add("string")
    lows, highs = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
    if _is_empty(schemas, lows, highs):
        found |= {"integer", "number"}
    return found


def _is_empty(schemas: list[Schema], lows: Sequence[str], highs: Sequence[str]) -> bool:
    low = [each[key] for each in schemas for key in lows if _is_number(each.get(key))]
    high = [each[key] for each in schemas for key in highs if _is_number(each.get(key))]
    return bool(low and high) and max(low) > min(high)


def _prefix(schema: Schema) -> list[Any]:
    """The schemas for the first items of an array (``prefixItems``; formerly ``items``)."""
    return _list(schema.get("prefixItems")) or _list(schema.get("items"))


def _item(schema: Schema, at: int) -> Any:
    prefix = _prefix(schema)
    if at < len(prefix):
        return prefix[at]
    is_old = isinstance(schema.get("items"), list)
    return schema.get("additionalItems" if is_old else "items", True)


def _matches(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _is_unsure(patterns: dict[str, Any]) -> bool:
    """True if a pattern is not valid in Python, so that what it matches is unknown."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error:
            return True
    return False


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _int(value: Any, other: int) -> int:
    return int(value) if _is_number(value) else other


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
