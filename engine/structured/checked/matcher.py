"""Combines a grammar's matcher with a checker of JSON."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.messages.step import Column
from engine.structured.checked.narrowing import Following, Narrowing
from engine.structured.checked.vocabulary import Vocabulary
from engine.structured.decide import WORD, GrammarError, Matcher

MOST_PRESSING = 16  # texts whose continuations are checked


class CheckedMatcher:
    """A ``Matcher`` that allows the tokens which both another matcher and a checker allow."""

    def __init__(
        self, matcher: Matcher, state: Following, vocabulary: Vocabulary, eos: tuple[int, ...]
    ) -> None:
        self._matcher = matcher
        self._state = state
        self._vocabulary = vocabulary
        self._eos = eos
        # The last result: the text mostly continues with those tokens.
        self._looked: tuple[list[int], Following] = ([], state)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        found = self._matcher.num_allowed(tokens)
        state = self._state.copy()
        for place, token in enumerate(tokens[:found]):
            if token in self._eos:
                return place + state.may_end
            if not state.feed(self._vocabulary.text(token)):
                return place
        if b"" in state.pressing and self._is_stuck(tokens[:found], state):
            return found - 1
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
            if not why and self._clear_stuck(words, state, drafts[:index]):
                why = "uniqueItems"
            if not index and why:
                raise GrammarError(f"no text can follow here: {why} forbids all that is left")
            if index == len(drafts) or drafts[index] in self._eos or drafts[index] < 0:
                break
            if not state.feed(self._vocabulary.text(drafts[index])):
                masks[index + 1 :] = 0
                break

    def forced(self, recent: Sequence[int], most: int) -> Sequence[int]:
        tokens = self._matcher.forced(recent, most)
        return tokens[: self.num_allowed(tokens)] if len(tokens) else tokens

    def _clear_stuck(self, words: Column, state: Following, before: Sequence[int]) -> bool:
        """Clear the bits of allowed tokens after which no token can follow. Returns True if no bit
        is left. before: the drafts before the token that this mask is for."""
        if not (pressing := state.pressing):
            return False
        bits = words.view(np.uint32)
        found = map(self._vocabulary.spelling, pressing[:MOST_PRESSING])
        for token in {each for each in found if each is not None}:
            word, bit = token // WORD, np.uint32(1 << token % WORD)
            further = state.copy()
            if not bits[word] & bit or not further.feed(self._vocabulary.text(token)):
                continue
            if self._is_stuck([*before, token], further):
                bits[word] &= ~bit
        return not words.any()

    def _is_stuck(self, tokens: Sequence[int], state: Following) -> bool:
        """Whether no token can follow ``tokens``. state: the checker's state after them."""
        num_words = -(-len(self._vocabulary.in_order) // WORD)
        masks: Column = np.zeros((len(tokens) + 1, num_words), np.int32)
        self._matcher.fill(masks, tokens)
        self._narrow(masks[-1], state)
        return not masks[-1].any()

    def _narrow(self, words: Column, state: Following) -> str:
        """Clear the bits of tokens the checker forbids. Returns the reason if no bit is left."""
        may_end = [token for token in self._eos if words[token // WORD] >> token % WORD & 1]
        narrowing = Narrowing(self._vocabulary)
        forbidden = narrowing.forbidden(words, may_end, state)
        if may_end and not state.may_end:
            forbidden = np.concatenate([forbidden, np.array(may_end, forbidden.dtype)])
        if not len(forbidden):
            return ""
        is_cleared = np.zeros(len(words) * WORD, np.uint8)
        is_cleared[forbidden] = 1
        words &= ~np.packbits(is_cleared, bitorder="little").view(np.int32)
        return "" if words.any() else narrowing.why or "JSON"
