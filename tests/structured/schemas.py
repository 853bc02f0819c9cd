"""JSON schemas by group: those of tools and interfaces by hand, the rest in families.

A family is a small function of a fixed seed. `REFUSED` are schemas with keywords that nobody
enforces here: each must be refused with the word beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "maxLength": 20}
WORD: Schema = {"type": "string", "pattern": "^[a-z]{2,8}$"}
INTEGER: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
NUMBER: Schema = {"type": "number", "minimum": -10, "maximum": 10}
FLAG: Schema = {"type": "boolean"}
LEAVES = (STRING, WORD, INTEGER, NUMBER, FLAG, {"enum": ["low", "mid", "high"]}, {"type": "null"})
NAMES = [
    *("id", "name", "kind", "size", "owner", "state", "note", "price"),
    *("count", "label", "code", "area", "level", "path", "mode"),
]


def obj(properties: dict[str, Any], *optional: str, **more: Any) -> Schema:
    """An object without other properties; those that are not optional are required."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
        **more,
    }


def array(items: Any, least: int = 0, most: int = 4, **more: Any) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most, **more}


def pattern(expression: str, **more: Any) -> Schema:
    return {"type": "string", "pattern": expression, **more}


# -- families: each is called with generators of different seeds


def mixed_object(rng: Random) -> Schema:
    """Properties of which some are required."""
    names = rng.sample(NAMES, rng.randint(1, 7))
    optional = [name for name in names if rng.random() < 0.4]
    return obj({name: rng.choice(LEAVES) for name in names}, *optional)


def nested(rng: Random, depth: int = 0) -> Schema:
    """Objects and arrays within each other, up to five deep."""
    if depth >= 2 and (depth == 5 or rng.random() < 0.35):
        return rng.choice(LEAVES)
    if rng.random() < 0.3:
        return array(nested(rng, depth + 1), rng.randint(0, 1), rng.randint(1, 3))
    names = rng.sample(NAMES, rng.randint(1, 3))
    return obj({name: nested(rng, depth + 1) for name in names}, *names[2:])


def enumeration(rng: Random) -> Schema:
    """Values of one kind or of many."""
    words = ["red", "green", "blue", "", "two words", 'a "quote"', "back\\slash", "naïve", "東京"]
    values = [*words, 0, 1, -7, 2.5, True, False, None, [1, "a"], {"k": "v"}, [], {}]
    one = {"enum": rng.sample(rng.choice([words, values]), rng.randint(1, 8))}
    return rng.choice([one, obj({"choice": one, "other": one}, "other"), array(one, 1, 3)])


def lengths(rng: Random) -> Schema:
    """Strings of limited length."""
    least = rng.randint(0, 6)
    one: Schema = {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}
    if rng.random() < 0.3:
        del one["minLength"]
    return rng.choice([one, obj({"text": one}), array(one, 1, 2)])


PATTERNS = (
    r"^[A-Z]{3}-\d{4}$", r"^[a-z]+$", r"^(yes|no|maybe)$", r"^\+?[0-9]{7,12}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^v[0-9]+(\.[0-9]+){1,2}$", r"^[^@\s]{1,10}@[a-z]{1,8}\.(com|org)$", r"[0-9]", r"^ab", r"yz$",
    r"^$", r"^[\w-]{1,12}$", r"^(a|b)*c$", r"^([0-9]{1,3}\.){3}[0-9]{1,3}$", r"^.{3,9}$",
    r"^[A-Za-z ]{0,16}$", r"^(GET|PUT) /[a-z/]{0,10}$", r"^\"[a-z]*\"$", r"^\\[a-z]+$",
    r"^[à-ü]{2,4}$",
    r"^[^\n]{0,9}$", r"^\s*x\s*$", r"^(?:[01]\d|2[0-3]):[0-5]\d$", r"^a{2,4}b{0,2}$",
    r"^a.c$|^d.f$",
)  # fmt: skip


def patterned(rng: Random, expression: str) -> Schema:
    one = pattern(expression)
    return rng.choice([one, obj({"value": one}), array(one, 1, 2)])


