"""Closes the objects of a JSON schema: they allow no properties beyond those that it names.

Small models that may write any property never stop writing them. So an object is closed if its
schema names properties and has no keyword for others, as if its outermost schema had
``unevaluatedProperties: false``. Allowed are all names in ``allOf``, ``anyOf``, ``oneOf``, ``if``,
``dependentSchemas`` and references. An object without names stays open, and so does an alternative
without names next to alternatives with names. A name that is only in ``required`` may have any
value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.messages.references import REFERENCES, References
from engine.structured.keywords import enumerated, listed, named, texts_in

Schema = dict[str, Any]
Choices = tuple[tuple[int, int], ...]  # each choice on the way to a schema, with the way taken

OF_OTHERS = ("additionalProperties", "unevaluatedProperties")
_ANSWERS = (*OF_OTHERS, "const", "enum")  # keywords that limit all properties
# Keywords whose schemas apply to the same value: all of them, or some.
_ALL, _SOME = ("allOf",), ("anyOf", "oneOf")
_CASES = ("if", "then", "else")
_DEFINITIONS = ("$defs", "definitions")
# Keywords whose schemas test a value and do not describe it.
_QUESTIONS = ("if", "not", "contains", "propertyNames")
# Keywords with schemas for parts of a value: by name, in a list, or a single one.
_PARTS_BY_NAME = ("properties", "patternProperties")
_PARTS_IN_LISTS = ("prefixItems", "items")
_PARTS = ("items", "additionalItems", "unevaluatedItems", *OF_OTHERS)
# A schema without any of these keywords is never closed.
_NESTING = frozenset({*_PARTS_BY_NAME, *_ALL, *_SOME, *_CASES, *REFERENCES, "dependentSchemas"})
_NESTING |= {"dependencies"}
_APPLYING = _NESTING - {*_PARTS_BY_NAME}
# A schema without any of these keywords does not limit the names of properties by itself.
_SAYING = frozenset({*_PARTS_BY_NAME, *_ANSWERS, "required", "dependentRequired", "dependencies"})
_SAYING |= {"minProperties"}
_KEPT = ("$schema", "$id", "id", "$anchor", "$dynamicAnchor", *_DEFINITIONS)
_ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$defs", "definitions", "$schema"),
}


@dataclass
class Nest:
    """The demands on the properties of an object, collected from all schemas that apply to it."""

    names: set[str] = field(default_factory=set)
    own_names: bool = False  # a schema that always holds names properties
    patterns: set[str] = field(default_factory=set)
    required: list[str] = field(default_factory=list)
    least: int = 0
    is_answered: bool = False  # a schema that always holds limits all properties
    is_closed: bool = True  # each schema that names properties limits the others too
    children: dict[str, list[tuple[Schema, Choices]]] = field(default_factory=dict)

    @property
    def is_named(self) -> bool:
        return bool(self.names or self.patterns)


def closed(schema: Any) -> Any:
    """Return a copy of a schema in which objects that name properties allow no others. Added
    keywords are valid in every draft."""
    if not isinstance(schema, dict):
        return schema
    whole = msgspec.json.decode(msgspec.json.encode(schema))
    _Closer(whole).close()
    return whole


def only_named(schema: Any) -> Any:
    """Return a copy of a schema in which each object allows only the properties that its own schema
    names, like vLLM's ``disable_additional_properties``."""
    if not isinstance(schema, dict):
        return schema
    whole: Schema = msgspec.json.decode(msgspec.json.encode(schema))
    for each in References(whole).schemas:
        if "properties" in each or "patternProperties" in each or each.get("type") == "object":
            each.setdefault("additionalProperties", False)
    return whole


