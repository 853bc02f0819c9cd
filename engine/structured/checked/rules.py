"""Compiles all schemas of a document to rules, and resolves references, even recursive ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.structured.checked.documents import Document, Schema, SchemaResource
from engine.structured.checked.exact import Exact, Number, exact, is_multiple
from engine.structured.checked.expressions import searcher
from engine.structured.checked.few import few_texts
from engine.structured.checked.formats import FORMATS
from engine.structured.keywords import is_number, listed, named, texts_in
from engine.structured.schemas import SchemaError

Scope = tuple[SchemaResource, ...]  # the resources entered so far, the outermost first
MAX_DEPTH = 4  # nested rules when counting values
MANY = 64  # values: more than an output will have
MOST_IN_DOMAIN = 64
TextCheck = tuple[str, Callable[[str], bool]]  # a keyword with its check
NumberCheck = tuple[str, Callable[[Number], bool]]


class MemberRules:
    """What a schema demands of objects."""

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
    """What a schema demands of arrays."""

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


NO_MEMBERS, NO_ELEMENTS = MemberRules(), Elements()  # shared by rules without such demands


class Rule:
    """What a schema demands of a value."""

    def __init__(self) -> None:
        self.is_false = False
        self.types: frozenset[str] | None = None
        self.values: dict[Exact, None] | None = None  # allowed by enum or const, in order
        self.texts: list[TextCheck] = []
        self.most_chars: int | None = None
        self.numbers: list[NumberCheck] = []
        self.most: Number | None = None  # no valid number is larger
        self.least: Number | None = None  # no valid number is smaller
        # All valid numbers or strings, if there are few.
        self.domain: range | None = None
        self.few_texts: dict[str, None] | None = None
        # Rules that apply to the same value.
        self.all_of: list[Rule] = []
        self.any_of: list[list[Rule]] = []
        self.one_of: list[list[Rule]] = []
        self.negated: Rule | None = None
        self.condition: Rule | None = None
        self.consequence: Rule | None = None
        self.alternative: Rule | None = None
        self.dependents: list[tuple[str, Rule]] = []  # each applies if this property is present
        self.members = NO_MEMBERS
        self.elements = NO_ELEMENTS

    @property
    def lists(self) -> list[Iterable[Exact]]:
        """The rule's lists of allowed values: from ``enum``, a range and a pattern, where given."""
        found: tuple[Iterable[Exact] | None, ...] = (self.values, self.domain, self.few_texts)
        return [each for each in found if each is not None]

    @property
    def names(self) -> list[str]:
        """The property names that occur in this rule."""
        own = self.members
        found = [*own.properties, *own.required, *(name for name, _ in self.dependents)]
        return found + [name for first, rest in own.dependent_names for name in (first, *rest)]

    @property
    def same(self) -> list[Rule]:
        """The rules of all subschemas for the same value, as in ``allOf`` or ``not``."""
        found = [*self.all_of, *(each for group in self.any_of + self.one_of for each in group)]
        single = (self.negated, self.condition, self.consequence, self.alternative)
        return [*found, *filter(None, single), *(each for _, each in self.dependents)]


def num_values(rule: Rule, depth: int = 0) -> int:
    """Return an upper bound of the number of values that satisfy a rule, at most ``MANY``.

    depth: the number of rules around this one.
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
    """Compile a schema document. Returns the rule of its root. Raises ``SchemaError`` for a
    reference to another file, and for a schema that applies itself to the same value."""
    reader = _RuleCompiler(Document(schema))
    root = reader.rule(schema)
    reader.read_all()
    _check_cycles(reader.made)
    return root


class _RuleCompiler:
    """Compiles each schema to a rule, or to several where dynamic references require it."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._rules: dict[tuple[int, Scope], Rule] = {}
        self._waiting: list[tuple[Schema, Rule, Scope]] = []
        self._scope: Scope = ()
        self.draft = 0  # of the current schema
        self.schema: Schema = {}
        self.made: list[Rule] = []

    def rule(self, schema: Any) -> Rule:
        """Return the rule of a subschema or reference target; a new one is compiled later."""
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
        """Return the schema to which the dynamic reference ``keyword`` leads in this scope."""
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
    """Return the outermost integer within a limit; ``None`` without an integer limit. key, strict:
    the inclusive and exclusive keyword; step: 1 for a minimum, -1 for a maximum."""
    if strict in schema:
        return schema[strict] + step if type(schema[strict]) is int else None
    return schema[key] if type(schema.get(key)) is int else None