FORMATS = [
    *("date", "time", "date-time", "duration", "email"),
    *("hostname", "ipv4", "ipv6", "uuid", "uri"),
]


def formatted(rng: Random, name: str) -> Schema:
    one: Schema = {"type": "string", "format": name}
    return rng.choice([one, obj({"value": one, "note": WORD}, "note"), array(one, 1, 2)])


def integers(rng: Random) -> Schema:
    """Ranges of integers, with and without ends."""
    low = rng.choice([-1000, -55, -1, 0, 1, 9, 10, 99, 12345])
    high = low + rng.choice([0, 1, 9, 10, 89, 1000, 10**6])
    one: Schema = {"type": "integer"}
    one |= rng.choice([{"minimum": low}, {"exclusiveMinimum": low - 1}])
    one |= rng.choice([{"maximum": high}, {"exclusiveMaximum": high + 1}])
    return rng.choice([one, obj({"n": one})])


def numbers(rng: Random) -> Schema:
    """Ranges of numbers whose ends have digits behind the point."""
    low = rng.choice([-1000.5, -2.75, -1, -0.001, 0, 0.1, 1, 3.14159, 99.9])
    high = low + rng.choice([0.5, 1, 2.25, 10, 1000])
    one: Schema = {"type": "number"}
    one |= rng.choice([{"minimum": low}, {"exclusiveMinimum": low}])
    one |= rng.choice([{"maximum": high}, {"exclusiveMaximum": high}])
    return rng.choice([one, obj({"x": one})])


def multiples(rng: Random) -> Schema:
    step = rng.choice([2, 3, 5, 7, 10, 25, 0.5, 0.25, 0.01])
    kind = "integer" if isinstance(step, int) else "number"
    one: Schema = {
        "type": kind,
        "multipleOf": step,
        "minimum": 0,
        "maximum": rng.choice([100, 1000]),
    }
    return rng.choice([one, obj({"x": one})])


def arrays(rng: Random) -> Schema:
    least = rng.randint(0, 3)
    items = rng.choice([*LEAVES, array(INTEGER, 0, 2), obj({"a": INTEGER, "b": WORD}, "b")])
    return rng.choice([array(items, least, least + rng.randint(0, 4)), obj({"all": array(items)})])


def tuples(rng: Random) -> Schema:
    """Arrays whose first entries have schemas of their own."""
    first = rng.sample(LEAVES, rng.randint(1, 4))
    one: Schema = {"type": "array", "prefixItems": first, "items": rng.choice([False, INTEGER])}
    one["minItems"] = rng.randint(0, len(first))
    if one["items"] is not False:
        one["maxItems"] = len(first) + rng.randint(0, 3)
    return one


def any_of(rng: Random) -> Schema:
    """One of several, of kinds that may or may not overlap."""
    choices = [
        *LEAVES,
        {"const": "none"},
        array(INTEGER, 1, 3),
        obj({"kind": {"const": "a"}, "size": INTEGER}),
        obj({"kind": {"const": "b"}, "label": WORD}, "label"),
        {"type": "integer", "minimum": 5000},
        {"type": ["string", "integer"], "maxLength": 3, "maximum": 3, "minimum": 0},
    ]
    one: Schema = {"anyOf": rng.sample(choices, rng.randint(2, 4))}
    return rng.choice([one, obj({"value": one, "other": one}, "other"), array(one, 1, 3)])


def referring(rng: Random) -> Schema:
    """Definitions used twice, and by each other."""
    definitions: dict[str, Any] = {
        "leaf": rng.choice(LEAVES),
        "pair": obj({"first": {"$ref": "#/$defs/leaf"}, "second": {"$ref": "#/$defs/leaf"}}),
        "list": array({"$ref": "#/$defs/pair"}, 1, 2),
    }
    used = rng.sample(sorted(definitions), 2)
    properties = {name: {"$ref": f"#/$defs/{name}"} for name in used}
    return {"$defs": definitions, **obj(properties, *used[1:])}


