"""A request as its user sees it: one sequence, or n of them sampled side by side.

RequestState     what all of its sequences share, and its outputs
OutputSequence   one sequence: its tokens, its text, and why it ended
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from operator import itemgetter
from typing import Any, NamedTuple

from engine.frontend.prompt import Submission
from engine.messages.params import SamplingParams
from engine.messages.requests import (
    CompletionOutput,
    Finished,
    Logprob,
    RequestMetrics,
    RequestOutput,
    Started,
    TokenLogprobs,
)
from engine.messages.text import TextDelta
from engine.text.detokenizer import StopStrings, TextReader, wish_of
from engine.text.tokenizer import Tokenizer

Position = dict[int, Logprob]


class RequestState:
    """Gathers the sequences of one request into outputs of the kind its user asked for.

    cumulative: all n sequences so far · delta: what is new in those that moved · final: all n,
    once, when the last has finished. Sequences stand in the order of their index. Their text is
    made here if it ``reads_here``.
    """

    def __init__(
        self, submission: Submission, tokenizer: Tokenizer | None, reads_here: bool
    ) -> None:
        self.request_id = submission.request_id
        self.core_ids = [request.request_id for request in submission.requests]
        self.prompt = submission.prompt
        self.prompt_token_ids = submission.prompt_token_ids
        self.kind = submission.params.output_kind
        self.sequences = [
            OutputSequence(
                index,
                submission.params,
                tokenizer,
                _reader(submission, tokenizer) if reads_here else None,
            )
            for index in range(submission.params.n)
        ]
        self._num_running = len(self.sequences)
        self._told: dict[int, Started | Finished] = {}  # of each sequence, by its index
        self.metrics = RequestMetrics(submission.arrival_time)
        """The metrics so far; outputs get copies."""
        self.num_cached_tokens = 0
        self.kv_transfer_params: dict[str, Any] | None = None
        self.prompt_logprobs: list[Position | None] | None = None

    @property
    def is_finished(self) -> bool:
        return self._num_running == 0

    def finish_one(self) -> None:
        """Another of its sequences has ended."""
        self._num_running -= 1

    def note(self, index: int, told: Started | Finished) -> None:
        """Keep the metrics of a sequence so far, in place of earlier ones."""
        self._told[index] = told
        metrics, every = self.metrics, self._told.values()
        metrics.num_preemptions = sum(each.num_preemptions for each in every)
        waits: dict[str, float] = {}
        for each in every:
            for cause, seconds in each.waits.items():
                waits[cause] = waits.get(cause, 0.0) + seconds
        metrics.waits = waits
        metrics.events = sorted((e for each in every for e in each.events), key=itemgetter(1))

    def output(self, moved: Iterable[OutputSequence]) -> RequestOutput | None:
        """The output for the user after these sequences have moved; ``None``: nothing yet."""
        finished = self.is_finished
        if self.kind == "delta":
            completions = [sequence.delta() for sequence in moved]
        elif self.kind == "final" and not finished:
            return None
        else:
            completions = [sequence.output() for sequence in self.sequences]
        output = RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            completions,
            finished,
            self.prompt_logprobs,
            self.num_cached_tokens,
            copy(self.metrics),
            self.kv_transfer_params,
        )
        if self.kind == "delta":
            self.prompt_logprobs = None  # sent once
        return output


class Row(NamedTuple):
    """The request and sequence that a row of the core's columns belongs to."""

    request: RequestState
    sequence: OutputSequence


class OutputSequence:
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


def _reader(submission: Submission, tokenizer: Tokenizer | None) -> TextReader | None:
    if tokenizer is None or not submission.params.detokenize:
        return None
    return TextReader(tokenizer.backend, submission.prompt_token_ids, wish_of(submission.params))


def position_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> Position:
    """The chosen token first, then the most likely ones, best first; the chosen one only once."""
    ids, values = entry.token_ids, entry.logprobs
    texts = [None if tokenizer is None else tokenizer.token_text(i) for i in ids]
    position = {ids[0]: Logprob(values[0], entry.rank, texts[0])}
    for rank in range(1, len(ids)):
        position.setdefault(ids[rank], Logprob(values[rank], rank, texts[rank]))
    return position


def prompt_positions(
    entries: list[TokenLogprobs], num_prompt: int, tokenizer: Tokenizer | None
) -> list[Position | None]:
    """One entry per prompt token; ``None`` for the first, which nothing predicts, and unasked."""
    unknown: list[Position | None] = [None] * (num_prompt - len(entries))
    return unknown + [position_logprobs(entry, tokenizer) for entry in entries]
