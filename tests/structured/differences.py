"""Where what may be written differs from what JSON schema allows; in words, these are listed in
docs/internals/structured.md. Nothing is written that a schema does not allow."""

from __future__ import annotations

from typing import Any

# Right texts that are not written: what is asked, and the texts.
NARROWER: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an integer with a point or an exponent": ({"type": "integer"}, ["1.0", "1e2"]),
    "an exponent in a range": ({"type": "number", "minimum": 0, "maximum": 10}, ["1e0"]),
    "zero with a sign": ({"type": "number", "minimum": 0}, ["-0", "-0.0"]),
    "an end of a range, cut off": (
        {"type": "number", "minimum": -2.75, "maximum": 4.1415},
        ["4.1", "4.14", "-2.7"],
    ),
    "another way to write a constant": ({"const": 1}, ["1.0"]),
    "properties in another order": (
        {"type": "object", "properties": {"a": {}, "b": {}}},
        ['{"b":1,"a":1}', '{"z":1,"a":1}'],
    ),
    "a constant's properties in another order": ({"const": {"a": 1, "b": 2}}, ['{"b":2,"a":1}']),
    "characters by number": ({"type": "string"}, ['"\\u0041"', '"\\/"', '"\x7f"']),
    "more whitespace, or around the value": (
        {"type": "array"},
        [" []", "[] ", "[   ]", "[\n\n]", "[\n" + " " * 25 + "]"],
    ),
    "a leap second": ({"type": "string", "format": "time"}, ['"23:59:60Z"']),
    "the year 0000": ({"type": "string", "format": "date"}, ['"0000-01-01"']),
    "an address of both kinds": ({"type": "string", "format": "ipv6"}, ['"::ffff:1.2.3.4"']),
}
