"""Decodes growing sequences in one or two microseconds per token, and finds stop strings."""

from __future__ import annotations

from typing import NamedTuple

from engine.messages.params import SamplingParams
from engine.messages.text import TextDelta, TextWish
from engine.text.token_texts import REPLACEMENT, TokenTexts
from engine.text.tokenizer import Backend, Step

CONTEXT_LENGTHS = (8, 64)  # last prompt ids that are tried as context for the output
MAX_DANGLING = 4  # bytes of a character


class Detokenizer:
    """Decodes the tokens of one sequence as they arrive, in the context of its prompt.

    The space between prompt and first word is kept, and a character that begins in the prompt is
    returned whole. Incomplete characters are withheld until they are complete or ``flush`` is
    called."""

    __slots__ = (
        "_backend", "_context", "_joining", "_last_joined", "_pending", "_skip", "_step", "_texts",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, prompt_token_ids: list[int], skip_special_tokens: bool
    ) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        context = split_context(backend, prompt_token_ids, skip_special_tokens)
        self._context, self._pending = context
        self._step: Step | None = backend.stream(self._context, skip_special_tokens)
        if self._pending:
            self._step(list(self._pending))
        self._texts = backend.token_texts(skip_special_tokens)
        # Used while no text is withheld; the stream is then dropped.
        self._joining: TokenTexts | None = None
        self._last_joined: int | None = None

    def feed(self, token_ids: list[int]) -> str:
        """Return the text that these further ids add; often empty."""
        if not token_ids:
            return ""
        joining = self._joining
        if joining is not None:
            text, last = "", self._last_joined
            for token_id in token_ids:
                piece = joining[token_id]
                if piece is None:
                    return self._feed_stream(token_ids)
                if piece:
                    text += piece
                    last = token_id
            self._last_joined = last
            return text
        return self._feed_stream(token_ids)

    def _feed_stream(self, token_ids: list[int]) -> str:
        if self._last_joined is not None:
            self._context, self._last_joined = [self._last_joined], None
        if self._step is None:
            self._step = self._backend.stream(self._context, self._skip)
        try:
            added = self._step(token_ids)
        except Exception:  # the library raises no specific type for "returned text has changed"
            return self._restart(token_ids)
        if added is None:
            self._pending += token_ids
            self._joining = None
            return ""
        self._context = [*self._pending, *token_ids] if self._pending else token_ids
        self._pending = []
        if self._texts is not None:
            self._joining, self._step = self._texts, None
        return added

    def flush(self) -> str:
        """Return the withheld text, with U+FFFD for incomplete bytes. Feed nothing afterwards."""
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        return text[len(before) :] if text.startswith(before) else self._decode(self._pending)

    def _restart(self, token_ids: list[int]) -> str:
        """Decode the withheld ids and ``token_ids`` in a new stream of text, and return their text.
        The old stream would change text that was returned already."""
        self._pending += token_ids
        text = self.flush()
        context = self._pending
        if self._decode(context).endswith(REPLACEMENT):
            context = []
        self._context, self._pending = context, []
        self._joining = None
        self._step = self._backend.stream(context, self._skip)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, self._skip)


class Context(NamedTuple):
    """The last ids of a prompt: those with complete text, then those of an incomplete character."""

    complete: list[int]
    dangling: list[int]


def split_context(
    backend: Backend, prompt_token_ids: list[int], skip_special_tokens: bool
) -> Context:
    length = len(prompt_token_ids)
    for size in (*CONTEXT_LENGTHS, length):
        tail = prompt_token_ids[max(0, length - size) :]
        text = backend.decode(tail, skip_special_tokens)
        if text:
            break  # special tokens alone provide no context
    if not text.endswith(REPLACEMENT):
        return Context(tail, [])
    for cut in range(1, min(MAX_DANGLING, len(tail)) + 1):
        if not backend.decode(tail[:-cut], skip_special_tokens).endswith(REPLACEMENT):
            return Context(tail[:-cut], tail[-cut:])
    return Context([], [])