class _Closer:
    """Closes the objects of one schema document in place."""

    def __init__(self, whole: Schema) -> None:
        self._references = References(whole)
        self._nests: dict[int, Nest] = {}
        self._same: dict[frozenset[tuple[int, Choices]], Nest] = {}
        self._targets: dict[int, list[Any]] = {}
        self._objects = [*_outermost(whole)]
        self._sole = self._only_whole()

    def close(self) -> None:
        nests = {id(nest): nest for nest in map(self._nest, self._objects)}
        joint = {id(child) for nest in nests.values() for child in self._joint(nest)}
        whole = {id(each): each for each in [*self._objects, *self._sole.values()]}
        for each in whole.values():
            self._nest(each)  # read all of them before any is changed
        for each in whole.values():
            if id(each) not in joint and not self._is_left_to_target(each):
                self._close(each)

    def _close(self, schema: Schema) -> None:
        nest = self._nest(schema)
        if not nest.is_named or nest.is_answered or nest.is_closed or not _may_be_object(schema):
            return
        if nest.least > len(nest.names) and not nest.patterns:
            return
        self._open_alternatives(schema, nest)
        unnamed = [name for name in nest.required if not _is_in(name, nest)]
        if unnamed:
            schema["properties"] = {
                **named(schema.get("properties")),
                **dict.fromkeys(unnamed, True),
            }
        if _APPLYING.isdisjoint(schema):
            schema["additionalProperties"] = False
        elif "$ref" in schema:  # drafts up to 7 ignore all keywords next to it
            inner = dict(schema)
            unnamed_too = inner.pop("properties", None) if unnamed else None
            kept = {key: inner.pop(key) for key in _KEPT if key in inner}
            schema.clear()
            schema.update({**kept, "allOf": [inner], "unevaluatedProperties": False})
            if unnamed_too is not None:
                schema["properties"] = unnamed_too
        else:
            schema["unevaluatedProperties"] = False

    def _open_alternatives(self, schema: Schema, nest: Nest) -> None:
        """Let alternatives that name no property allow any, unless ``schema`` names some."""
        if nest.own_names:
            return
        for key in _SOME:
            for at, each in enumerate(listed(schema.get(key))):
                if each is True or (isinstance(each, dict) and _may_be_object(each)):
                    own = {} if each is True else each
                    if each is True or not self._nest(each).is_named:
                        schema[key][at] = {"allOf": [own], "additionalProperties": True}

    # -- the schemas of an object

    def _nest(self, schema: Schema) -> Nest:
        if id(schema) not in self._nests:
            parts = [*self._parts(schema)]
            saying = [each for each in parts if not _SAYING.isdisjoint(each[0])]
            own = frozenset((id(part), choices) for part, choices, _ in saying)
            if (nest := self._same.get(own)) is None:
                nest = self._same[own] = Nest()
                for part, choices, is_question in saying:
                    _note(nest, part, choices, is_question)
            self._nests[id(schema)] = nest
        return self._nests[id(schema)]

    def _parts(self, schema: Schema) -> Iterator[tuple[Schema, Choices, bool]]:
        """Yield each schema that may apply to the same value as ``schema``, with the choices of
        alternatives that lead to it, and True if it is only a test (``if``)."""
        waiting: list[tuple[Any, Choices, bool]] = [(schema, (), False)]
        seen = set()
        while waiting:
            part, choices, is_question = waiting.pop()
            if not isinstance(part, dict) or id(part) in seen:
                continue
            seen.add(id(part))
            yield part, choices, is_question
            for each in (*self._led(part), *listed(part.get("allOf"))):
                waiting.append((each, choices, is_question))
            for key in _SOME:
                own = id(part.get(key))
                waiting += [
                    (each, (*choices, (own, at)), is_question)
                    for at, each in enumerate(listed(part.get(key)))
                ]
            for at, key in enumerate(_CASES):
                case = (*choices, (id(part), min(at, 1) if key != "else" else 2))
                waiting.append((part.get(key), case, is_question or key == "if"))
            for key in ("dependentSchemas", "dependencies"):
                waiting += [
                    (each, (*choices, (id(each), 0)), is_question)
                    for each in named(part.get(key)).values()
                ]

    def _led(self, schema: Schema) -> list[Any]:
        """Return the schemas to which this schema's references (``$ref`` etc.) lead."""
        if not any(key in schema for key in REFERENCES):
            return []
        if id(schema) not in self._targets:
            self._targets[id(schema)] = self._references.targets(schema)
        return self._targets[id(schema)]

    def _joint(self, nest: Nest) -> Iterator[Schema]:
        """Yield each schema that describes the same property as another schema. It cannot be closed
        alone, since the other one may name more properties."""
        for schemas in nest.children.values():
            if len(schemas) == 1:
                continue
            naming = [(each, choices) for each, choices in schemas if self._nest(each).is_named]
            for at, (one, choices) in enumerate(naming[:64]):
                for other, others in naming[:at]:
                    if one is not other and _go_together(choices, others):
                        yield one
                        yield other

    # -- targets of references

    def _only_whole(self) -> dict[int, Schema]:
        """Return, by ``id()``, the schemas that references use only as the whole schema of an
        object: these can be closed in place."""
        users: dict[int, list[bool]] = {}
        targets: dict[int, Schema] = {}
        whole = {id(each) for each in self._objects}
        alternatives = {id(alone) for each in self._objects if (alone := self._only_object(each))}
        for each in self._references.schemas:
            for target in self._led(each):
                if isinstance(target, dict):
                    targets[id(target)] = target
                    is_whole = id(each) in whole or id(each) in alternatives
                    users.setdefault(id(target), []).append(is_whole and _is_reference(each))
        return {each: targets[each] for each, found in users.items() if all(found)}

    def _only_object(self, schema: Schema) -> Schema | None:
        """Return the only alternative that may be an object; ``None`` if there are several, or if
        the schema has other keywords."""
        rest = schema.keys() - _ANNOTATIONS
        if len(rest) != 1 or (key := next(iter(rest))) not in _SOME:
            return None
        able = [each for each in listed(schema[key]) if each is True or _may_be_object(each)]
        return able[0] if len(able) == 1 and isinstance(able[0], dict) else None

    def _is_left_to_target(self, schema: Schema) -> bool:
        """Whether the schema is nothing but a reference to a schema that is closed in place."""
        alone = schema if _is_reference(schema) else self._only_object(schema)
        if alone is None or not _is_reference(alone):
            return False
        return all(id(each) in self._sole for each in self._led(alone))


