"""One generated sequence: its tokens, its text, and why it ended."""

from __future__ import annotations

from engine.frontend.detokenizer import Detokenizer, StopMatch, StopStrings
from engine.frontend.logprobs import Position, position_logprobs
from engine.frontend.tokenizer import Tokenizer
from engine.messages.outputs import CompletionOutput, Finished, TokenLogprobs
from engine.messages.params import SamplingParams


class Sequence:
    """Grows by the tokens of each step until ``end`` is set, by the core or by a stop string."""

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_token_ids: list[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.index = index
        self.params = params
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[Position] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.end: Finished | None = None
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer.backend, prompt_token_ids, params.skip_special_tokens
            )
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        # Text that nobody sees before the end is made in one go at the end.
        self._is_lazy = self._stops is None and params.output_kind == "final"
        self._num_read = 0  # tokens the detokeniser has seen
        self._num_sent_tokens = 0
        self._num_sent_chars = 0

    def advance(
        self,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None = None,
        end: Finished | None = None,
    ) -> None:
        """Append what a step brought, ``end`` with the last. A stop string wins over ``end``."""
        self.token_ids += token_ids
        if self.logprobs is not None and logprobs is not None:
            self.logprobs += [position_logprobs(entry, self._tokenizer) for entry in logprobs]
            self.cumulative_logprob += sum(entry.logprobs[0] for entry in logprobs)
        if self._detokenizer is not None and (end is not None or not self._is_lazy):
            self._read(self._detokenizer, end)
        if self.end is None:
            self.end = end

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
        if self._stops is None or self.end is not None:
            return len(self.text)
        return max(self._num_sent_chars, len(self.text) - self._stops.num_held_back)

    def _read(self, detokenizer: Detokenizer, end: Finished | None) -> None:
        """Turn the tokens not read yet into text; at the end, all that is withheld too."""
        upto = len(self.token_ids)
        if end is not None and end.reason == "stop" and self._num_read < upto:
            # The token that ended it is no text, unless asked for.
            upto -= not self.params.include_stop_str_in_output
        if self._stops is None:
            self.text += detokenizer.feed(self.token_ids[self._num_read : upto])
            self._num_read = upto
        elif self._read_for_stops(detokenizer, self._stops, upto):
            return
        if end is not None:
            self.text += detokenizer.flush()

    def _read_for_stops(self, detokenizer: Detokenizer, stops: StopStrings, upto: int) -> bool:
        """Token by token, since the one that completes a stop string is the last that counts."""
        for position in range(self._num_read, upto):
            new = detokenizer.feed([self.token_ids[position]])
            self.text += new
            if new and position >= self.params.min_tokens:
                match = stops.find(self.text, len(new))
                if match is not None:
                    self._stop_at(match, position + 1)
                    return True
        self._num_read = upto
        return False

    def _stop_at(self, match: StopMatch, num_tokens: int) -> None:
        self.text = self.text[: match.keep]
        del self.token_ids[num_tokens:]
        if self.logprobs is not None:
            cut = self.logprobs[num_tokens:]
            self.cumulative_logprob -= sum(next(iter(p.values())).logprob for p in cut)
            del self.logprobs[num_tokens:]
        self.end = Finished(0, "stop", match.string)
