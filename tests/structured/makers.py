"""Instances of schemas, expressions and grammars, drawn at random; and the same, damaged.

What is made is only a proposal: a judge says of each text whether it is right, so neither a maker
nor a damager has to be perfect, but they have to be various.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from random import Random
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from structured.judges import Judge, parser_of

WORDS = [
    *("ash", "birch", "cedar", "oak", "pine", "rowan", "no", "yes"),
    *("Ünal", "naïve", "東京", "a-b", "x_1"),
]
HOSTS = ("example", "a1", "my-host", "com", "org", "x")
SIMPLE = [chr(code) for code in range(32, 127)]
CHARS = [*SIMPLE, *"éßñΩжא中日🙂\t\n"]
DEPTH = 5  # of nested values, before the smallest are preferred


def draw(
    make: Callable[[], str], judge: Judge, wanted: int, *, right: bool, tries: int = 60
) -> list[str]:
    """Up to `wanted` different texts that the judge calls right, or wrong."""
    found: dict[str, None] = {}
    for _ in range(max(wanted, 10) * tries):
        if len(found) == wanted:
            break
        try:
            text = make()
        except (Unmakeable, RecursionError):
            continue
        if text not in found and _is_text(text) and judge(text) == right:
            found[text] = None
    return list(found)


class Unmakeable(Exception):
    """A choice of the maker that leads nowhere."""


def _is_text(text: str) -> bool:
    return not any(0xD800 <= ord(char) < 0xE000 for char in text)


# -- values of JSON schemas


class JsonMaker:
    """Draws values that a schema probably allows."""

    def __init__(self, schema: Any, rng: Random) -> None:
        self._root = schema
        self._rng = rng

    def text(self) -> str:
        return written(self.value(self._root, 0), self._rng)

    def value(self, schema: Any, depth: int) -> Any:
        if schema is False or depth > 40:
            raise Unmakeable
        if schema is True:
            schema = {}
        schema = self._flat(schema)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._rng.choice(schema["enum"])
        kind = self._kind(schema, depth)
        return getattr(self, f"_{kind}")(schema, depth)

    def _flat(self, schema: dict[str, Any]) -> dict[str, Any]:
        """One of the ways to meet it, without references and combinations."""
        while True:
            if "$ref" in schema:
                rest = {key: each for key, each in schema.items() if key != "$ref"}
                schema = merged(self._target(schema["$ref"]), rest)
                continue
            combined = next((key for key in ("allOf", "anyOf", "oneOf") if key in schema), None)
            if combined is None:
                return schema
            rest = {key: each for key, each in schema.items() if key != combined}
            parts = schema[combined]
            for part in parts if combined == "allOf" else [self._rng.choice(parts)]:
                if part is False:
                    raise Unmakeable
                rest = merged(rest, self._flat(part) if isinstance(part, dict) else {})
            schema = rest

    def _target(self, ref: str) -> Any:
        if not ref.startswith("#"):
            return next(one for one in _subschemas(self._root) if one.get("$id") == ref)
        if ref != "#" and not ref.startswith("#/"):
            return next(one for one in _subschemas(self._root) if one.get("$anchor") == ref[1:])
        found = self._root
        for part in ref[2:].split("/") if len(ref) > 1 else []:
            part = part.replace("~1", "/").replace("~0", "~").replace("%25", "%")
            found = found[int(part)] if isinstance(found, list) else found[part]
        return {} if found is True else found

    def _kind(self, schema: dict[str, Any], depth: int) -> str:
        kinds = schema.get("type")
        if isinstance(kinds, str):
            return kinds
        if kinds is None:
            kinds = [kind for kind, keys in _KEYS_OF.items() if keys & schema.keys()]
            kinds = kinds or ["null", "boolean", "integer", "string", "array", "object"]
        if depth >= DEPTH:
            kinds = [kind for kind in kinds if kind not in ("array", "object")] or kinds
        return str(self._rng.choice(kinds))

    def _null(self, schema: dict[str, Any], depth: int) -> None:
        return None

    def _boolean(self, schema: dict[str, Any], depth: int) -> bool:
        return self._rng.random() < 0.5

    def _integer(self, schema: dict[str, Any], depth: int) -> int:
        return round(self._number({**schema, "_step": schema.get("multipleOf", 1)}, depth))

    def _number(self, schema: dict[str, Any], depth: int) -> Any:
        low, high = _bounds(schema)
        spread = self._rng.choice([3, 20, 1000, 10**6])
        if low is None:
            low = (high if high is not None else spread / 2) - spread
        if high is None:
            high = low + spread
        step = schema.get("_step") or schema.get("multipleOf")
        if step:
            first, last = -(-low // step), high // step
            if last < first:
                raise Unmakeable
            at = self._rng.choice([first, last, self._rng.randint(int(first), int(last))])
            return round(at * step, 9) + 0  # no negative zero: see docs/internals/structured.md
        drawn = self._rng.choice([low, high, self._rng.uniform(low, high)])
        places = self._rng.choice([0, 1, 2, 4])
        rounded = round(drawn, places)
        if any(f"{end}".startswith(f"{rounded}") and end != rounded for end in _ends(schema)):
            raise Unmakeable  # a known difference: an end of the range, cut off
        return int(rounded) if rounded == int(rounded) and self._rng.random() < 0.7 else rounded

    def _string(self, schema: dict[str, Any], depth: int) -> str:
        rng = self._rng
        if "format" in schema:
            return FORMATS[schema["format"]](rng)
        least = schema.get("minLength", 0)
        most = schema.get("maxLength", max(least, rng.choice([0, 4, 12, 30])))
        if "pattern" in schema:
            text = RegexMaker(schema["pattern"], rng, least, most).text()
            around = rng.choice([("", ""), ("", ""), ("", "xy"), ("a ", ""), ("0", "é")])
            return around[0] + text + around[1]
        if rng.random() < 0.5:
            text = " ".join(rng.choices(WORDS, k=rng.randint(0, 4)))
        else:
            text = "".join(rng.choices(CHARS, k=rng.randint(least, max(least, min(most, 30)))))
        while len(text) < least:
            text += rng.choice(CHARS)
        return text[: rng.randint(least, most)] if len(text) > most else text

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        rng = self._rng
        first = schema.get("prefixItems", [])
        items = schema.get("items", True)
        if isinstance(items, list):
            first, items = items, schema.get("additionalItems", True)
        least = schema.get("minItems", 0)
        most = schema.get("maxItems", least + rng.choice([0, 1, 3]) + len(first))
        if items is False:
            most = min(most, len(first))
        if least > most:
            raise Unmakeable
        count = least if depth >= DEPTH else rng.choice([least, rng.randint(least, most)])
        count = min(count, least + 8) if rng.random() < 0.9 else count
        return [
            self.value(first[at] if at < len(first) else items, depth + 1) for at in range(count)
        ]

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng = self._rng
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        share = rng.choice([0.0, 0.5, 1.0]) if depth < DEPTH else 0.0
        found: dict[str, Any] = {}
        for name, each in properties.items():
            if name in required or (rng.random() < share and each is not False):
                found[name] = self.value(each, depth + 1)
        others = [name for name in required if name not in properties]
        others += self._other_names(schema, depth)
        for name in others:
            if name in properties or name in found:
                continue
            found[name] = self.value(_other_schema(schema, name), depth + 1)
        return found

    def _other_names(self, schema: dict[str, Any], depth: int) -> list[str]:
        rng = self._rng
        patterns = list(schema.get("patternProperties", {}))
        least, most = schema.get("minProperties", 0), schema.get("maxProperties", 99)
        count = least if depth >= DEPTH or rng.random() < 0.5 else least + rng.randint(0, 2)
        if not patterns and schema.get("additionalProperties") is False:
            return []
        names = []
        for _ in range(min(count, most)):
            if patterns and (schema.get("additionalProperties") is False or rng.random() < 0.8):
                names.append(RegexMaker(rng.choice(patterns), rng, 0, 20).text())
            else:
                names.append(rng.choice(WORDS) + rng.choice(["", "2", "é"]))
        return names


_KEYS_OF = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties"},
}


def merged(one: Any, other: Any) -> dict[str, Any]:
    """A schema that asks for both, as far as a maker must know."""
    if one is False or other is False:
        raise Unmakeable
    found = dict({} if one is True else one)
    for key, value in ({} if other is True else other).items():
        if key not in found:
            found[key] = value
        elif key in ("allOf", "anyOf", "oneOf"):
            found["allOf"] = [*found.get("allOf", []), {key: value}]
        else:
            found[key] = _MERGED.get(key, _last)(found[key], value)
    return found


def _last(one: Any, other: Any) -> Any:
    return other


def _each_of(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    shared = {name: merged(one[name], other[name]) for name in one if name in other}
    return {**one, **other, **shared}


_MERGED: dict[str, Callable[[Any, Any], Any]] = {
    "properties": _each_of,
    "patternProperties": _each_of,
    "required": lambda one, other: list(dict.fromkeys([*one, *other])),
    "type": lambda one, other: _both(one, other),
    "enum": lambda one, other: [each for each in one if each in other],
    "items": merged,
    "additionalProperties": merged,
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}


def _both(one: Any, other: Any) -> Any:
    ones = [one] if isinstance(one, str) else one
    others = [other] if isinstance(other, str) else other
    shared = [kind for kind in ones if kind in others]
    if "integer" in (*ones, *others) and "number" in (*ones, *others):
        shared.append("integer")
    if not shared:
        raise Unmakeable
    return shared


def _subschemas(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [one for each in schema for one in _subschemas(each)]
    if not isinstance(schema, dict):
        return []
    return [schema, *(one for each in schema.values() for one in _subschemas(each))]


def _other_schema(schema: dict[str, Any], name: str) -> Any:
    for pattern, each in schema.get("patternProperties", {}).items():
        if re.search(pattern, name):
            return each
    return schema.get("additionalProperties", True)


def _bounds(schema: dict[str, Any]) -> tuple[float | None, float | None]:
    low, high = schema.get("minimum"), schema.get("maximum")
    step = 1 if schema.get("_step") else 0.01
    if (above := schema.get("exclusiveMinimum")) not in (None, True, False):
        low = above + step if low is None else max(low, above + step)
    if (below := schema.get("exclusiveMaximum")) not in (None, True, False):
        high = below - step if high is None else min(high, below - step)
    return low, high


def _ends(schema: dict[str, Any]) -> list[float]:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return [schema[key] for key in keys if key in schema]


def written(value: Any, rng: Random) -> str:
    """Format a value as JSON in one of the styles that programs use."""
    styles = [{"separators": (",", ":")}, {}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}]
    text = json.dumps(value, ensure_ascii=False, **rng.choice(styles))
    # Lines that are indented more are a known difference.
    return text if f"\n{' ' * 25}" not in text else json.dumps(value, ensure_ascii=False)


def _host(rng: Random) -> str:
    return ".".join(rng.choices(HOSTS, k=rng.choice([2, 3])))


def _day(rng: Random) -> str:
    return f"{rng.randint(1, 9999):04}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _clock(rng: Random) -> str:
    part = rng.choice(["", ".5", ".123456"])
    zone = rng.choice(["Z", "+02:00", "-11:30"])
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}:{rng.randint(0, 59):02}{part}{zone}"


def _ipv4(rng: Random) -> str:
    return ".".join(str(rng.choice([0, 9, 10, 99, 127, 200, 255])) for _ in range(4))


def _ipv6(rng: Random) -> str:
    words = [f"{rng.getrandbits(16):x}" for _ in range(8)]
    return rng.choice([":".join(words), "::1", f"{words[0]}::{words[1]}:{words[2]}", "fe80::"])


def _uuid(rng: Random) -> str:
    text = f"{rng.getrandbits(128):032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _uri(rng: Random) -> str:
    path = "/".join(rng.choices(["a", "b-c", "%20", "x.html", ""], k=rng.randint(0, 3)))
    rest = rng.choice(["", "?q=1&r=a+b", "#top"])
    return rng.choice(
        [f"https://{_host(rng)}/{path}{rest}", "mailto:a@b.org", "urn:isbn:0451450523"]
    )


def _email(rng: Random) -> str:
    name = rng.choice(["ann", "bob.b", "x+y", "o'neil", "a_b-c", "1"])
    return f"{name}@{_host(rng)}"


def _duration(rng: Random) -> str:
    days = f"{rng.randint(0, 9)}Y{rng.randint(0, 11)}M{rng.randint(0, 30)}D"
    time = f"T{rng.randint(0, 36)}H{rng.randint(0, 59)}M{rng.randint(0, 59)}S"
    return "P" + rng.choice([days, days[:2], days[2:4], time, time[:2] + "H", days + time, "2W"])


FORMATS: dict[str, Callable[[Random], str]] = {
    "date": _day,
    "time": _clock,
    "date-time": lambda rng: f"{_day(rng)}T{_clock(rng)}",
    "duration": _duration,
    "email": _email,
    "hostname": _host,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "uuid": _uuid,
    "uri": _uri,
}


# -- texts of expressions


class RegexMaker:
    """Draws texts in which an expression of Python's probably finds itself from end to end."""

    def __init__(self, expression: str, rng: Random, least: int = 0, most: int = 40) -> None:
        self._tree = _parser.parse(expression)
        self._rng = rng
        self._least, self._most = least, most

    def text(self) -> str:
        for _ in range(30):
            self._long = self._rng.choice([1, 3, 8, max(1, self._least)])
            text = self._several(self._tree)
            if self._least <= len(text) <= self._most:
                return text
        return text

    def _several(self, tree: Any) -> str:
        return "".join(self._one(op, argument) for op, argument in tree)

    def _one(self, op: Any, argument: Any) -> str:
        rng = self._rng
        if op is sre.LITERAL:
            return chr(argument)
        if op is sre.NOT_LITERAL:
            return rng.choice([char for char in CHARS if char != chr(argument)])
        if op is sre.ANY:
            return rng.choice([char for char in CHARS if char != "\n"])
        if op is sre.IN:
            return rng.choice(_members(argument))
        if op is sre.BRANCH:
            return self._several(rng.choice(argument[1]))
        if op is sre.SUBPATTERN:
            return self._several(argument[3])
        if op in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
            least, most, inner = argument
            most = min(most, max(least, self._long) if rng.random() < 0.9 else least + 12)
            count = rng.choice([least, rng.randint(least, max(least, most))])
            return "".join(self._several(inner) for _ in range(count))
        return ""  # anchors