class StopMatch(NamedTuple):
    """A stop string that was found, and how many characters of the text to keep."""

    string: str
    keep: int


class StopStrings:
    """Searches growing text for stop strings."""

    def __init__(self, strings: list[str], include_in_output: bool) -> None:
        self.strings = strings
        self._include = include_in_output
        # Text that may be the start of a stop string is held back.
        self.num_held_back = 0 if include_in_output else max(map(len, strings)) - 1

    def find(self, text: str, num_new: int) -> StopMatch | None:
        """Return the first match that ends in the last ``num_new`` characters of ``text``."""
        best: tuple[int, str] | None = None
        for string in self.strings:
            at = text.find(string, max(0, len(text) - num_new - len(string) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = at, string
        if best is None:
            return None
        at, string = best
        return StopMatch(string, at + len(string) if self._include else at)


def wish_of(params: SamplingParams) -> TextWish:
    """Return the options of a request that concern its text, such as stop strings."""
    return TextWish(
        params.skip_special_tokens,
        params.stop,
        params.include_stop_str_in_output,
        params.min_tokens,
    )


class TextReader:
    """Converts the output tokens of a sequence to text, up to a stop string."""

    __slots__ = (
        "_backend", "_detokenizer", "_longest", "_min_tokens", "_num_read", "_prompt_token_ids",
        "_skip_special_tokens", "_stops", "_tail",
    )  # fmt: skip

    def __init__(self, backend: Backend, prompt_token_ids: list[int], wish: TextWish) -> None:
        self._backend = backend
        self._prompt_token_ids = prompt_token_ids
        self._skip_special_tokens = wish.skip_special_tokens
        self._detokenizer: Detokenizer | None = None
        self._stops: StopStrings | None = None
        if wish.stop:
            self._stops = StopStrings(wish.stop, wish.include_stop_str_in_output)
            self._longest = max(map(len, wish.stop))
        self._min_tokens = wish.min_tokens
        self._num_read = 0
        self._tail = ""  # end of the text, in which a stop string may have begun

    def read(self, token_ids: list[int], is_last: bool) -> TextDelta:
        """Return the text that these tokens add, or an error. is_last: add withheld text, too."""
        new_text = self.next_text(token_ids)
        if isinstance(new_text, TextDelta):
            return new_text
        if not is_last:
            return TextDelta(new_text)
        assert self._detokenizer is not None
        try:
            return TextDelta(new_text + self._detokenizer.flush())
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return _no_text(error)

    def next_text(self, token_ids: list[int]) -> str | TextDelta:
        """Return the text that these tokens add; they are not the sequence's last. Returns a
        ``TextDelta`` at a stop string or an error."""
        detokenizer = self._detokenizer
        try:
            if detokenizer is None:  # a prompt that cannot be decoded is an error in the result too
                detokenizer = self._detokenizer = Detokenizer(
                    self._backend, self._prompt_token_ids, self._skip_special_tokens
                )
            if self._stops is None:
                return detokenizer.feed(token_ids)
            return self._read_for_stops(detokenizer, self._stops, token_ids)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # faults of a tokenizer library only fail this request
            return _no_text(error)

    def _read_for_stops(
        self, detokenizer: Detokenizer, stops: StopStrings, token_ids: list[int]
    ) -> str | TextDelta:
        """Read tokens one by one, up to the one that completes a stop string."""
        pieces = ""
        for token_id in token_ids:
            new = detokenizer.feed([token_id])
            self._num_read += 1
            if not new:
                continue
            pieces += new
            tail = self._tail + new
            for string in stops.strings:
                if string in tail and self._num_read > self._min_tokens:
                    match = stops.find(tail, len(new))
                    if match is not None:
                        cut = len(tail) - match.keep
                        kept = pieces[: max(0, len(pieces) - cut)]
                        dropped = max(0, cut - len(pieces))
                        return TextDelta(kept, dropped, match.string, self._num_read)
            self._tail = tail[-self._longest :]
        return pieces


def _no_text(error: BaseException) -> TextDelta:
    return TextDelta(error=f"its tokens cannot be decoded: {type(error).__name__}: {error}")
