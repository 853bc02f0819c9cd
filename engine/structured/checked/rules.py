"""A schema as rules: each schema of the document once, with what it demands sorted by the kind of
value that it speaks of. References are resolved, recursive ones too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.structured.checked.documents import Document, Schema, SchemaResource
from engine.structured.checked.exact import (
    Exact,
    Number,
    exact,
    is_multiple,
)
from engine.structured.checked.expressions import searcher
from engine.structured.checked.few import few_texts
from engine.structured.checked.formats import FORMATS
from engine.structured.schemas import SchemaError

Scope = tuple[SchemaResource, ...]  # resources that were entered, the outermost first
MAX_DEPTH = 4  # of rules within each other that are looked at
MANY = 64  # values: more than will be written
MOST_IN_DOMAIN = 64
TextCheck = tuple[str, Callable[[str], bool]]  # with the keyword
NumberCheck = tuple[str, Callable[[Number], bool]]


class MemberRules:
    """What a schema demands of an object."""

    def __init__(self) -> None:
        self.properties: dict[str, Rule] = {}
        self.patterns: list[tuple[Callable[[str], bool], Rule]] = []
        self.additional: Rule | None = None
        self.names: Rule | None = None
        self.unevaluated: Rule | None = None
        self.required: tuple[str, ...] = ()
        self.dependent_names: list[tuple[str, tuple[str, ...]]] = []
        self.least = 0
        self.most: int | None = None


class Elements:
    """What a schema demands of an array."""

    def __init__(self) -> None:
        self.prefix: list[Rule] = []
        self.items: Rule | None = None
        self.contained: Rule | None = None
        self.least_contained = 1
        self.most_contained: int | None = None
        self.contained_is_evaluated = True
        self.unevaluated: Rule | None = None
        self.least = 0
        self.most: int | None = None
        self.is_unique = False


NO_MEMBERS, NO_ELEMENTS = MemberRules(), Elements()  # of all that demand nothing of them


class Rule:
    """What one schema demands of a value."""

    def __init__(self) -> None:
        self.is_false = False
        self.types: frozenset[str] | None = None
        self.values: dict[Exact, None] | None = None  # of enum or const, in their order
        self.texts: list[TextCheck] = []
        self.most_chars: int | None = None
        self.numbers: list[NumberCheck] = []
        self.most: Number | None = None  # no number above is right
        self.least: Number | None = None  # and none below
        # All numbers, or all strings, that it allows, if they are few.
        self.domain: range | None = None
        self.few_texts: dict[str, None] | None = None
        # Schemas that hold for the same value.
        self.all_of: list[Rule] = []
        self.any_of: list[list[Rule]] = []
        self.one_of: list[list[Rule]] = []
        self.negated: Rule | None = None
        self.condition: Rule | None = None
        self.consequence: Rule | None = None
        self.alternative: Rule | None = None
        self.dependents: list[tuple[str, Rule]] = []  # if there is a property of this name
        self.members = NO_MEMBERS
        self.elements = NO_ELEMENTS

    @property
    def lists(self) -> list[Iterable[Exact]]:
        """What it allows, listed in one way or another."""
        found: tuple[Iterable[Exact] | None, ...] = (self.values, self.domain, self.few_texts)
        return [each for each in found if each is not None]

    @property
    def names(self) -> list[str]:
        """Names of properties that it mentions."""
        own = self.members
        found = [*own.properties, *own.required, *(name for name, _ in self.dependents)]
        return found + [name for first, rest in own.dependent_names for name in (first, *rest)]

    @property
    def same(self) -> list[Rule]:
        """The rules that are looked at for the same value."""
        found = [*self.all_of, *(each for group in self.any_of + self.one_of for each in group)]
        single = (self.negated, self.condition, self.consequence, self.alternative)
        return [*found, *filter(None, single), *(each for _, each in self.dependents)]


def num_values(rule: Rule, depth: int = 0) -> int:
    """How many values satisfy a rule, up to ``MANY``: an upper bound that is quick to find.

    depth: how deep the rule is within others that were looked at.
    """
    if rule.is_false or depth > MAX_DEPTH:
        return 0 if rule.is_false else MANY

    def together(rules: Iterable[Rule]) -> int:
        return sum(num_values(each, depth + 1) for each in rules)

    groups = [*([each] for each in rule.all_of), *rule.any_of, *rule.one_of]
    limits = [*map(together, groups), *(len([*each]) for each in rule.lists)]
    if rule.types is not None and rule.types <= {"boolean", "null", "object"}:
        sizes = {"boolean": 2, "null": 1, "object": _num_objects(rule, depth)}
        limits.append(sum(sizes[each] for each in rule.types))
    return min(MANY, *limits) if limits else MANY


def _num_objects(rule: Rule, depth: int) -> int:
    own, found = rule.members, 1
    if own.additional is None or not own.additional.is_false or own.patterns:
        return MANY
    for name, each in own.properties.items():
        found *= num_values(each, depth + 1) + (name not in own.required)
        if found >= MANY:
            return MANY
    return found


def rules_of(schema: Any) -> Rule:
    """The rule of a whole document. Raises ``SchemaError`` for a reference to another file, or one
    that leads back to itself with no value in between."""
    reader = _Reader(Document(schema))
    root = reader.rule(schema)
    reader.read_all()
    _check_cycles(reader.made)
    return root


class _Reader:
    """Makes rules, each once for a schema and the scope it is reached in."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._rules: dict[tuple[int, Scope], Rule] = {}
        self._waiting: list[tuple[Schema, Rule, Scope]] = []
        self._scope: Scope = ()
        self.draft = 0  # of the schema that is read
        self.schema: Schema = {}
        self.made: list[Rule] = []

    def rule(self, schema: Any) -> Rule:
        """The rule of a schema that is reached from the one that is read."""
        if not isinstance(schema, dict):
            rule = Rule()
            rule.is_false = schema is False
            self.made.append(rule)
            return rule
        scope = self._entered(schema)
        key = id(schema), scope
        if key not in self._rules:
            self._rules[key] = rule = Rule()
            self.made.append(rule)
            self._waiting.append((schema, rule, scope))
        return self._rules[key]

    def read_all(self) -> None:
        while self._waiting:
            schema, rule, self._scope = self._waiting.pop()
            self.schema, self.draft = schema, self._document.home(schema).draft
            if self.draft <= 7 and "$ref" in schema:
                schema = {"$ref": schema["$ref"]}
            for key, value in schema.items():
                if (read := KEYWORDS.get(key)) is not None:
                    read(self, rule, value)
            rule.domain = _domain(schema)

    def referred(self, rule: Rule, keyword: str, reference: Any) -> None:
        if not isinstance(reference, str):
            return
        target = self._document.found(self.schema, reference, keyword)
        if keyword != "$ref" and isinstance(target, dict):
            target = self._outermost(target, keyword)
        rule.all_of.append(self.rule(target))

    def _outermost(self, target: Schema, keyword: str) -> Any:
        """The schema that a dynamic reference means where it is read."""
        if keyword == "$recursiveRef":
            if not self._document.home(target).is_recursive:
                return target
            return next((each.root for each in self._scope if each.is_recursive), target)
        reference = self.schema[keyword]
        name = reference.partition("#")[2]
        if target.get("$dynamicAnchor") != name:
            return target
        return next((each.dynamic[name] for each in self._scope if name in each.dynamic), target)

    def _entered(self, schema: Schema) -> Scope:
        if not self._document.is_dynamic:
            return ()
        home = self._document.home(schema)
        return self._scope if home in self._scope else (*self._scope, home)