def additional(rng: Random) -> Schema:
    """Properties that the schema does not name: none, any of a kind."""
    names = rng.sample(NAMES, 2)
    return {
        "type": "object",
        "properties": {name: rng.choice(LEAVES) for name in names},
        "required": names[: rng.randint(0, 2)],
        "additionalProperties": rng.choice([False, INTEGER, WORD, {"type": ["null", "boolean"]}]),
    }


def named_by_pattern(rng: Random) -> Schema:
    """`patternProperties` whose patterns cannot match the same name."""
    patterns = {"^x_[a-z]{1,5}$": INTEGER, "^[0-9]{1,3}$": WORD, "^on[A-Z][a-z]{1,6}$": FLAG}
    names = rng.sample(sorted(patterns), rng.randint(1, 2))
    found: Schema = {
        "type": "object",
        "patternProperties": {name: patterns[name] for name in names},
        "additionalProperties": False,
    }
    if rng.random() < 0.5:
        found |= {"properties": {"name": WORD}, "required": ["name"]}
    return found


def all_of(rng: Random) -> Schema:
    """Several at once."""
    way = rng.randint(0, 4)
    if way == 0:
        names = rng.sample(NAMES, 4)
        return {
            "allOf": [
                {"type": "object", "properties": {names[0]: WORD, names[1]: INTEGER}},
                {"properties": {names[2]: FLAG, names[3]: STRING}, "required": names[1:3]},
            ],
        }
    if way == 1:
        low = rng.randint(0, 50)
        return {
            "type": "integer",
            "allOf": [{"minimum": low}, {"maximum": low + rng.randint(9, 200)}],
        }
    if way == 2:
        return {
            "type": "string",
            "allOf": [pattern(f"^[a-{rng.choice('km')}]+$"), {"maxLength": 6}],
        }
    if way == 3:
        part = obj({"id": INTEGER})
        del part["additionalProperties"]
        whole = {"properties": {"name": WORD}, "required": ["name"]}
        return {"$defs": {"part": part}, "allOf": [{"$ref": "#/$defs/part"}, whole]}
    return {"allOf": [{"enum": ["a", "b", "c", 1]}, {"enum": ["b", "c", 1, 2]}]}


def constant(rng: Random) -> Schema:
    values = ["x", "", 0, -1.5, True, None, [], [1, [2, {"a": None}]], {"a": {"b": [1]}}, 'q"\\/\n']
    one = {"const": rng.choice(values)}
    return rng.choice([one, obj({"is": one, "n": INTEGER}), array(one, 1, 2)])


FAMILIES: dict[str, tuple[Callable[[Random], Schema], int]] = {
    "objects": (mixed_object, 18),
    "nesting": (nested, 18),
    "enums": (enumeration, 12),
    "lengths": (lengths, 10),
    "integers": (integers, 14),
    "numbers": (numbers, 12),
    "multiples": (multiples, 7),
    "arrays": (arrays, 12),
    "tuples": (tuples, 7),
    "anyOf": (any_of, 16),
    "references": (referring, 8),
    "additionalProperties": (additional, 10),
    "patternProperties": (named_by_pattern, 10),
    "allOf": (all_of, 12),
    "const": (constant, 8),
}


def families() -> Iterator[tuple[str, Schema]]:
    for group, (make, count) in FAMILIES.items():
        found: list[Schema] = []
        for seed in range(1000):
            one = make(Random(f"{group} {seed}"))
            if one not in found:
                found.append(one)
            if len(found) == count:
                break
        yield from ((group, one) for one in found)
    for index, expression in enumerate(PATTERNS):
        yield "patterns", patterned(Random(index), expression)
    for index, name in enumerate(FORMATS * 2):
        yield "formats", formatted(Random(index), name)


# -- by hand

NODE = {"$ref": "#/$defs/node"}


def rooted(node: Schema, **more: Any) -> Schema:
    return {"$defs": {"node": node, **more}, "$ref": "#/$defs/node"}


