"""Follows a text of tokens by a matcher of the grammar and by a checker next to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.messages.step import Column
from engine.structured.checked.vocabulary import Stops, Vocabulary
from engine.structured.decide import WORD, GrammarError, Matcher


class Following(Protocol):
    """How far a checker has followed a text."""

    why: str

    @property
    def stops(self) -> Stops | None:
        """The bytes without which any text may follow; ``None`` if each is looked at."""

    @property
    def may_end(self) -> bool: ...

    def copy(self) -> Following: ...

    def feed(self, data: bytes) -> bool: ...


class CheckedMatcher:
    """A ``Matcher``: what another allows and a checker does not forbid."""

    def __init__(
        self, matcher: Matcher, state: Following, vocabulary: Vocabulary, eos: tuple[int, ...]
    ) -> None:
        self._matcher = matcher
        self._state = state
        self._vocabulary = vocabulary
        self._eos = eos
        # What was looked at last: it is mostly what follows then.
        self._looked: tuple[list[int], Following] = ([], state)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        found = self._matcher.num_allowed(tokens)
        state = self._state.copy()
        for place, token in enumerate(tokens[:found]):
            if token in self._eos:
                return place + state.may_end
            if not state.feed(self._vocabulary.text(token)):
                return place
        self._looked = list(tokens[:found]), state
        return found

    def advance(self, tokens: Sequence[int]) -> None:
        self._matcher.advance(tokens)
        looked, state = self._looked
        if looked != list(tokens):
            state = self._state
            for token in tokens:
                if token in self._eos:
                    break
                if not state.feed(self._vocabulary.text(token)):
                    raise GrammarError(f"token {token} is not allowed there: {state.why}")
        self._state = state
        self._looked = [], state

    def fill(self, masks: Column, drafts: Sequence[int]) -> None:
        self._matcher.fill(masks, drafts)
        state = self._state.copy()
        for index, words in enumerate(masks):
            why = self._narrow(words, state)
            if not index and why:
                raise GrammarError(f"no text can go on from here: {why} forbids all that is left")
            if index == len(drafts) or drafts[index] in self._eos or drafts[index] < 0:
                break
            if not state.feed(self._vocabulary.text(drafts[index])):
                masks[index + 1 :] = 0
                break

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        tokens = self._matcher.forced(recent, most)
        return tokens[: self.num_allowed(tokens)] if len(tokens) else tokens

    def _narrow(self, words: Column, state: Following) -> str:
        """Clear the bits of what the checker forbids; the reason where nothing is left."""
        allowed = _tokens_of(words)
        if not len(allowed):
            return ""
        forbidden, why = self._forbidden(allowed, state)
        if not forbidden:
            return ""
        tokens = np.array(forbidden)
        cleared: Column = np.zeros(len(words) * WORD, dtype=np.uint8)
        cleared[tokens] = 1
        words &= ~np.packbits(cleared, bitorder="little").view(np.int32)
        return why if len(forbidden) == len(allowed) else ""

    def _forbidden(self, allowed: Column, state: Following) -> tuple[list[int], str]:
        forbidden: list[int] = []
        why = ""
        if not state.may_end:
            forbidden += [token for token in self._eos if token in allowed]
        rest = self._vocabulary.in_order(allowed, state.stops)
        trail = Trail(state)
        texts = self._vocabulary.texts
        for token in rest:
            if token in self._eos:
                continue
            if not trail.takes(texts[token]):
                forbidden.append(token)
                why = trail.why or why
        return forbidden, why


class Trail:
    """Feeds texts that share beginnings, each shared one once."""

    def __init__(self, state: Following) -> None:
        self._text = b""
        self._states: list[tuple[int, Following | None]] = [(0, state)]  # by how much is fed
        self.why = ""

    def takes(self, text: bytes) -> bool:
        """Whether the text may follow. Texts come in the order of their bytes."""
        shared = _num_shared(self._text, text)
        states = self._states
        while states[-1][0] > shared:
            states.pop()
        self._text = text
        at, state = states[-1]
        while state is not None and at < len(text):
            stops = state.stops
            end = at if stops is None else stops.next(text, at)
            if end == len(text):
                return True
            state, end = state.copy(), end + 1
            if not state.feed(text[at:end]):
                self.why = state.why
                states.append((end, None))
                return False
            states.append((end, state))
            at = end
        return state is not None


def _num_shared(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])


def _tokens_of(words: Column) -> Column:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).astype(np.int32)