def _members(parts: Any) -> list[str]:
    negated = parts[0][0] is sre.NEGATE
    named = [part for part in parts if part[0] is not sre.NEGATE]
    if negated:
        return [char for char in CHARS if not any(_is_in(char, part) for part in named)]
    found: list[str] = []
    for op, argument in named:
        if op is sre.LITERAL:
            found.append(chr(argument))
        elif op is sre.RANGE:
            low, high = argument
            found += [chr(code) for code in range(low, min(high, low + 200) + 1)]
        else:
            found += [char for char in CHARS if _is_in(char, (op, argument))]
    return found


_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}


def _is_in(char: str, part: Any) -> bool:
    op, argument = part
    if op is sre.LITERAL:
        return ord(char) == argument
    if op is sre.RANGE:
        return bool(argument[0] <= ord(char) <= argument[1])
    return re.match(_CATEGORIES[argument], char) is not None


# -- texts of grammars


class GrammarMaker:
    """Derives texts from a grammar in Lark's notation, as lark reads it."""

    def __init__(self, grammar: str, rng: Random) -> None:
        parser = parser_of(grammar)
        self._rng = rng
        self._rules: dict[str, list[Any]] = {}
        for rule in parser.rules:
            self._rules.setdefault(rule.origin.name, []).append(rule.expansion)
        self._terminals = {one.name: one.pattern.to_regexp() for one in parser.terminals}
        self._ignored = [self._terminals[name] for name in parser.ignore_tokens]
        self._sizes = self._least_sizes()

    def text(self) -> str:
        self._budget = self._rng.choice([2, 6, 15, 40, 80])
        self._spaces = self._rng.random() < 0.5
        return "".join(self._derive("start"))

    def _derive(self, name: str) -> list[str]:
        ways = self._rules[name]
        self._budget -= 1
        if self._budget < 0:
            least = min(map(self._size, ways))
            ways = [way for way in ways if self._size(way) == least]
        found: list[str] = []
        for symbol in self._rng.choice(ways):
            if not symbol.is_term:
                found += self._derive(symbol.name)
                continue
            if self._ignored and self._spaces and found and self._rng.random() < 0.3:
                found.append(RegexMaker(self._rng.choice(self._ignored), self._rng).text())
            found.append(RegexMaker(self._terminals[symbol.name], self._rng).text())
        return found

    def _size(self, way: Any) -> float:
        return sum(1 if one.is_term else self._sizes.get(one.name, 1e9) for one in way)

    def _least_sizes(self) -> dict[str, float]:
        """The fewest tokens each rule can have."""
        self._sizes: dict[str, float] = {}
        while True:
            new = {name: 1 + min(map(self._size, ways)) for name, ways in self._rules.items()}
            if new == self._sizes:
                return new
            self._sizes = new