RECURSION: list[Schema] = [
    rooted(obj({"value": INTEGER, "next": {"anyOf": [NODE, {"type": "null"}]}})),
    rooted(obj({"name": WORD, "children": array(NODE, 0, 2)})),
    rooted(obj({"left": NODE, "right": NODE, "value": INTEGER}, "left", "right")),
    rooted({"anyOf": [INTEGER, array(NODE, 0, 3)]}),
    rooted({"anyOf": [WORD, obj({"not": NODE}), obj({"and": array(NODE, 1, 2)})]}),
    {**obj({"title": WORD, "parts": array({"$ref": "#"}, 0, 2)}, "parts")},
    rooted(
        {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/sum"}]},
        sum=obj({"op": {"enum": ["+", "-", "*"]}, "a": NODE, "b": NODE}),
    ),
    rooted(
        obj({"tag": {"enum": ["div", "p", "b"]}, "body": array({"anyOf": [WORD, NODE]}, 0, 2)}),
    ),
    rooted(obj({"go": {"$ref": "#/$defs/back"}}, "go"), back=obj({"come": NODE}, "come")),
    rooted({"type": "object", "additionalProperties": NODE, "maxProperties": 2}),
    rooted({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [INTEGER, NODE],
            "items": False, "minItems": 2}]}),
    rooted({"anyOf": [FLAG, obj({"if": NODE, "then": NODE, "else": NODE}, "else")]}),
    # Parts without an end, which need not be there.
    rooted(obj({"on": {"$ref": "#/$defs/on"}, "value": INTEGER}, "on"),
           on=obj({"on": {"$ref": "#/$defs/on"}})),
    rooted({"anyOf": [{"$ref": "#/$defs/on"}, array({"$ref": "#/$defs/on"}, 0, 3)]},
           on={"allOf": [obj({"on": {"$ref": "#/$defs/on"}}), {"maxProperties": 3}]}),
    rooted({"anyOf": [obj({"a": {"$ref": "#/$defs/b"}}, "a"), FLAG]},
           b=array({"$ref": "#/$defs/c"}, 1, 2), c=obj({"b": {"$ref": "#/$defs/b"}})),
]  # fmt: skip

REFERENCES: list[Schema] = [
    {"$defs": {"a/b": WORD, "c~d": INTEGER}, **obj({
        "x": {"$ref": "#/$defs/a~1b"}, "y": {"$ref": "#/$defs/c~0d"}})},
    obj({"first": WORD, "second": {"$ref": "#/properties/first"}}),
    {"definitions": {"old": INTEGER}, **array({"$ref": "#/definitions/old"}, 1, 3)},
    {"$defs": {"word": WORD}, "$ref": "#/$defs/word", "maxLength": 4},
    {"$defs": {"named": {"$anchor": "here", **WORD}}, **obj({"a": {"$ref": "#here"}})},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/c"}, "c": INTEGER},
     "$ref": "#/$defs/a"},
    {"$defs": {"p": {"type": "object", "properties": {"x": INTEGER}, "required": ["x"]}},
     "type": "object", "properties": {"a": {"$ref": "#/$defs/p", "description": "a point"}},
     "required": ["a"], "additionalProperties": False},
    {"$id": "https://example.org/root", "$defs": {"w": WORD}, **array({"$ref": "#/$defs/w"}, 1, 2)},
]  # fmt: skip

UNICODE: list[Schema] = [
    obj({"größe": INTEGER, "名前": WORD}),
    obj({"имя": WORD, "возраст": INTEGER}, "возраст"),
    {"enum": ["äöü", "ß", "日本語", "🙂", "a\u0301"]},
    {"const": {"ключ": ["значение", "🙂🙂"]}},
    obj({'with "quotes"': FLAG, "back\\slash": FLAG, "tab\there": FLAG}),
    obj({"": INTEGER, " ": INTEGER}),
    pattern("^[ж-яё]{2,6}$"),
    pattern("^[一-龥]{1,4}$"),
    {"type": "string", "minLength": 2, "maxLength": 5, "description": "any characters"},
    array({"enum": ["é", "e\u0301", "\u00a0", "\u2028"]}, 1, 2),
]

