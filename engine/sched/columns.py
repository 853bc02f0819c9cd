"""A step's outputs, as columns by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.messages.outputs import CoreOutputs, Finished, FinishReason, Started
from engine.messages.step import StepResult
from engine.sched.request import Request


class OutputColumns:
    """Collects a step's outputs and splits them by client."""

    def __init__(self, now: float, result: StepResult) -> None:
        self.now = now
        self._result = result
        self._reqs: list[Request] = []
        self._tokens: list[int] = []
        self._counts: list[int] | None = None
        self._plan_index: list[int] = []
        self._started: set[int] = set()
        self._finished: dict[int, Finished] = {}

    def add(
        self,
        reqs: list[Request],
        tokens: NDArray[np.int32],
        plan_index: NDArray[np.intp],
        started: NDArray[np.intp],
    ) -> None:
        """One new token for each of these requests; ``started`` are those with their first."""
        self._reqs = reqs
        self._tokens = tokens.tolist()
        self._plan_index = plan_index.tolist()
        self._started = set(started.tolist())

    def finish(self, index: int, reason: FinishReason, stop_reason: int | None) -> None:
        """The request at this place of the columns has ended."""
        self._finished[index] = Finished(
            index, reason, stop_reason, num_preemptions=self._reqs[index].num_preempted
        )

    def fail(self, req: Request, message: str) -> None:
        """The request has ended with an error and without a token."""
        if self._counts is None:
            self._counts = [1] * len(self._reqs)
        index = len(self._reqs)
        self._reqs.append(req)
        self._counts.append(0)
        self._plan_index.append(-1)
        self._finished[index] = Finished(
            index, "error", message=message, num_preemptions=req.num_preempted
        )

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
        whole = len(picked) == len(self._reqs)
        counts = self._counts
        out = CoreOutputs(
            request_ids=[self._reqs[i].add.request_id for i in picked],
            token_ids=self._tokens
            if whole
            else [self._tokens[i] for i in picked if i < len(self._tokens)],
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

    def _with_details(self) -> Iterable[int]:
        """Rows with more to say than a token."""
        result = self._result
        if result.logprobs or result.prompt_logprobs:
            return range(len(self._reqs))
        return sorted(self._started | self._finished.keys())

    def _details(self, out: CoreOutputs, index: int, i: int) -> None:
        """What only few rows have: first output, end, log-probabilities."""
        req, at, result = self._reqs[i], self._plan_index[i], self._result
        if i in self._started:
            out.started.append(Started(index, req.num_cached, req.scheduled_time or self.now))
        if i in self._finished:
            finished = self._finished[i]
            finished.index = index
            out.finished.append(finished)
        if at in result.logprobs:
            out.logprobs[index] = result.logprobs[at]
        if at in result.prompt_logprobs:
            out.prompt_logprobs[index] = result.prompt_logprobs[at]
