"""A step's outputs, as columns by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine.messages.outputs import CoreOutputs, Finished, FinishReason, Started
from engine.messages.step import StepResult
from engine.sched.request import Request


class OutputColumns:
    """Collects a step's outputs and splits them by client."""

    def __init__(self, now: float, result: StepResult) -> None:
        self.now = now
        self.result = result
        self.tokens: list[int] = []  # flat
        self._counts: list[int] | None = None  # of tokens by request; None: one each
        self._reqs: list[Request] = []
        self._plan_index: list[int] = []
        self._started: set[int] = set()
        self._finished: dict[int, Finished] = {}

    def add(
        self, reqs: list[Request], plan_index: NDArray[np.intp], started: NDArray[np.intp]
    ) -> None:
        """These requests have new tokens; ``started`` are those with their first."""
        self._reqs = reqs
        self._plan_index = plan_index.tolist()
        self._started = set(started.tolist())

    def add_tokens(self, tokens: list[int]) -> None:
        """The tokens of the next request, if not all of them have one."""
        self._counts = self._counts or []
        self._counts.append(len(tokens))
        self.tokens += tokens

    def finish(self, index: int, reason: FinishReason, stop_reason: int | None) -> None:
        """The request at this place of the columns has ended."""
        self._finished[index] = _finished(self._reqs[index], index, reason, stop_reason)

    def end(self, req: Request, reason: FinishReason, message: str) -> None:
        """The request has ended without a token."""
        if self._counts is None:
            self._counts = [1] * len(self._reqs)
        index = len(self._reqs)
        self._reqs.append(req)
        self._counts.append(0)
        self._plan_index.append(-1)
        self._finished[index] = _finished(req, index, reason, None, message)

    def by_client(self) -> dict[int, CoreOutputs]:
        """One ``CoreOutputs`` for each client that has something in this step."""
        if not self._reqs:
            return {}
        clients = [req.add.client_index for req in self._reqs]
        if clients.count(clients[0]) == len(clients):
            return {clients[0]: self._columns(range(len(self._reqs)))}
        return {
            client: self._columns([i for i, other in enumerate(clients) if other == client])
            for client in dict.fromkeys(clients)
        }

    def _columns(self, picked: Sequence[int]) -> CoreOutputs:
        whole, counts = len(picked) == len(self._reqs), self._counts
        out = CoreOutputs(
            request_ids=[self._reqs[i].add.request_id for i in picked],
            token_ids=self.tokens if whole else self._tokens_of(picked),
            counts=counts if whole or counts is None else [counts[i] for i in picked],
            time=self.now,
        )
        places = {i: index for index, i in enumerate(picked)} if not whole else None
        for i in self._with_details():
            if places is None:
                self._details(out, i, i)
            elif i in places:
                self._details(out, places[i], i)
        return out

    def _tokens_of(self, picked: Sequence[int]) -> list[int]:
        if self._counts is None:
            return [self.tokens[i] for i in picked]
        ends = list(accumulate(self._counts))
        return [token for i in picked for token in self.tokens[ends[i] - self._counts[i] : ends[i]]]

    def _with_details(self) -> Iterable[int]:
        """Rows with more to say than a token."""
        result = self.result
        if result.logprobs or result.prompt_logprobs:
            return range(len(self._reqs))
        return sorted(self._started | self._finished.keys())

    def _details(self, out: CoreOutputs, index: int, i: int) -> None:
        """What only few rows have: first output, end, log-probabilities."""
        req, at, result = self._reqs[i], self._plan_index[i], self.result
        if i in self._started:
            out.started.append(
                Started(index, req.story.num_cached, req.story.scheduled_time or self.now)
            )
        if i in self._finished:
            finished = self._finished[i]
            finished.index = index
            out.finished.append(finished)
        if at in result.logprobs:
            out.logprobs[index] = result.logprobs[at]
        if at in result.prompt_logprobs:
            out.prompt_logprobs[index] = result.prompt_logprobs[at]


def _finished(
    req: Request,
    index: int,
    reason: FinishReason,
    stop_reason: int | None,
    message: str = "",
) -> Finished:
    story = req.story
    return Finished(
        index,
        reason,
        stop_reason,
        message,
        num_preemptions=story.num_preempted,
        waits=story.waits,
        events=story.events,
    )