TOOLS: list[Schema] = [
    obj({"location": {**STRING, "description": "City"}, "unit": {"enum": ["celsius",
         "fahrenheit"]}}, "unit"),
    obj({"name": {"const": "search"}, "arguments": obj({"query": STRING, "limit": {
        "type": "integer", "minimum": 1, "maximum": 50}}, "limit")}),
    {"anyOf": [obj({"name": {"const": name}, "arguments": obj(arguments)}) for name, arguments in {
        "add": {"a": NUMBER, "b": NUMBER}, "open": {"path": pattern("^/[a-z/.]{1,20}$")},
        "stop": {}}.items()]},
    array(obj({"tool": {"enum": ["read", "write"]}, "path": WORD, "text": STRING}, "text"), 1, 2),
    obj({"to": array({"type": "string", "format": "email"}, 1, 2), "subject": STRING,
         "urgent": {"type": "boolean", "default": False}}, "urgent"),
    obj({"start": {"type": "string", "format": "date"}, "nights": {"type": "integer",
         "minimum": 1, "maximum": 30}, "guests": {"type": "integer", "minimum": 1, "maximum": 9}}),
    obj({"sql": {"type": "string", "maxLength": 60}, "parameters": array(
        {"type": ["string", "integer", "null"], "maxLength": 9, "minimum": 0, "maximum": 9}, 0, 3)},
        "parameters"),
    obj({"thought": {"type": "string", "maxLength": 60}, "action": {"enum": ["ask", "answer"]},
         "text": {"type": "string", "maxLength": 40}}),
    obj({"answer": {"enum": ["A", "B", "C", "D"]}, "confidence": {"type": "number", "minimum": 0,
         "maximum": 1}}),
    obj({"entities": array(obj({"text": STRING, "kind": {"enum": ["person", "place", "date"]},
         "at": array(INTEGER, 2, 2)}), 0, 3)}),
    obj({"sentiment": {"type": "string", "enum": ["good", "bad"]}, "reasons": array(STRING, 1, 3)}),
    {"type": "array", "items": {"oneOf": [
        {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 9}]},
     "maxItems": 3},
    obj({"command": array(WORD, 1, 4), "timeout": {"type": ["integer", "null"], "minimum": 1,
         "maximum": 600}, "env": {"type": "object", "additionalProperties": WORD,
         "maxProperties": 2}}, "timeout", "env"),
    obj({"move": pattern("^[KQRBN]?[a-h]?[1-8]?x?[a-h][1-8](=[QRBN])?[+#]?$")}),
    obj({"patch": array(obj({"op": {"enum": ["add", "remove", "replace"]},
         "path": pattern("^(/[a-z0-9]{1,6}){1,3}$"), "value": {"anyOf": [INTEGER, WORD]}},
         "value"), 1, 2)}),
    obj({"colour": pattern("^#[0-9a-f]{6}$"), "opacity": {"type": "number", "minimum": 0,
         "maximum": 1, "multipleOf": 0.1}}, "opacity"),
]  # fmt: skip

INTERFACES: list[Schema] = [
    obj({"id": {"type": "string", "format": "uuid"}, "created": {"type": "string",
         "format": "date-time"}, "tags": array(WORD, 0, 3), "owner": obj({"login": WORD,
         "admin": FLAG})}),
    obj({"error": obj({"code": {"type": "integer", "minimum": 400, "maximum": 599},
         "message": STRING, "details": array(obj({"field": WORD, "reason": STRING}), 0, 2)},
         "details")}),
    {"anyOf": [obj({"ok": {"const": True}, "data": INTEGER}),
               obj({"ok": {"const": False}, "error": STRING})]},
    obj({"type": {"const": "Feature"}, "geometry": obj({"type": {"const": "Point"}, "coordinates":
         {"type": "array", "prefixItems": [{"type": "number", "minimum": -180, "maximum": 180},
          {"type": "number", "minimum": -90, "maximum": 90}], "items": False, "minItems": 2}}),
         "properties": {"anyOf": [{"type": "null"}, obj({"name": WORD})]}}),
    obj({"apiVersion": {"const": "v1"}, "kind": {"enum": ["Pod", "Service"]}, "metadata": obj({
         "name": pattern("^[a-z]([-a-z0-9]{0,10}[a-z0-9])?$"), "labels": {"type": "object",
         "additionalProperties": WORD, "maxProperties": 2}}, "labels")}),
    obj({"page": {"type": "integer", "minimum": 1, "maximum": 100}, "items": array(obj({
         "sku": pattern("^[A-Z]{2}[0-9]{3}$"), "price": {"type": "number", "minimum": 0,
         "maximum": 999.99, "multipleOf": 0.01}, "stock": INTEGER}), 1, 2)}),
    obj({"name": {"type": "string", "minLength": 1, "maxLength": 20}, "version": pattern(
         "^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"), "private": FLAG, "scripts": {"type": "object",
         "additionalProperties": STRING, "maxProperties": 2}, "license": {"enum": ["MIT",
         "Apache-2.0"]}}, "private", "scripts"),
    obj({"street": STRING, "zip": pattern("^[0-9]{5}(-[0-9]{4})?$"), "country": {"enum": ["DE",
         "FR", "JP"]}, "floor": {"type": ["integer", "null"], "minimum": 0}}, "floor"),
    obj({"host": {"type": "string", "format": "ipv4"}, "port": {"type": "integer", "minimum": 1,
         "maximum": 65535}, "tls": FLAG}, "tls"),
    {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Old",
     "definitions": {"m": obj({"v": INTEGER})}, **obj({"ms": array({"$ref": "#/definitions/m"},
     1, 2)})},
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
     "items": [WORD, INTEGER], "additionalItems": False, "minItems": 2},
]  # fmt: skip

