"""Merges the keywords for strings and numbers of several schemas into one schema for llguidance."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.structured.checked.formats import FORMATS
from engine.structured.keywords import is_number
from engine.structured.schemas import INSTEAD_OF_FORMAT, MORE_OF_FORMAT, of_rust
from engine.structured.weakened.library import is_taken, no_text_matches
from engine.structured.weakened.looks import (
    LOOKS,
    PARTS,
    closing,
    excluded_by,
    without_looks,
)

Schema = dict[str, Any]
Loosen = Callable[[str, Any], None]  # called with a keyword that the grammar cannot enforce

# Formats that llguidance supports.
WRITTEN = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
)
LONGER = ("email", "hostname")  # llguidance allows host labels that are too long in these
_LARGE = 10**18  # the largest bound of a range in llguidance


def strings(schemas: Sequence[Schema], loosen: Loosen) -> Schema | None:
    """Return one schema for the strings of all schemas; ``None`` if no string is valid."""
    found = limits(schemas, "minLength", "maxLength")
    if found is None:
        return None
    more: list[Schema] = []
    has_format = any(name in WRITTEN for name in _each(schemas, "format"))
    for pattern in _each(schemas, "pattern"):
        written = _written(pattern, loosen, has_format=has_format)
        more += [{"pattern": each} for each in written]
    for name in _each(schemas, "format"):
        if name in WRITTEN:
            more.append(INSTEAD_OF_FORMAT.get(name, {"format": name}))
            more += [MORE_OF_FORMAT[name]] if name in MORE_OF_FORMAT else []
            if name in LONGER:
                loosen("format", name)
        elif name in FORMATS:
            loosen("format", name)
    for each in more:
        if found.keys() & each.keys():
            found["allOf"] = [*found.get("allOf", []), each]
        else:
            found.update(each)
    return found


def numbers(schemas: Sequence[Schema], loosen: Loosen) -> Schema | None:
    """Return one schema for the numbers of all schemas; ``None`` if no number is valid."""
    lows = [*_bounds(schemas, "minimum", "exclusiveMinimum")]
    highs = [*_bounds(schemas, "maximum", "exclusiveMaximum")]
    found: Schema = {}
    if lows:
        low, is_strict = max(lows)
        found["exclusiveMinimum" if is_strict else "minimum"] = low
    if highs:
        high, is_loose = min((value, not is_strict) for value, is_strict in highs)
        found["maximum" if is_loose else "exclusiveMaximum"] = high
    if lows and highs:
        low, high = max(lows)[0], min(highs)[0]
        is_open = "exclusiveMinimum" in found or "exclusiveMaximum" in found
        if low > high or (low == high and is_open):
            return None
    for key in [key for key, end in found.items() if abs(end) > _LARGE]:
        loosen(key, found.pop(key))
    steps = list(dict.fromkeys(_each(schemas, "multipleOf")))
    if steps:
        found["multipleOf"] = steps[0]
    if len(steps) > 1:
        found["allOf"] = [{"multipleOf": step} for step in steps[1:]]
    return found


def limits(schemas: Sequence[Schema], low: str, high: str) -> Schema | None:
    """Merge the limits of all schemas; ``None`` if no value is left. low, high: their keywords."""
    least = max((int(value) for value in _each(schemas, low)), default=0)
    most = min((int(value) for value in _each(schemas, high)), default=None)
    if most is not None and most < least:
        return None
    found: Schema = {low: least} if least else {}
    return found if most is None else {**found, high: most}


def _bounds(schemas: Sequence[Schema], key: str, strict: str) -> Iterator[tuple[float, bool]]:
    """Yield (bound, is exclusive) of keywords such as "minimum" and "exclusiveMinimum"."""
    for each in schemas:
        if is_number(each.get(key)):
            yield each[key], each.get(strict) is True
        if is_number(each.get(strict)):
            yield each[strict], True


def _each(schemas: Sequence[Schema], key: str) -> list[Any]:
    """Return the different values of a keyword in these schemas."""
    return list(dict.fromkeys(each[key] for each in schemas if key in each))


def _written(pattern: str, loosen: Loosen, *, has_format: bool) -> list[str]:
    """Translate a pattern into patterns for llguidance that must all match; [] if impossible."""
    written = of_rust(pattern)
    if is_taken(written):
        return [written]
    apart = [of_rust(each) for each in without_looks(pattern) or ()]
    is_idle = _excludes_nothing(pattern)
    if apart and all(map(is_taken, apart)) and not is_idle:
        return apart
    wider = widened(pattern)
    if wider == pattern:
        return [written]  # llguidance reports the error in it
    # The checker only decides where the string may end. A string that a look-around forbids could
    # grow forever, unless a format leaves little choice.
    is_held = has_format or not LOOKS.search(pattern)
    loosen("pattern" if is_held else "idle look-ahead" if is_idle else "look-around", pattern)
    written = of_rust(wider)
    return [written] if is_taken(written) else []


def _excludes_nothing(pattern: str) -> bool:
    """Whether some leading ``(?!...)`` excludes no text that the rest of the pattern matches."""
    return any(no_text_matches(of_rust(each), of_rust(rest)) for each, rest in excluded_by(pattern))


def widened(pattern: str) -> str:
    """Remove look-around and back-references; the result matches all that ``pattern`` does."""
    found: list[str] = []
    rest = pattern
    while rest:
        if LOOKS.match(rest):
            end = closing(rest)
            if end is None:
                return pattern  # malformed
            rest = re.sub(r"^(?:[*+?]|\{\d+(?:,\d*)?\})\??", "", rest[end + 1 :])
            found.append("(?:)")
            continue
        part = PARTS.match(rest)
        assert part is not None, "any character is a part"
        rest = rest[part.end() :]
        found.append(_wider(part[0]))
    return "".join(found)


def _wider(part: str) -> str:
    if part in (r"\b", r"\B"):
        return "(?:)"
    if part == r"\Z":
        return "$"
    if part == r"\A":
        return "^"
    if re.fullmatch(r"\\k<\w+>|\\[1-9]\d*", part):
        return r"(?:[\s\S]*)"
    return part
