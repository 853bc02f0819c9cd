"""Splits the schemas of a value into readings: alternative lists of schemas without choices.

References and ``allOf`` are followed. ``anyOf``, ``oneOf``, ``if``, ``not`` and dependent keywords
are choices. Each combination of alternatives is a reading, except those that visibly contradict
themselves. If there are too many, a choice is replaced by a schema that allows more values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from engine.structured.checked.documents import NEWEST, Document, SchemaResource
from engine.structured.checked.exact import Exact, exact
from engine.structured.keywords import check_shapes, is_idle, listed, named, texts_in
from engine.structured.schemas import EVERY_TYPE, SchemaError, types_of
from engine.structured.weakened.opposites import EXCEPT, Opposite

Schema = dict[str, Any]

MOST_READINGS = 64  # per value
MOST_IN_ALL = 100_000  # ways of choices in the whole document
MOST_TOGETHER = 3  # alternatives of anyOf whose combinations are tried
UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


class SchemaPart(NamedTuple):
    """A schema that applies to a value."""

    schema: Any
    holders: tuple[int, ...] = ()  # ids of schemas around it with unevaluated keywords
    is_silent: bool = False  # it does not count as evaluating the names it has
    is_flat: bool = False  # its references and choices were read, only its own keywords are left
    rank: tuple[int, ...] = ()  # its position in the document, by the keywords that lead to it

    def within(self, schema: Any, *steps: int) -> SchemaPart:
        """Make the part for a schema that is nested in this one and applies to the same value.
        steps: indices that lead from this schema to the nested one."""
        return self._replace(schema=schema, rank=(*self.rank, *steps))


class SchemaChoice(NamedTuple):
    """A schema keyword that can be satisfied in several ways, each of which is a list of parts."""

    keyword: str
    number: int
    ways: list[list[SchemaPart]]
    is_exact: bool = True


@dataclass(slots=True)
class SchemaReading:
    """The schemas and limits that a value must satisfy for one alternative of each choice."""

    waiting: list[SchemaPart]
    parts: list[SchemaPart] = field(default_factory=list)
    choices: list[SchemaChoice] = field(default_factory=list)
    seen: set[tuple[int, tuple[int, ...], bool, bool]] = field(default_factory=set)
    types: set[str] = field(default_factory=lambda: set(EVERY_TYPE))
    required: set[str] = field(default_factory=set)
    constants: dict[str, list[Exact]] = field(default_factory=dict)  # by property
    excluded: dict[str, list[Exact]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)  # ways of oneOf, by the choice's number
    loose: dict[str, Any] = field(default_factory=dict)
    """Keywords that the reading does not fully enforce, each with a value that it has."""
    holders: dict[int, Schema] = field(default_factory=dict)

    def by(self, choice: SchemaChoice, number: int) -> SchemaReading:
        """Return a copy of the reading with the alternative ``choice.ways[number]`` added."""
        other = SchemaReading(
            **{each.name: copy(getattr(self, each.name)) for each in fields(self)}
        )
        other.waiting += reversed(choice.ways[number])
        if choice.keyword == "oneOf":
            other.taken[choice.number] = number
        if not choice.is_exact:
            other.loose[choice.keyword] = True
        return other


class SchemaReader:
    """Splits the schemas of one document into readings."""

    def __init__(self, document: Document, *, is_lenient: bool) -> None:
        self.document = document
        self._is_lenient = is_lenient
        self._left = MOST_IN_ALL
        self._made: dict[Any, Any] = {}  # schemas made here, kept alive so that ids stay unique
        self._found: dict[tuple[int, str], list[Any]] = {}  # targets by schema and keyword

    def readings(self, schemas: Sequence[Any]) -> list[SchemaReading]:
        """Return all ways to satisfy all schemas; [] if the schemas contradict each other."""
        done: list[SchemaReading] = []
        first = [SchemaPart(each, rank=(number,)) for number, each in enumerate(schemas)]
        pending = [SchemaReading(first[::-1])]
        while pending:
            reading = pending.pop()
            if not self._read_on(reading):
                continue
            if not reading.choices:
                done.append(reading)
                continue
            choice = reading.choices.pop(0)
            self._left -= len(choice.ways)
            if self._left < 0 or len(done) + len(pending) + len(choice.ways) > MOST_READINGS:
                self._pass_over(reading, choice)
                pending.append(reading)
            else:
                pending += [reading.by(choice, each) for each in reversed(range(len(choice.ways)))]
        return done

    def targets(self, schema: Schema, keys: Sequence[str] = REFERENCES) -> list[Any]:
        """Return the schemas to which ``keys`` of a schema refer; for a dynamic reference, all
        possible targets. Raises ``SchemaError`` for a target outside the document."""
        found: list[Any] = []
        for key in keys:
            if key not in schema:
                continue
            if (known := self._found.get((id(schema), key))) is not None:
                found += known
                continue
            target = self.document.found(schema, schema[key], key)
            own = [target] if key == "$ref" else self._dynamic(schema, target, key)
            self._found[id(schema), key] = own
            found += own
        return found

    def read(self, schema: Schema) -> Schema:
        """Drop keywords next to ``$ref`` from a schema of a draft that ignores them (up to 7)."""
        if len(schema) > 1 and "$ref" in schema and self._draft(schema) <= 7:
            only: Schema = self._made.setdefault(("$ref", id(schema)), {"$ref": schema["$ref"]})
            return only
        return schema

    def home(self, schema: Schema) -> SchemaResource | None:
        """Return the document's part with a schema; ``None`` if this module made the schema."""
        try:
            return self.document.home(schema)
        except KeyError:
            return None

    def _draft(self, schema: Schema) -> int:
        home = self.home(schema)
        return NEWEST if home is None else home.draft

    def _dynamic(self, schema: Schema, target: Any, key: str) -> list[Any]:
        if key == "$recursiveRef":
            if not self.document.home(target).is_recursive:
                return [target]
            return [each.root for each in self.document.resources if each.is_recursive]
        name = schema[key].partition("#")[2]
        if not isinstance(target, dict) or target.get("$dynamicAnchor") != name:
            return [target]
        return [each.dynamic[name] for each in self.document.resources if name in each.dynamic]

    # -- reading

    def _read_on(self, reading: SchemaReading) -> bool:
        """Read all schemas of a reading that were not read yet. Returns ``False`` if they
        contradict each other."""
        while reading.waiting:
            part = reading.waiting.pop()
            if part.schema is False:
                return False
            if part.schema is True:
                continue
            if not isinstance(part.schema, dict):
                raise SchemaError(f"a schema is {part.schema!r:.80}, must be an object or a bool")
            key = id(part.schema), part.holders, part.is_silent, part.is_flat
            if key in reading.seen:
                continue
            reading.seen.add(key)
            if not self._read_part(reading, part):
                return False
        return True

    def _read_part(self, reading: SchemaReading, part: SchemaPart) -> bool:
        schema = self.read(part.schema)
        if part.is_flat:
            reading.parts.append(part._replace(schema=schema))
            return self._add_limits(reading, schema)
        check_shapes(schema, is_lenient=self._is_lenient)
        holders = part.holders
        if any(key in schema and not is_idle(key, schema[key]) for key in UNEVALUATED):
            holders = tuple(dict.fromkeys((*holders, id(part.schema))))
            reading.holders[id(part.schema)] = schema
        around = part._replace(holders=holders)
        reading.waiting += reversed([*self._in_order(schema, around)])
        reading.choices += self._choices(schema, around)
        return True

    def _in_order(self, schema: Schema, part: SchemaPart) -> Iterator[SchemaPart]:
        """Yield the parts of a schema that always apply, in the order of its keys: its own
        keywords, and the schemas of ``allOf`` and ``$ref``."""
        keys = list(schema)
        place = keys.index("properties") if "properties" in schema else len(keys)
        yield part._replace(is_flat=True, rank=(*part.rank, place))
        for at, key in enumerate(keys):
            if key == "allOf":
                for number, each in enumerate(listed(schema[key])):
                    yield part.within(each, at, number)
            elif key == "$ref":
                for each in self.targets(part.schema, [key]):
                    yield part.within(each, at)

    def _add_limits(self, reading: SchemaReading, schema: Schema) -> bool:
        """Limit a reading by a schema's keywords. Returns ``False`` if it allows no value."""
        if "type" in schema:
            reading.types &= types_of(schema)
        if not reading.types:
            return False
        if reading.types == {"object"}:
            reading.required.update(texts_in(schema.get("required")))
        for name, each in named(schema.get("properties")).items():
            self._add_constants(reading, name, each)
        return not any(reading.constants.get(name) == [] for name in reading.required)

    def _add_constants(self, reading: SchemaReading, name: str, schema: Any) -> None:
        if schema is False:
            reading.constants[name] = []
        if not isinstance(schema, dict):
            return
        if (values := self._values(schema)) is not None:
            known = reading.constants.get(name, values)
            reading.constants[name] = [each for each in known if each in values]
        if EXCEPT in schema:
            before = reading.excluded.get(name, [])
            reading.excluded[name] = [*before, *map(exact, schema[EXCEPT])]
        if name in reading.constants and name in reading.excluded:
            reading.constants[name] = [
                each for each in reading.constants[name] if each not in reading.excluded[name]
            ]

    def _values(self, schema: Schema) -> list[Exact] | None:
        """Return the values of enum or const, also by reference; ``None`` if there are none."""
        for _ in range(8):
            if "const" in schema:
                return [exact(schema["const"])]
            if "enum" in schema:
                return [exact(each) for each in listed(schema["enum"])]
            if "$ref" not in schema:
                return None
            targets = self.targets(schema)
            if not targets or not isinstance(targets[0], dict):
                return None
            schema = targets[0]
        return None

    # -- choices

    def _choices(self, schema: Schema, part: SchemaPart) -> Iterator[SchemaChoice]:
        keys = list(schema)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                at = keys.index(key)
                alternatives = listed(schema[key])
                parts = {id(each): part.within(each, at, n) for n, each in enumerate(alternatives)}
                ways = [[parts[id(each)]] for each in alternatives]
                if key == "anyOf" and part.holders:
                    ways += [[parts[id(each)] for each in way] for way in together(alternatives)]
                yield SchemaChoice(key, id(schema[key]), ways)
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                targets = self.targets(part.schema, [key])
                ways = [[part.within(each, keys.index(key))] for each in targets]
                yield SchemaChoice(key, id(schema), ways, len(ways) == 1)
        if "if" in schema and ("then" in schema or "else" in schema or part.holders):
            yield self._condition(schema, part)
        if "not" in schema:
            ways, is_exact = self._opposite(schema["not"], part)
            yield SchemaChoice("not", id(schema), ways, is_exact)
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            around = part.within(schema, keys.index(key)) if key in schema else part
            for number, (name, each) in enumerate(named(schema.get(key)).items()):
                yield self._dependency(key, name, each, around.within(schema, number))

    def _condition(self, schema: Schema, part: SchemaPart) -> SchemaChoice:
        ways, is_exact = self._opposite(schema["if"], part)
        keys = list(schema)
        condition, then, otherwise = (
            part.within(schema.get(key, True), keys.index(key) if key in schema else 0)
            for key in ("if", "then", "else")
        )
        return SchemaChoice(
            "if", id(schema), [[condition, then], *([*each, otherwise] for each in ways)], is_exact
        )

    def _opposite(self, schema: Any, part: SchemaPart) -> tuple[list[list[SchemaPart]], bool]:
        key = ("not", id(schema))
        if key not in self._made:
            self._made[key] = Opposite(schema, self.targets)
        found: Opposite = self._made[key]
        ways = [[SchemaPart(each, part.holders, is_silent=True)] for each in found.ways]
        return ways, found.is_exact

    def _dependency(self, key: str, name: str, each: Any, part: SchemaPart) -> SchemaChoice:
        made = ("dependency", id(each), name)
        if made not in self._made:
            needed = [name, *each] if isinstance(each, list) else [name]
            self._made[made] = (
                {"properties": {name: False}},
                {"type": "object", "required": needed},
                each,
            )
        absent, present, each = self._made[made]
        without = [SchemaPart(absent, part.holders, is_silent=True)]
        with_it = [part._replace(schema=present)]
        if not isinstance(each, list):
            with_it.append(part._replace(schema=each))
        return SchemaChoice(key, id(absent), [without, with_it])

    def _pass_over(self, reading: SchemaReading, choice: SchemaChoice) -> None:
        """Replace a choice with too many alternatives by one schema that has all properties named
        in any alternative."""
        reading.loose[choice.keyword] = True
        own = ("union", choice.keyword, choice.number)
        if own not in self._made:
            self._made[own] = self._union(choice)
        part = choice.ways[0][0] if choice.ways else None
        if part is not None:
            reading.waiting.append(SchemaPart(self._made[own], part.holders, rank=part.rank))

    def _union(self, choice: SchemaChoice) -> Schema:
        names: dict[str, list[Any]] = {}
        patterns: dict[str, list[Any]] = {}
        is_answered = False
        for way in choice.ways:
            for each in self._around(way):
                for name, own in named(each.get("properties")).items():
                    names.setdefault(name, []).append(own)
                for name, own in named(each.get("patternProperties")).items():
                    patterns.setdefault(name, []).append(own)
                is_answered = is_answered or "additionalProperties" in each
        found: Schema = {"additionalProperties": True} if is_answered else {}
        found["properties"] = {name: _any(each) for name, each in names.items()}
        found["patternProperties"] = {name: _any(each) for name, each in patterns.items()}
        return found

    def _around(self, way: list[SchemaPart]) -> Iterator[Schema]:
        """Yield all schemas of an alternative that apply to the value itself, also nested ones."""
        waiting = [each.schema for each in way if not each.is_silent]
        seen = set()
        while waiting:
            schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            seen.add(id(schema))
            schema = self.read(schema)
            yield schema
            waiting += self.targets(schema)
            for key in ("allOf", "anyOf", "oneOf"):
                waiting += listed(schema.get(key))
            waiting += [schema[key] for key in ("if", "then", "else") if key in schema]
            waiting += named(schema.get("dependentSchemas")).values()


def _any(schemas: list[Any]) -> Any:
    kept = list({id(each): each for each in schemas if each is not False}.values())
    if any(each is True for each in kept):
        return True
    return kept[0] if len(kept) == 1 else {"anyOf": kept}


def together(alternatives: Sequence[Any]) -> list[list[Any]]:
    """Return groups of alternatives that one value may satisfy together: each pair, and all of
    them. Only alternatives that may name properties count. Returns [] if there are too many."""
    able = [each for each in alternatives if _may_name(each)]
    if not 1 < len(able) <= MOST_TOGETHER:
        return []
    pairs = [[other, one] for at, one in enumerate(able) for other in able[:at]]
    return [*pairs, able] if len(able) > 2 else pairs


def _may_name(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    kind = schema.get("type", "object")
    speaks = ("properties", "patternProperties", "allOf", "anyOf", "oneOf", "if", *REFERENCES)
    return "object" in (kind if isinstance(kind, list) else [kind]) and any(
        key in schema for key in speaks
    )