LIMITS: list[Schema] = [
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 1, "maxProperties": 3},
    {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a", "b"],
     "additionalProperties": WORD, "maxProperties": 3},
    {"type": "array", "maxItems": 0},
    {"type": "array", "items": {"type": "array", "items": FLAG, "minItems": 2, "maxItems": 2},
     "minItems": 2, "maxItems": 2},
    {"type": "string", "maxLength": 0},
    {"type": "object", "properties": {"gone": False, "here": INTEGER}, "required": ["here"],
     "additionalProperties": False},
    {"type": ["object", "array", "null"], "properties": {"a": FLAG}, "items": FLAG, "maxItems": 2,
     "additionalProperties": False},
    {"type": "object", "maxProperties": 0},
    {"properties": {"a": INTEGER}, "type": ["object", "boolean"], "additionalProperties": False},
]  # fmt: skip

BY_HAND: dict[str, list[Schema]] = {
    "recursion": RECURSION,
    "references": REFERENCES,
    "unicode": UNICODE,
    "tools": TOOLS,
    "interfaces": INTERFACES,
    "limits": LIMITS,
}

# Patterns of whitespace, and schemas of which each is asked with half of them.
WHITESPACE = ["[ ]{1,2}", r"[\n ]{0,3}", "", " ", r"\n {2}|\n", r"\s?"]
SPACED: list[Schema] = [
    {"type": "array", "items": {"type": ["integer", "null"], "minimum": -9, "maximum": 9},
     "maxItems": 3},
    obj({"id": INTEGER, "tags": array(WORD, 0, 2), "at": obj({"x": FLAG}, "x")}, "tags"),
    {"enum": [{"a": [1, "b, c"]}, [], {}, "text: {}", 5]},
    {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2},
]  # fmt: skip

# Schemas that only a value without end would satisfy.
_A: Schema = {"$ref": "#/$defs/a"}
_B: Schema = {"$ref": "#/$defs/b"}
_C: Schema = {"$ref": "#/$defs/c"}


