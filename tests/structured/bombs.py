"""Forty grammars that are meant to do harm, or are broken: each may fail its own request, with
words, within the deadline for compiling, or work. Nothing else may change."""

from __future__ import annotations

import json
from typing import Any

OBJECT = {"type": "object", "additionalProperties": False}


def deep(levels: int, key: str = "a") -> dict[str, Any]:
    """Objects in objects."""
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        found = {**OBJECT, "properties": {key: found}, "required": [key]}
    return found


def deep_text(levels: int) -> str:
    """The same as text, which may be too deep for a reader of JSON."""
    return '{"type":"array","items":' * levels + "{}" + "}" * levels


def wide_any(levels: int, ways: int) -> dict[str, Any]:
    """Choices of choices of choices."""
    found: dict[str, Any] = {"type": "integer"}
    for level in range(levels):
        found = {
            "anyOf": [{**OBJECT, "properties": {f"p{level}_{way}": found}} for way in range(ways)]
        }
    return found


def all_any(count: int) -> dict[str, Any]:
    """A product of choices: two to the power of `count` ways."""
    choice = [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "string"}}}]
    return {"type": "object", "allOf": [{"anyOf": choice} for _ in range(count)]}


def chain(count: int) -> dict[str, Any]:
    """References that go on and on."""
    definitions: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(count)}
    return {"$defs": {**definitions, f"d{count}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def doubling(levels: int) -> str:
    """A grammar that means a text of two to the power of `levels` letters."""
    rules = "\n".join(f"r{at}: r{at + 1} r{at + 1}" for at in range(levels))
    return f'start: r0\n{rules}\nr{levels}: "ab"\n'


BOMBS: dict[str, dict[str, Any]] = {
    # schemas that are large
    "deep objects": {"json": deep(60)},
    "deeper objects": {"json": deep(400)},
    "deeper than a reader of JSON goes": {"json": deep_text(100_000)},
    "deep enough for the reader, not for the compiler": {"json": deep_text(3_000)},
    "an enum of 50,000": {"json": {"enum": [f"value {at}" for at in range(50_000)]}},
    "an enum of long texts": {"json": {"enum": [f"{at}" * 2_000 for at in range(100)]}},
    "a text of a million": {"json": {"type": "string", "minLength": 999_999, "maxLength": 10**6}},
    "an array of a million": {"json": {"type": "array", "items": {}, "minItems": 10**6}},
    "counts within counts": {
        "json": {
            "type": "array",
            "minItems": 900,
            "items": {"type": "array", "minItems": 900, "items": {"type": "integer"}},
        }
    },
    "8,000 properties": {"json": {**OBJECT, "properties": {f"p{at}": {} for at in range(8_000)}}},
    "8,000 required": {
        "json": {
            **OBJECT,
            "properties": {f"p{at}": {"type": "null"} for at in range(8_000)},
            "required": [f"p{at}" for at in range(8_000)],
        }
    },
    "required and not named": {
        "json": {"type": "object", "required": [str(n) for n in range(5000)]}
    },
    "choices of choices": {"json": wide_any(5, 6)},
    "a product of choices": {"json": all_any(24)},
    "a chain of references": {"json": chain(5_000)},
    "a range of huge numbers": {
        "json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300}
    },
    "a multiple of a huge number": {"json": {"type": "integer", "multipleOf": 10**9 + 7}},
    "many multiples": {"json": {"allOf": [{"multipleOf": n} for n in (997, 991, 983, 977)]}},
    "many patterns at once": {
        "json": {
            "type": "string",
            "allOf": [{"pattern": f"^(.*{char}.*){{9}}$"} for char in "abcdefgh"],
        }
    },
    # schemas that cannot be met or mean nothing
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "an object that never ends": {
        "json": {**OBJECT, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    },
    "a reference to nothing": {"json": {"$ref": "#/$defs/missing"}},
    "a reference to a file": {"json": {"$ref": "file:///etc/passwd"}},
    "no value is valid": {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}},
    "a broken type": {"json": {"type": {"a": 1}}},
    "half a character in a name": {
        "json": '{"properties": {"\\ud800": {}}, "required": ["\\ud800"]}'
    },
    "broken JSON": {"json": '{"type": "object"'},
    # expressions
    "an exponential expression": {"regex": "(a|b)*a(a|b){22}"},
    "repeats of repeats": {"regex": "((((a{1,90}){1,90}){1,90}){1,90}){1,90}"},
    "a million letters": {"regex": "a{1000000}"},
    "100,000 brackets": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "all of Unicode, often": {"regex": r"(\p{L}|\p{N}|\p{S}){1,500}x(\w|\W){500}"},
    "no text matches": {"regex": "[^\\s\\S]"},
    # grammars
    "left recursion for ever": {"grammar": "start: start | start start\n"},
    "empty and ambiguous": {"grammar": 'start: a a a\na: | a a | "x"\n'},
    "a text of two to the thirtieth": {"grammar": doubling(30)},
    "5,000 rules": {
        "grammar": "start: r0\n"
        + "".join(f'r{n}: "x" r{n + 1} | "y"\n' for n in range(5_000))
        + 'r5000: "z"\n'
    },
    "an undefined rule": {"grammar": "root ::= missing\n"},
    "bytes that are no text": {"grammar": 'start: "\\xff\\xfe" /[\\x80-\\xff]+/\n'},
}

# Those that took the compilers of others longest, or hung them.
NASTIEST = (
    "deeper than a reader of JSON goes",
    "an enum of 50,000",
    "a text of a million",
    "counts within counts",
    "8,000 properties",
    "choices of choices",
    "a product of choices",
    "references in a circle",
    "many patterns at once",
    "an exponential expression",
    "repeats of repeats",
    "empty and ambiguous",
)


def described(name: str) -> str:
    return f"{name}: {json.dumps(BOMBS[name])[:80]}"
