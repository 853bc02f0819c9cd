"""One generated sequence: its tokens, its text, and why it ended."""

from __future__ import annotations

from engine.frontend.logprobs import Position, position_logprobs
from engine.messages.outputs import CompletionOutput, Finished, TokenLogprobs
from engine.messages.params import SamplingParams
from engine.messages.text import TextDelta
from engine.text.detokenizer import StopStrings
from engine.text.reader import TextReader
from engine.text.tokenizer import Tokenizer


class Sequence:
    """Grows until ``end`` is set, by the core or by a stop string; a stop string wins.

    It takes the tokens of each step, then ``read`` has its own reader make text of them. If that
    happens elsewhere, they are taken when the text has come, and settled with it.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        reader: TextReader | None,
    ) -> None:
        self.index = index
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[Position] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.end: Finished | None = None
        self._tokenizer = tokenizer
        self._reader = reader
        # What may turn out to be the beginning of a stop string is not shown yet.
        self._num_held_back = 0
        if params.stop:
            stops = StopStrings(params.stop, params.include_stop_str_in_output)
            self._num_held_back = stops.num_held_back
        self.is_lazy = not params.stop and params.output_kind == "final"
        """Text that is not shown before the end is made in one go at the end."""
        self._num_read = 0  # tokens given to a reader
        self._num_sent_tokens = 0
        self._num_sent_chars = 0

    def take(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """Append tokens whose text is still to come."""
        self.token_ids += token_ids
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += [position_logprobs(entry, self._tokenizer) for entry in logprobs]
            self.cumulative_logprob += sum(entry.logprobs[0] for entry in logprobs)

    def readable(self, token_ids: list[int], end: Finished | None) -> list[int]:
        """Those of its next tokens that are text."""
        is_stopped = end is not None and end.reason == "stop"
        if is_stopped and not self.params.include_stop_str_in_output:
            return token_ids[:-1]  # the token that ended it is no text, unless asked for
        return token_ids

    def read(self, end: Finished | None) -> None:
        """Have the own reader read what was taken, ``end`` with the last of it."""
        if self._reader is None:
            self.end = end
        elif end is not None or not self.is_lazy:
            token_ids = self.readable(self.token_ids[self._num_read :], end)
            self._num_read = len(self.token_ids)
            self.settle(self._reader.read(token_ids, end is not None), end)

    def settle(self, delta: TextDelta, end: Finished | None) -> None:
        """Add what a reader made of tokens; ``end`` is what came with the last of them."""
        self.end = end
        if delta.stop is not None:
            self._stop_at(delta.stop, delta)
        elif delta.error:
            self.end = Finished(0, "error", message=delta.error)
        self.text += delta.text

    def output(self) -> CompletionOutput:
        """The whole sequence so far."""
        return self._completion(0, 0, self._num_visible_chars())

    def delta(self) -> CompletionOutput:
        """What is new since the last delta."""
        upto = self._num_visible_chars()
        completion = self._completion(self._num_sent_tokens, self._num_sent_chars, upto)
        self._num_sent_tokens, self._num_sent_chars = len(self.token_ids), upto
        return completion

    def _completion(self, first_token: int, first_char: int, upto: int) -> CompletionOutput:
        end = self.end
        logged = self.logprobs
        return CompletionOutput(
            self.index,
            self.text[first_char:upto],
            self.token_ids[first_token:],
            None if logged is None else self.cumulative_logprob,
            None if logged is None else logged[first_token:],
            None if end is None else end.reason,
            None if end is None else end.stop_reason,
            None if end is None else end.message or None,
        )

    def _num_visible_chars(self) -> int:
        if not self._num_held_back or self.end is not None:
            return len(self.text)
        return max(self._num_sent_chars, len(self.text) - self._num_held_back)

    def _stop_at(self, string: str, delta: TextDelta) -> None:
        self.text = self.text[: len(self.text) - delta.num_dropped]
        del self.token_ids[delta.num_tokens :]
        if self.logprobs is not None:
            cut = self.logprobs[delta.num_tokens :]
            self.cumulative_logprob -= sum(next(iter(p.values())).logprob for p in cut)
            del self.logprobs[delta.num_tokens :]
        self.end = Finished(0, "stop", string)