def _holds(schema: Any, **more: Any) -> Schema:
    """An object that must hold such a value."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], **more}


def _at_a(a: Any, **definitions: Any) -> Schema:
    return {**_A, "$defs": {"a": a, **definitions}}


def _list_of(**more: Any) -> Schema:
    return _at_a({"type": "array", **more})


ENDLESS: dict[str, Schema] = {
    "itself": _at_a(_A),
    "each other": _at_a(_B, b=_C, c=_A),
    "the document": {"$ref": "#"},
    "by allOf": _at_a({"allOf": [{"type": "object"}, {"allOf": [_A]}]}),
    "by anyOf": _at_a({"anyOf": [_A, {"oneOf": [_A, {"allOf": [_A]}]}]}),
    "a property that is itself": _holds({"$ref": "#/properties/x"}),
    "an object that must hold its kind": _at_a(_holds(_A)),
    "the same in definitions": {
        "definitions": {"a": _holds({"$ref": "#/definitions/a"})},
        **_holds({"$ref": "#/definitions/a"}),
    },
    "two that hold each other": _at_a(_holds(_B), b=_holds(_A)),
    "three, one by a list": _at_a(
        _holds(_B), b={"type": "array", "items": _C, "minItems": 2}, c=_holds(_A)
    ),
    "all choices hold their kind": _at_a({"anyOf": [_holds(_A), _list_of(minItems=1, items=_A)]}),
    "required here, named there": _at_a(
        {"type": "object", "allOf": [{"required": ["x"]}, {"properties": {"x": _A}}]}
    ),
    "required beside the reference": {
        "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#"}}}},
        "$ref": "#/$defs/a", "required": ["x"],
    },
    "the end is forbidden": _at_a(
        {"anyOf": [{"type": "null"}, _holds(_A)], "type": "object"}
    ),
    "a list of at least one": _list_of(items=_A, minItems=1),
    "a prefix": _list_of(prefixItems=[{"type": "null"}, _A], minItems=2),
    "a prefix of older drafts": _list_of(items=[_A], minItems=1),
    "behind a prefix": _list_of(prefixItems=[{"type": "null"}], items=_A, minItems=2),
    "behind a prefix of older drafts": _list_of(
        items=[{"type": "null"}], additionalItems=_A, minItems=2
    ),
    "must contain its kind": _list_of(contains=_A),
    "additional properties": _at_a(
        {"type": "object", "additionalProperties": _A, "minProperties": 1}
    ),
    "additional by its name": _at_a(
        {"type": "object", "required": ["y"], "additionalProperties": _A}
    ),
    "by the pattern of its name": _at_a(
        {"type": "object", "required": ["item"], "patternProperties": {"^i": _A}}
    ),
    "all that is named holds its kind": _at_a(
        {"type": "object", "properties": {"x": _A, "y": _A, "z": {"type": "null"}},
         "additionalProperties": False, "minProperties": 2}
    ),
    "a dynamic reference": {
        "$dynamicAnchor": "node", **_holds({"$dynamicRef": "#node"}),
    },
    "an anchor": {"$anchor": "node", **_holds({"$ref": "#node"})},
    "an address": {
        "$id": "https://example.org/a.json", "$defs": {"a": _holds({"$ref": "a.json#/$defs/a"})},
        "$ref": "https://example.org/a.json#/$defs/a",
    },
    "not, of everything": _at_a({"anyOf": [{"not": {}}, _holds(_A)]}),
    "no text is so short and so long": _at_a(
        {"anyOf": [{"type": "string", "minLength": 3, "maxLength": 2}, _holds(_A)]}
    ),
    "no number is so large and so small": _at_a(
        {"anyOf": [{"type": "integer", "minimum": 3, "exclusiveMaximum": 2}, _holds(_A)]}
    ),
    "no value is of that type": _at_a(
        {"anyOf": [{"enum": ["a", None], "type": "integer"}, _holds(_A)]}
    ),
    "no value is both": _at_a(
        {"anyOf": [{"allOf": [{"const": 1}, {"enum": [2, 3]}]}, _holds(_A)]}
    ),
    "nothing else": _at_a({"anyOf": [False, _holds(_A)]}),
}  # fmt: skip

# What is asked, and the word with which it must be refused.
REFUSED: list[tuple[str, Any]] = [
    ("divisibleBy", {"type": "integer", "divisibleBy": 3}),
    ("disallow", {"disallow": "string"}),
    ("extends", {"extends": {"type": "string"}}),
    ("x-guidance", {"type": "string", "x-guidance": {"lenient": True}}),
    ("example.org", {"$ref": "https://example.org/other.json"}),
    *(("no finite value", schema) for schema in ENDLESS.values()),
]


def schemas() -> Iterator[tuple[str, Any]]:
    """Group and schema of those that must work."""
    yield from families()
    for group, found in BY_HAND.items():
        for one in found:
            yield group, one
