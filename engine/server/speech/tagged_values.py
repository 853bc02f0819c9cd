"""Convert the values of arguments between tags to JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from engine.server.speech.json_text import HALVES, WORDS, JsonText, Pieces, mended
from engine.server.speech.source import Literals, TextSource, Waits

NULL = "null"
TEXTS = {"string", NULL}
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


class EndTag(NamedTuple):
    """A tag that ends an argument's value where the model has left out the end tag."""

    follow: tuple[str, ...] = ()
    """One of these texts must follow the tag, unless the answer ends there; if empty, the name of
    another argument must follow."""
    on_own_line: bool = False
    """Whether the tag must be at the beginning of a line."""


class ValueTags:
    """The tags that may end the value of an argument."""

    def __init__(
        self,
        end: str,
        follow: tuple[str, ...],
        others: Mapping[str, EndTag],
        *,
        has_lines: bool,
    ) -> None:
        """end: the value's end tag, which only counts before one of ``follow`` or the answer's end;
        others: other tags that end a value; has_lines: each value is on lines of its own."""
        self.end = end
        self.follow = follow
        self.others = others
        self.has_lines = has_lines
        self.literals = Literals((end, *others))


class TaggedValue:
    """Parses the text of one value."""

    def __init__(
        self,
        source: TextSource,
        tags: ValueTags,
        plain: Callable[[str], str],
        next_keys: Iterable[str],
    ) -> None:
        """next_keys: names that show, after an opening tag, that another argument begins."""
        self.is_cut = False
        self._source = source
        self._tags = tags
        self._plain = plain
        self._next_keys = tuple(next_keys)
        self._newline = ""  # a line end that is held back, since the value's last one is dropped

    def read(self) -> Pieces:
        """Parse the value and yield its text in pieces."""
        source, literals = self._source, self._tags.literals
        if self._tags.has_lines and (yield from source.peek()) == "\n":
            source.at += 1
        while True:
            match = literals.search(source)
            end = literals.safe_end(source) if match is None else match.start()
            if end > source.at:
                yield self._lines(source.take(end))
            if match is not None:
                if (yield from self._ends(match[0])):
                    if match[0] == self._tags.end and not self._tags.has_lines:
                        yield self._newline
                    return
                yield self._lines(source.take(source.at + len(match[0])))
            elif source.is_ended:
                self.is_cut = source.is_cut
                return
            else:
                yield None

    def _lines(self, text: str) -> str:
        text, self._newline = self._newline + text, ""
        if text.endswith("\n"):
            text, self._newline = text[:-1], "\n"
        return self._plain(text)

    def _ends(self, tag: str) -> Waits[bool]:
        """Whether the tag at the source's position ends the value."""
        source, tags = self._source, self._tags
        if tag == tags.end:
            if not (yield from source.follows(len(tag), tags.follow)):
                return False
            source.at += len(tag)
            return True
        other = tags.others[tag]
        if other.on_own_line and not self._newline:
            return False
        if other.follow:
            return bool((yield from source.follows(len(tag), other.follow)))
        return bool((yield from source.standing(len(tag), self._next_keys)))


def json_of(value: TaggedValue, types: list[str]) -> Pieces:
    """Yield the value as JSON in pieces; types: JSON types that its schema allows (empty: any)."""
    if types and TEXTS.issuperset(types):
        yield from _text(value, is_nullable=NULL in types)
        return
    parts = []
    for piece in value.read():
        if piece is None:
            yield None
        else:
            parts.append(piece)
    text = "".join(parts)
    yield _part(text, types) if value.is_cut else _typed(text, types)


def quoted(text: str) -> str:
    return json.dumps(HALVES.sub("\ufffd", text), ensure_ascii=False)


def _text(value: TaggedValue, *, is_nullable: bool) -> Pieces:
    held, has_begun = "", False
    for piece in value.read():
        if piece is None:
            yield None
            continue
        held += piece
        if not has_begun and is_nullable and NULL.startswith(held.strip()):
            continue
        yield quoted(held)[:-1] if not has_begun else quoted(held)[1:-1]
        held, has_begun = "", True
    if has_begun:
        yield "" if value.is_cut else '"'
    elif is_nullable and held.strip() == NULL:
        yield NULL
    else:
        yield quoted(held)[:-1] if value.is_cut else quoted(held)


def _typed(text: str, types: list[str]) -> str:
    stripped = text.strip()
    try:
        kind = _type_of(json.loads(stripped, parse_constant=_refuse))
    except (ValueError, RecursionError):
        if types and "string" not in types:
            found = mended(stripped) if stripped[:1] in ("{", "[") else WORDS.get(stripped)
            return found or quoted(text)
        return quoted(text)
    if "string" in types and not _fits(kind, types):
        return quoted(text)
    return mended(stripped) or quoted(text)


def _part(text: str, types: list[str]) -> str:
    """Convert an incomplete value to incomplete JSON text."""
    if text.lstrip()[:1] not in ("{", "[") and (not types or "string" in types):
        return quoted(text)[:-1]
    source = TextSource()
    source.feed(text)
    source.end(is_cut=True)
    return "".join(piece for piece in JsonText(source).read() if piece)


def _fits(kind: str, types: list[str]) -> bool:
    return kind != "string" and (kind in types or (kind == "integer" and "number" in types))


def _type_of(value: Any) -> str:
    return NULL if value is None else TYPES.get(type(value), "object")


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)
