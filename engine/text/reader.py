"""Text of one sequence as its tokens come: detokeniser and stop strings together.

The same class reads in the front end and in a detokenizer process.
"""

from __future__ import annotations

from functools import cached_property

from engine.messages.params import SamplingParams
from engine.messages.text import TextDelta, TextWish
from engine.text.backends import Backend
from engine.text.detokenizer import Detokenizer, StopStrings


def wish_of(params: SamplingParams) -> TextWish:
    """The parameters of a request that concern its text."""
    return TextWish(
        params.skip_special_tokens,
        params.stop,
        params.include_stop_str_in_output,
        params.min_tokens,
    )


class TextReader:
    """Turns tokens into text until a stop string is found or ``is_last`` was said."""

    def __init__(self, backend: Backend, prompt_token_ids: list[int], wish: TextWish) -> None:
        self._backend = backend
        self._prompt_token_ids = prompt_token_ids
        self._skip_special_tokens = wish.skip_special_tokens
        self._stops: StopStrings | None = None
        if wish.stop:
            self._stops = StopStrings(wish.stop, wish.include_stop_str_in_output)
            self._longest = max(map(len, wish.stop))
        self._min_tokens = wish.min_tokens
        self._num_read = 0
        self._tail = ""  # of the text: where a stop string may have begun

    def read(self, token_ids: list[int], is_last: bool) -> TextDelta:
        """What these tokens add. One that cannot be read is an error in the answer."""
        try:
            if self._stops is None:
                delta = TextDelta(self._detokenizer.feed(token_ids))
            else:
                delta = self._read_for_stops(self._stops, token_ids)
            if is_last and delta.stop is None:
                delta.text += self._detokenizer.flush()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # faults of a tokenizer library too: only this request fails
            return TextDelta(error=f"its tokens are no text: {type(error).__name__}: {error}")
        return delta

    @cached_property
    def _detokenizer(self) -> Detokenizer:
        """Made by the first read: a prompt it cannot take is an error in the answer as well."""
        return Detokenizer(self._backend, self._prompt_token_ids, self._skip_special_tokens)

    def _read_for_stops(self, stops: StopStrings, token_ids: list[int]) -> TextDelta:
        """Token by token, since the one that completes a stop string is the last that counts."""
        pieces = ""
        for token_id in token_ids:
            new = self._detokenizer.feed([token_id])
            self._num_read += 1
            if not new:
                continue
            pieces += new
            self._tail += new
            match = stops.find(self._tail, len(new)) if self._num_read > self._min_tokens else None
            if match is not None:
                cut = len(self._tail) - match.keep
                kept = pieces[: max(0, len(pieces) - cut)]
                return TextDelta(kept, max(0, cut - len(pieces)), match.string, self._num_read)
            self._tail = self._tail[max(0, len(self._tail) - self._longest + 1) :]
        return TextDelta(pieces)
