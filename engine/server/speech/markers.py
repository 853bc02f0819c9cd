"""Distinguish marker tokens from text that looks like them.

``<tool_call>`` is one token in most vocabularies, but a model may also write the same letters with
other tokens, for example in a text about tool calls. So parsers get a text in which each marker
token is one character, a lone surrogate; the same marker in letters stays unchanged.

    token ids   9906  151657            27  14172  13429  29
    text        "Hi"  "<tool_call>"     "<" "tool" "_call" ">"
    as read     "Hi"  "\\ud800"          "<" "tool" "_call" ">"
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

FIRST = 0xD800


class Markers:
    """Replaces a family's markers by single characters, if they are tokens of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        """texts: all markers of the family, including those that are no single tokens."""
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens
        # The longest first: one marker may be the beginning of another.
        known = sorted({*texts} & added.keys(), key=len, reverse=True)
        self._signs = {text: chr(FIRST + n) for n, text in enumerate(known)}
        self._texts = {ord(sign): text for text, sign in self._signs.items()}
        self.signs = {added[text].token_id: sign for text, sign in self._signs.items()}
        """The character that stands for a marker in texts for the parsers, by token id."""
        self.special = {t.token_id for t in added.values() if t.special} - self.signs.keys()
        """Ids of the other special tokens."""
        self.names = {token.token_id: text for text, token in added.items()}

    def in_template(self, template: dict[str, Any]) -> dict[str, Any]:
        """Return a response template with its markers replaced by single characters."""
        replaced: dict[str, Any] = _replaced(template, self._signs)
        return replaced

    def has(self, text: str) -> bool:
        """Whether this marker is a single token of the tokenizer."""
        return text in self._signs

    def read(self, text: str) -> str:
        """Replace each marker that is a single token by its character in the text."""
        for marker, sign in self._signs.items():
            text = text.replace(marker, sign)
        return text

    def plain(self, text: str) -> str:
        """Replace the characters that stand for markers by the markers again."""
        return text.translate(self._texts) if self._texts else text

    def in_grammar(self, text: str) -> str:
        """Write a text in llguidance's Lark dialect, with its markers as tokens."""
        added, parts = self.tokenizer.added_tokens, []
        for part in re.split(f"([{chr(FIRST)}-\udfff])", self.read(text)):
            marker = self.plain(part)
            if marker != part:
                parts.append(f"<[{added[marker].token_id}]>")
            elif part:
                parts.append(json.dumps(part))
        return " ".join(parts)


class TokenSpan(NamedTuple):
    """A token's range of characters in the text, and the text that replaces it."""

    begin: int
    end: int
    sign: str


class MarkedText:
    """Replaces the markers in the streamed text of one sequence by their characters."""

    def __init__(
        self, markers: Markers, prompt_token_ids: list[int], *, skip_special: bool
    ) -> None:
        """skip_special: remove special tokens that are not markers."""
        self._markers = markers
        self._cut = dict(markers.signs)
        if skip_special:
            self._cut |= dict.fromkeys(markers.special, "")
        self._decoder = Detokenizer(markers.tokenizer.backend, prompt_token_ids, False)
        self._decoded = 0  # characters of all tokens so far
        self._cuts: deque[TokenSpan] = deque()
        self._at = 0  # characters of the text that were returned or replaced
        self._held = ""  # the beginning of a marker whose end has not arrived

    def read(self, token_ids: list[int], text: str) -> str:
        """Return new text with its markers replaced. The newest tokens may lack text."""
        for token in token_ids:
            self._decoded += len(self._decoder.feed([token]))
            if token in self._cut:
                begin = self._decoded - len(self._markers.names[token])
                self._cuts.append(TokenSpan(begin, self._decoded, self._cut[token]))
        text, self._held = self._held + text, ""
        if not self._cuts:
            self._at += len(text)
            return text
        return self._without_markers(text)

    def flush(self) -> str:
        """Return text that ``read`` held back as a possible beginning of a marker."""
        held, self._held = self._held, ""
        return held

    def _without_markers(self, text: str) -> str:
        parts = []
        while self._cuts and self._cuts[0].begin < self._at + len(text):
            cut = self._cuts[0]
            begin = max(0, cut.begin - self._at)
            parts.append(text[:begin])
            self._at, text = self._at + begin, text[begin:]
            if self._at + len(text) < cut.end:
                self._held = text
                return "".join(parts)
            self._cuts.popleft()
            parts.append(cut.sign)
            text, self._at = text[cut.end - self._at :], cut.end
        self._at += len(text)
        return "".join(parts) + text


def markers_in(tokenizer: Tokenizer, template: dict[str, Any]) -> list[str]:
    """The tokenizer's added tokens that occur in a response template."""
    texts = list(_strings(template["fields"]))
    return [each for each in tokenizer.added_tokens if any(_is_in(each, text) for text in texts)]


def _strings(value: Any) -> Any:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _is_in(marker: str, text: str) -> bool:
    return marker in text or re.escape(marker) in text


def _replaced(value: Any, signs: dict[str, str]) -> Any:
    """Replace markers, also regex-escaped ones, by their signs in all strings of a template."""
    if isinstance(value, str):
        for marker, sign in signs.items():
            value = value.replace(re.escape(marker), sign).replace(marker, sign)
        return value
    if isinstance(value, dict):
        return {key: _replaced(item, signs) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, signs) for item in value]
    return value
