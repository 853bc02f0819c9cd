"""Find the offset of each token in a text, in characters.

A token that is a part of a character has the offset of the character. A token without text, such as
a special token that is left out, has the offset of the next token.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.text.tokenizer import Tokenizer

SUBSTITUTE = "\ufffd"  # for bytes that are no text
LONGEST = 4  # bytes of a character in UTF-8
NEAR = 16  # characters after the expected place in which a group of tokens is searched for


class TokenGroup(NamedTuple):
    """Consecutive tokens whose bytes together are complete characters: usually a single token."""

    parts: list[bytes]
    is_special: bool


class TextOffsets:
    """Finds the offset of each token in a text, while tokens and text are streamed.

    A token's text is expected where the text of the token before it ends. If it is not there,
    because the tokenizer normalised the prompt or added special tokens, it is searched for nearby.
    A token that is not found counts as a token without text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, skips_special: bool = False, begin: int = 0
    ) -> None:
        """skips_special: the text has no special tokens; begin: offset of its first character."""
        added = {} if tokenizer is None else tokenizer.added_tokens
        self._special = {each.token_id for each in added.values() if each.special}
        self._skips_special = skips_special
        self._tokenizer = tokenizer
        self._text = ""
        self._begin = begin  # offset of ``_text``
        self._end = 0  # end of the last token that was found, in ``_text``
        self._open: list[bytes] = []  # tokens that are an incomplete character together
        self._groups: deque[TokenGroup] = deque()  # groups that were not found yet
        self._num_begun = 0  # tokens of the prompt among them

    def follow(self, prompt_token_ids: Sequence[int]) -> None:
        """Set the prompt before the text. Its last bytes may begin a character of the text."""
        last = b"".join(self._bytes_of(each) for each in prompt_token_ids[-LONGEST:])
        if begun := _incomplete(last):
            self._open, self._num_begun = [begun], 1

    def add_text(self, text: str) -> None:
        """Append to the text."""
        self._text += text

    def add_token(self, token_id: int) -> None:
        """Append a token."""
        own, is_special = self._bytes_of(token_id), token_id in self._special
        if self._open and (is_special or own[:1] not in CONTINUING):
            self._close()  # it is never completed
        self._open.append(own)
        if is_special or not _incomplete(b"".join(self._open)):
            self._close(is_special)

    def take(self, *, is_last: bool = False) -> list[int]:
        """Return the offsets of tokens whose text is complete; is_last: of all remaining tokens."""
        if is_last and self._open:
            self._close()
        offsets: list[int] = []
        while self._groups and (found := self._found(self._groups[0], is_last)) is not None:
            self._groups.popleft()
            begins, num = found
            offsets += [self._begin + self._end + each for each in begins]
            self._end += num
        self._text, self._begin, self._end = self._text[self._end :], self._begin + self._end, 0
        num_begun = min(self._num_begun, len(offsets))
        self._num_begun -= num_begun
        return offsets[num_begun:]

    def _bytes_of(self, token_id: int) -> bytes:
        return (self._tokenizer and self._tokenizer.token_bytes(token_id)) or b""

    def _close(self, is_special: bool = False) -> None:
        self._groups.append(TokenGroup(self._open, is_special))
        self._open = []

    def _found(self, word: TokenGroup, is_last: bool) -> tuple[list[int], int] | None:
        """Find a group of tokens in the text. Returns each token's offset from the end of the last
        group, and the group's length in characters; ``None`` if more text is needed."""
        nowhere = [0] * len(word.parts), 0
        if word.is_special and self._skips_special:
            return nowhere
        begins, made = _decoded(word.parts)
        farthest = sum(map(len, word.parts)) + NEAR
        text = self._text[self._end : self._end + farthest + 1]
        if SUBSTITUTE in made and (by_bytes := _as_bytes(word.parts, text)) is not None:
            return by_bytes
        if not is_last and _may_go_on(made, text, farthest - NEAR):
            return None
        if text.startswith(made):
            return begins, len(made)
        if word.is_special:
            return nowhere
        if made.startswith(text):  # the rest was cut off by a stop string
            return [min(each, len(text)) for each in begins], len(text)
        found = _searched(word.parts, text)
        if found is not None:
            return found
        return nowhere if is_last or len(text) > farthest else None


CONTINUING = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))
"""UTF-8's continuation bytes."""


def prompt_offsets(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], *, may_be_cut: bool = False
) -> list[int]:
    """Character offsets of prompt tokens in ``text``. may_be_cut: they may cover only its end."""
    whole = tokenizer.decode(list(token_ids)).strip() if may_be_cut else ""
    begin = max(0, text.rfind(whole)) if whole else 0
    offsets = TextOffsets(tokenizer, begin=begin)
    offsets.add_text(text[begin:])
    for token_id in token_ids:
        offsets.add_token(token_id)
    return offsets.take(is_last=True)


def _incomplete(data: bytes) -> bytes:
    """The bytes of an incomplete UTF-8 character at the end of ``data``."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return decoder.getstate()[0]


def _decoded(parts: list[bytes]) -> tuple[list[int], str]:
    """Decode bytes given in parts. Returns each part's offset in the text, and the text."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begins, text = [], ""
    for part in parts:
        begins.append(len(text))
        text += decoder.decode(part)
    return begins, text + decoder.decode(b"", final=True)


def _may_go_on(made: str, text: str, num_bytes: int) -> bool:
    """Whether ``text`` is too short to decide if it begins with ``made``. num_bytes: number of
    bytes that ``made`` was decoded from."""
    if SUBSTITUTE in made:  # there may be one for each byte
        return len(text) < num_bytes and not text.strip(SUBSTITUTE)
    return len(text) < len(made) and made.startswith(text)


def _searched(parts: list[bytes], text: str) -> tuple[list[int], int] | None:
    """Find tokens, given as bytes, in a text that the tokenizer may have changed. Returns each
    token's offset, and the end of the last one; ``None`` if they are not found."""
    begins, made = _decoded(parts)
    bare = made.lstrip(" ")  # the first word of a text has no space before it
    if text[: len(bare)].lower() == bare.lower():
        return [max(0, each - len(made) + len(bare)) for each in begins], len(bare)
    if (by_bytes := _as_bytes(parts, text)) is not None:
        return by_bytes
    for each in (made, bare):
        first = text.find(each, 0, len(made) + NEAR) if each else -1
        if first >= 0:
            return [first + begin for begin in begins], first + len(each)
    return None


def _as_bytes(parts: list[bytes], text: str) -> tuple[list[int], int] | None:
    """Find tokens, given as bytes, in a text that begins with one U+FFFD for each of their bytes.
    Returns each token's offset, and the end of the last one; ``None`` for any other text."""
    num = sum(map(len, parts))
    if not num or text[:num] != SUBSTITUTE * num:
        return None
    return [sum(map(len, parts[:place])) for place in range(len(parts))], num
