"""A request as its user sees it: one sequence, or n of them sampled side by side."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from operator import itemgetter
from typing import Any, NamedTuple

from engine.frontend.logprobs import Position
from engine.frontend.prompt import Submission
from engine.frontend.sequence import Sequence
from engine.messages.outputs import Finished, RequestMetrics, RequestOutput, Started
from engine.text.reader import TextReader, wish_of
from engine.text.tokenizer import Tokenizer


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
            Sequence(
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

    def output(self, moved: Iterable[Sequence]) -> RequestOutput | None:
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
    sequence: Sequence


def _reader(submission: Submission, tokenizer: Tokenizer | None) -> TextReader | None:
    if tokenizer is None or not submission.params.detokenize:
        return None
    return TextReader(tokenizer.backend, submission.prompt_token_ids, wish_of(submission.params))