# -- damage


def damaged_text(text: str, rng: Random) -> str:
    """One or two characters put in, taken out, changed or exchanged."""
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randint(0, len(text))
        other = rng.choice([*(text or "a"), *SIMPLE, "é", "中"])
        text = rng.choice(
            [
                text[:at] + other + text[at:],
                text[:at] + text[at + 1 :],
                text[:at] + other + text[at + 1 :],
                text[:at] + text[at : at + 2][::-1] + text[at + 2 :],
                text[:at],
                text + text[at:],
                text[:at] + text[at:].swapcase(),
            ]
        )
    return text


def damaged_json(text: str, rng: Random) -> str:
    """A value changed somewhere within, or now and then the text around the values."""
    if rng.random() < 0.15:
        return rng.choice(
            [
                text[: rng.randint(0, max(0, len(text) - 1))],
                text + rng.choice([",", "}", "x", "null"]),
                text.replace('"', "'", 2),
                text.replace(":", "=", 1),
                text.replace("]", ",]", 1),
                text.replace("}", ",}", 1),
            ]
        )
    value = copy.deepcopy(json.loads(text))
    holder = {"": value}
    places = list(_places(holder, ""))
    at, key = rng.choice(places)
    at[key] = _damaged_value(at[key], rng)  # type: ignore[index]
    if at[key] is _GONE:  # type: ignore[index]
        del at[key]  # type: ignore[arg-type]
    return written(holder[""], rng) if "" in holder else ""


_GONE = object()
_OTHER_VALUES = (None, True, 0, -1, 1.5, 10**12, "", "x", [], {}, [1], {"zz": 1})


def _places(holder: Any, key: Any) -> Any:
    yield holder, key
    value = holder[key]
    if isinstance(value, dict):
        for name in value:
            yield from _places(value, name)
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from _places(value, index)


def _damaged_value(value: Any, rng: Random) -> Any:
    ways: list[Any] = [rng.choice(_OTHER_VALUES), rng.choice(_OTHER_VALUES), _GONE]
    if isinstance(value, bool) or value is None:
        pass
    elif isinstance(value, int | float):
        ways += [value + 1, value - 1, value + 0.5, -value, value * 1000, str(value), value + 0.001]
    elif isinstance(value, str):
        ways += [value + "!", value[1:], value[:-1], value.swapcase(), value * 5 + "abcdefgh"]
        ways += [damaged_text(value, rng) for _ in range(3)]
    elif isinstance(value, list):
        ways += [value[:-1], value[1:], value * 9, [*value, None], [*value, "x"], value[::-1]]
    else:
        ways += [{**value, "zz": 1}, {**value, "Zz": "x"}, list(value), {"zz": 1, **value}]
    return rng.choice(ways)