def _check_cycles(rules: Sequence[Rule]) -> None:
    """Raise ``SchemaError`` if a schema applies itself to the same value again."""
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
                raise SchemaError(
                    "$ref leads back to itself with no property or item in between: break the cycle"
                )
            if rule in done:
                continue
            path.append(rule)
            on_path.add(rule)
            waiting.append((rule, True))
            waiting.extend((each, False) for each in rule.same)


Keyword = Callable[[_RuleCompiler, Rule, Any], None]
RulePart = Callable[[Rule], Any]


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
    """Make a reader of a keyword such as ``allOf``: a list of schemas for the same value."""

    def read(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
        if isinstance(value, list):
            getattr(rule, attribute).append([reader.rule(each) for each in value])

    return read


def _one(attribute: str, of: RulePart = _itself) -> Keyword:
    """Make a reader of a keyword with one schema; it stores its rule in ``of(rule).attribute``."""

    def read(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
        setattr(of(rule), attribute, reader.rule(value))

    return read


def _count(attribute: str, of: RulePart) -> Keyword:
    def read(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
        if is_number(value):
            setattr(of(rule), attribute, int(value))

    return read


def _bound(keyword: str, holds: Callable[[Number, Number], bool]) -> Keyword:
    def read(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
        if is_number(value):
            limit = exact(value)
            rule.numbers.append((keyword, lambda number: holds(number, limit)))
            if keyword.endswith("aximum"):
                rule.most = limit if rule.most is None else min(rule.most, limit)
            else:
                rule.least = limit if rule.least is None else max(rule.least, limit)

    return read


def _limit(keyword: str, strict: str, holds: Callable[[Number, Number], bool]) -> Keyword:
    """Make a reader of a bound such as ``minimum``. In draft 4, ``strict: true`` in the same schema
    makes it exclusive."""

    def read(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
        is_strict = reader.schema.get(strict) is True
        bound = _bound(keyword, lambda a, b: holds(a, b) and not (is_strict and a == b))
        bound(reader, rule, value)

    return read


def _all_of(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    rule.all_of += [reader.rule(each) for each in listed(value)]


def _reference(keyword: str) -> Keyword:
    return lambda reader, rule, value: reader.referred(rule, keyword, value)


def _types(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    rule.types = frozenset([value] if isinstance(value, str) else map(str, value))


def _values(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    _allow(rule, dict.fromkeys(map(exact, listed(value))))


def _allow(rule: Rule, allowed: dict[Exact, None]) -> None:
    rule.values = (
        allowed if rule.values is None else {each: None for each in rule.values if each in allowed}
    )


def _least_chars(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    rule.texts.append(("minLength", lambda text: len(text) >= value))


def _most_chars(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    rule.texts.append(("maxLength", lambda text: len(text) <= value))
    rule.most_chars = int(value)


def _pattern(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    if isinstance(value, str):
        rule.texts.append(("pattern", searcher(value)))
        if (few := few_texts(value)) is not None:
            rule.few_texts = dict.fromkeys(few)


def _format(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    if isinstance(value, str) and value in FORMATS:
        rule.texts.append(("format", FORMATS[value]))


def _multiple(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    step = exact(value)
    rule.numbers.append(("multipleOf", lambda number: is_multiple(number, step)))


def _properties(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    _members(rule).properties = {name: reader.rule(each) for name, each in named(value).items()}


def _patterns(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    _members(rule).patterns = [
        (searcher(name), reader.rule(each)) for name, each in named(value).items()
    ]


def _required(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    _members(rule).required = tuple(texts_in(value))


def _dependents(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    """Read ``dependentRequired``, ``dependentSchemas``, or ``dependencies`` of earlier drafts."""
    for name, each in named(value).items():
        if isinstance(each, list):
            _members(rule).dependent_names.append((name, tuple(map(str, each))))
        else:
            rule.dependents.append((name, reader.rule(each)))


def _prefix(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    _elements(rule).prefix = [reader.rule(each) for each in listed(value)]


def _items(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    """Read ``items``. A list (earlier drafts) means ``prefixItems`` and ``additionalItems``."""
    if not isinstance(value, list):
        _elements(rule).items = reader.rule(value)
        return
    _prefix(reader, rule, value)
    if "additionalItems" in reader.schema:
        _elements(rule).items = reader.rule(reader.schema["additionalItems"])


def _contains(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
    _elements(rule).contained = reader.rule(value)
    _elements(rule).contained_is_evaluated = reader.draft > 2019


def _unique(reader: _RuleCompiler, rule: Rule, value: Any) -> None:
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