def _domain(schema: Schema) -> range | None:
    if schema.get("type") != "integer":
        return None
    low = _end(schema, "minimum", "exclusiveMinimum", 1)
    high = _end(schema, "maximum", "exclusiveMaximum", -1)
    if low is None or high is None or high - low >= MOST_IN_DOMAIN:
        return None
    return range(low, high + 1)


def _end(schema: Schema, key: str, strict: str, step: int) -> int | None:
    """The first or the last whole number; ``None`` if that is not plain to see."""
    if strict in schema:
        return schema[strict] + step if _is_int(schema[strict]) else None
    return schema[key] if _is_int(schema.get(key)) else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_cycles(rules: Sequence[Rule]) -> None:
    """Refuse a schema that holds for a value if it holds for this value."""
    done: set[Rule] = set()
    for first in rules:
        if not first.same:
            continue
        path: list[Rule] = []
        on_path: set[Rule] = set()
        waiting: list[tuple[Rule, bool]] = [(first, False)]
        while waiting:
            rule, is_left = waiting.pop()
            if is_left:
                on_path.discard(path.pop())
                done.add(rule)
                continue
            if rule in on_path:
                raise SchemaError("$ref leads back to itself with no property or item in between")
            if rule in done:
                continue
            path.append(rule)
            on_path.add(rule)
            waiting.append((rule, True))
            waiting.extend((each, False) for each in rule.same)