def _note(nest: Nest, part: Schema, choices: Choices, is_question: bool) -> None:
    properties, patterns = named(part.get("properties")), named(part.get("patternProperties"))
    if properties or patterns:
        nest.is_closed = nest.is_closed and any(key in part for key in OF_OTHERS)
    nest.names |= properties.keys()
    nest.patterns |= patterns.keys()
    nest.required += texts_in(part.get("required"))
    for key in ("dependentRequired", "dependencies"):
        for names in named(part.get(key)).values():
            nest.required += texts_in(names)
    if not choices:
        nest.own_names = nest.own_names or bool(properties or patterns)
        nest.is_answered = nest.is_answered or any(key in part for key in _ANSWERS)
        least = part.get("minProperties", 0)
        nest.least = max(nest.least, least if isinstance(least, int) else 0)
    if is_question:
        return
    for name, each in properties.items():
        if isinstance(each, dict):
            nest.children.setdefault(name, []).append((each, choices))


def _outermost(whole: Schema) -> Iterator[Schema]:
    """Yield the schemas that describe a whole value, unlike those in ``allOf`` and the like."""
    waiting: list[tuple[Any, bool]] = [(whole, True)]
    while waiting:
        schema, is_whole = waiting.pop()
        if not isinstance(schema, dict):
            continue
        if is_whole and not _NESTING.isdisjoint(schema):
            yield schema
        for key, value in schema.items():
            if key in _QUESTIONS:
                continue
            if key in (*_PARTS_BY_NAME, *_DEFINITIONS, "dependentSchemas", "dependencies"):
                waiting += [(each, key in _PARTS_BY_NAME) for each in named(value).values()]
            elif key in (*_ALL, *_SOME) or (key in _PARTS_IN_LISTS and isinstance(value, list)):
                waiting += [(each, key in _PARTS_IN_LISTS) for each in listed(value)]
            elif key in _PARTS or key in _CASES:
                waiting.append((value, key in _PARTS))


def _go_together(one: Choices, other: Choices) -> bool:
    """Whether two schemas may apply to the same value: no alternative is chosen differently."""
    taken = dict(one)
    return all(taken.get(choice, number) == number for choice, number in other)


def _is_reference(schema: Any) -> bool:
    """Whether the schema is nothing but a reference."""
    return isinstance(schema, dict) and schema.keys() - _ANNOTATIONS in (
        {each} for each in REFERENCES
    )


def _may_be_object(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    if "const" in schema or "enum" in schema:
        return any(isinstance(each, dict) for each in enumerated(schema))
    kind = schema.get("type", "object")
    return "object" in (kind if isinstance(kind, list) else [kind])


def _is_in(name: str, nest: Nest) -> bool:
    if name in nest.names:
        return True
    for pattern in nest.patterns:
        try:
            if re.search(pattern, name):
                return True
        except re.error:
            continue
    return False