Keyword = Callable[[_Reader, Rule, Any], None]


Part = Callable[[Rule], Any]


def _itself(rule: Rule) -> Any:
    return rule


def _members(rule: Rule) -> MemberRules:
    if rule.members is NO_MEMBERS:
        rule.members = MemberRules()
    return rule.members


def _elements(rule: Rule) -> Elements:
    if rule.elements is NO_ELEMENTS:
        rule.elements = Elements()
    return rule.elements


def _many(attribute: str) -> Keyword:
    """Lists of schemas for the same value."""

    def read(reader: _Reader, rule: Rule, value: Any) -> None:
        if isinstance(value, list):
            getattr(rule, attribute).append([reader.rule(each) for each in value])

    return read


def _one(attribute: str, of: Part = _itself) -> Keyword:
    """A schema. of: the part of the rule that has it."""

    def read(reader: _Reader, rule: Rule, value: Any) -> None:
        setattr(of(rule), attribute, reader.rule(value))

    return read


def _count(attribute: str, of: Part) -> Keyword:
    def read(reader: _Reader, rule: Rule, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            setattr(of(rule), attribute, int(value))

    return read


def _bound(keyword: str, holds: Callable[[Number, Number], bool]) -> Keyword:
    def read(reader: _Reader, rule: Rule, value: Any) -> None:
        if isinstance(value, int | float) and not isinstance(value, bool):
            limit = exact(value)
            rule.numbers.append((keyword, lambda number: holds(number, limit)))
            if keyword.endswith("aximum"):
                rule.most = limit if rule.most is None else min(rule.most, limit)
            else:
                rule.least = limit if rule.least is None else max(rule.least, limit)

    return read


def _limit(keyword: str, strict: str, holds: Callable[[Number, Number], bool]) -> Keyword:
    """A bound, which draft 4 makes exclusive by a boolean."""

    def read(reader: _Reader, rule: Rule, value: Any) -> None:
        is_strict = reader.schema.get(strict) is True
        bound = _bound(keyword, lambda a, b: holds(a, b) and not (is_strict and a == b))
        bound(reader, rule, value)

    return read


def _all_of(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, list):
        rule.all_of += [reader.rule(each) for each in value]


def _reference(keyword: str) -> Keyword:
    return lambda reader, rule, value: reader.referred(rule, keyword, value)


def _types(reader: _Reader, rule: Rule, value: Any) -> None:
    rule.types = frozenset([value] if isinstance(value, str) else map(str, value))


def _values(reader: _Reader, rule: Rule, value: Any) -> None:
    allowed = dict.fromkeys(map(exact, value if isinstance(value, list) else []))
    _allow(rule, allowed)


def _allow(rule: Rule, allowed: dict[Exact, None]) -> None:
    rule.values = (
        allowed if rule.values is None else {each: None for each in rule.values if each in allowed}
    )


def _least_chars(reader: _Reader, rule: Rule, value: Any) -> None:
    rule.texts.append(("minLength", lambda text: len(text) >= value))


def _most_chars(reader: _Reader, rule: Rule, value: Any) -> None:
    rule.texts.append(("maxLength", lambda text: len(text) <= value))
    rule.most_chars = int(value)


def _pattern(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, str):
        rule.texts.append(("pattern", searcher(value)))
        if (few := few_texts(value)) is not None:
            rule.few_texts = dict.fromkeys(few)


def _format(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, str) and value in FORMATS:
        rule.texts.append(("format", FORMATS[value]))


def _multiple(reader: _Reader, rule: Rule, value: Any) -> None:
    step = exact(value)
    rule.numbers.append(("multipleOf", lambda number: is_multiple(number, step)))


def _properties(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, dict):
        _members(rule).properties = {name: reader.rule(each) for name, each in value.items()}


def _patterns(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, dict):
        _members(rule).patterns = [
            (searcher(name), reader.rule(each)) for name, each in value.items()
        ]


def _required(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, list):
        _members(rule).required = tuple(
            dict.fromkeys(each for each in value if isinstance(each, str))
        )


def _dependents(reader: _Reader, rule: Rule, value: Any) -> None:
    """``dependentRequired``, ``dependentSchemas`` and what was one of both before."""
    for name, each in value.items() if isinstance(value, dict) else ():
        if isinstance(each, list):
            _members(rule).dependent_names.append((name, tuple(map(str, each))))
        else:
            rule.dependents.append((name, reader.rule(each)))


def _prefix(reader: _Reader, rule: Rule, value: Any) -> None:
    if isinstance(value, list):
        _elements(rule).prefix = [reader.rule(each) for each in value]


def _items(reader: _Reader, rule: Rule, value: Any) -> None:
    """A list is what ``prefixItems`` is now, and ``additionalItems`` then what ``items`` is."""
    if not isinstance(value, list):
        _elements(rule).items = reader.rule(value)
        return
    _prefix(reader, rule, value)
    if "additionalItems" in reader.schema:
        _elements(rule).items = reader.rule(reader.schema["additionalItems"])


def _contains(reader: _Reader, rule: Rule, value: Any) -> None:
    _elements(rule).contained = reader.rule(value)
    _elements(rule).contained_is_evaluated = reader.draft > 2019


def _unique(reader: _Reader, rule: Rule, value: Any) -> None:
    _elements(rule).is_unique = value is True


KEYWORDS: dict[str, Keyword] = {
    "$ref": _reference("$ref"),
    "$dynamicRef": _reference("$dynamicRef"),
    "$recursiveRef": _reference("$recursiveRef"),
    "type": _types,
    "enum": _values,
    "const": lambda reader, rule, value: _allow(rule, {exact(value): None}),
    "allOf": _all_of,
    "anyOf": _many("any_of"),
    "oneOf": _many("one_of"),
    "not": _one("negated"),
    "if": _one("condition"),
    "then": _one("consequence"),
    "else": _one("alternative"),
    "dependentSchemas": _dependents,
    "dependentRequired": _dependents,
    "dependencies": _dependents,
    "properties": _properties,
    "patternProperties": _patterns,
    "additionalProperties": _one("additional", _members),
    "propertyNames": _one("names", _members),
    "unevaluatedProperties": _one("unevaluated", _members),
    "required": _required,
    "minProperties": _count("least", _members),
    "maxProperties": _count("most", _members),
    "prefixItems": _prefix,
    "items": _items,
    "contains": _contains,
    "minContains": _count("least_contained", _elements),
    "maxContains": _count("most_contained", _elements),
    "unevaluatedItems": _one("unevaluated", _elements),
    "minItems": _count("least", _elements),
    "maxItems": _count("most", _elements),
    "uniqueItems": _unique,
    "minLength": _least_chars,
    "maxLength": _most_chars,
    "pattern": _pattern,
    "format": _format,
    "minimum": _limit("minimum", "exclusiveMinimum", lambda a, b: a >= b),
    "maximum": _limit("maximum", "exclusiveMaximum", lambda a, b: a <= b),
    "exclusiveMinimum": _bound("exclusiveMinimum", lambda a, b: a > b),
    "exclusiveMaximum": _bound("exclusiveMaximum", lambda a, b: a < b),
    "multipleOf": _multiple,
}
