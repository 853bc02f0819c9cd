"""A step's outputs, as columns by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from engine.messages.outputs import CoreOutputs, Finished, FinishReason, Started
from engine.messages.step import StepResult
from engine.sched.request import Counts, Request
from engine.sched.roster import Roster, Rows

NOWHERE = -1  # index of a request that is not in the plan


class Members:
    """The requests behind the rows of a plan, and their constants. While no request starts or
    ends, plans share their rows, and this is made once for all of them."""

    def __init__(self, rows: Rows, roster: Roster) -> None:
        table = roster.table
        self.reqs = roster.requests(rows)
        self.ids = [req.request_id for req in self.reqs]
        self.tokens = [req.tokens for req in self.reqs]
        self._rows = rows
        self._told = table.told
        self._limits = table.limit.all[rows]
        self._stop_ids = table.stop_id.all[rows]
        self._may_stop = bool((self._stop_ids != -1).any())
        clients = table.client.all[rows]
        is_one = rows.size > 0 and (clients == clients[0]).all()
        self.only_client = int(clients[0]) if is_one else None
        self._have_started = False

    def take_started(self) -> list[int]:
        """Requests that get their first token from this seat now; called before each token."""
        if self._have_started:
            return []
        self._have_started = True
        indices: list[int] = (self._told.all[self._rows] == 0).nonzero()[0].tolist()
        self._told.all[self._rows] = 1
        return indices

    def may_have_ended(self, tokens: Counts, num_tokens: Counts) -> list[int]:
        """Requests that may end with this token, at so many tokens."""
        ended = num_tokens >= self._limits
        if self._may_stop:
            ended |= (self._stop_ids == tokens) | (self._stop_ids == -2)
        indices: list[int] = ended.nonzero()[0].tolist()
        return indices


class OutputColumns:
    """Collects a step's outputs and splits them by client."""

    def __init__(self, now: float, result: StepResult) -> None:
        self.now = now
        self.result = result
        self.reqs: list[Request] = []
        self._ids: list[str] = []
        self._only_client: int | None = None
        self._tokens: list[int] = []  # flat
        self._counts: list[int] | None = None  # of tokens by request; None: one each
        self._places: list[int] = []  # in the plan
        self._started: set[int] = set()
        self._finished: dict[int, Finished] = {}

    def add_members(
        self,
        members: Members,
        tokens: list[int],
        places: Iterable[int],
        started: Iterable[int],
    ) -> None:
        """One token for each of these; ``started`` are those with their first from this seat."""
        self.reqs, self._ids, self._tokens = members.reqs, members.ids, tokens
        self._only_client = members.only_client
        if self.result.logprobs or self.result.prompt_logprobs:
            self._places = list(places)
        self._started = set(started)

    def add(self, req: Request, tokens: list[int], place: int, *, is_first: bool) -> int:
        """Tokens of one request, at this place of the plan; its index here."""
        index = len(self.reqs)
        if len(tokens) != 1 and self._counts is None:
            self._counts = [1] * index
        if self._counts is not None:
            self._counts.append(len(tokens))
        self.reqs.append(req)
        self._ids.append(req.request_id)
        self._tokens += tokens
        self._places.append(place)
        if is_first:
            self._started.add(index)
        return index

    @property
    def has_ends(self) -> bool:
        return bool(self._finished)

    def finish(self, index: int, reason: FinishReason, stop_reason: int | None) -> None:
        """The request at this place of the columns has ended."""
        self._finished[index] = end_of(self.reqs[index], index, reason, stop_reason)

    def end(self, req: Request, reason: FinishReason, message: str) -> None:
        """The request has ended without a token."""
        # Members are shared with later steps: their lists are copied, not changed.
        self.reqs, self._ids, self._only_client = [*self.reqs], [*self._ids], None
        self._places = self._places or [NOWHERE] * len(self.reqs)
        index = self.add(req, [], NOWHERE, is_first=False)
        self._finished[index] = end_of(req, index, reason, message=message)

    def by_client(self) -> dict[int, CoreOutputs]:
        """One ``CoreOutputs`` for each client that has something in this step."""
        if not self.reqs:
            return {}
        if self._only_client is not None:
            return {self._only_client: self._columns(range(len(self.reqs)))}
        clients = [req.add.client_index for req in self.reqs]
        return {
            client: self._columns([i for i, other in enumerate(clients) if other == client])
            for client in dict.fromkeys(clients)
        }

    def _columns(self, picked: Sequence[int]) -> CoreOutputs:
        whole, counts = len(picked) == len(self.reqs), self._counts
        out = CoreOutputs(
            request_ids=self._ids if whole else [self._ids[i] for i in picked],
            token_ids=self._tokens if whole else self._tokens_of(picked),
            counts=counts if whole or counts is None else [counts[i] for i in picked],
            time=self.now,
        )
        result = self.result
        if not (self._started or self._finished or result.logprobs or result.prompt_logprobs):
            return out
        places = {i: index for index, i in enumerate(picked)} if not whole else None
        for i in self._with_details():
            if places is None:
                self._details(out, i, i)
            elif i in places:
                self._details(out, places[i], i)
        return out

    def _tokens_of(self, picked: Sequence[int]) -> list[int]:
        if self._counts is None:
            return [self._tokens[i] for i in picked]
        ends = list(accumulate(self._counts))
        return [
            token for i in picked for token in self._tokens[ends[i] - self._counts[i] : ends[i]]
        ]

    def _with_details(self) -> Iterable[int]:
        """Rows whose output is more than a token."""
        result = self.result
        if result.logprobs or result.prompt_logprobs:
            return range(len(self.reqs))
        return sorted(self._started | self._finished.keys())

    def _details(self, out: CoreOutputs, index: int, i: int) -> None:
        """Details that few rows have: first output, end, log-probabilities."""
        req, result = self.reqs[i], self.result
        at = self._places[i] if self._places else NOWHERE
        if i in self._started:
            out.started.append(start_of(req, index, self.now))
        if i in self._finished:
            finished = self._finished[i]
            finished.index = index
            out.finished.append(finished)
        if at in result.logprobs:
            out.logprobs[index] = result.logprobs[at]
        if at in result.prompt_logprobs:
            out.prompt_logprobs[index] = result.prompt_logprobs[at]


def start_of(req: Request, index: int, now: float) -> Started:
    """History of a running request; a copy, since it goes on changing."""
    history = req.history
    return Started(
        index,
        history.num_cached,
        history.scheduled_time or now,
        history.num_preempted,
        dict(history.waits),
        list(history.events),
    )


def end_of(
    req: Request,
    index: int,
    reason: FinishReason,
    stop_reason: int | None = None,
    message: str = "",
) -> Finished:
    """The end of a request, and what has happened to it."""
    history = req.history
    return Finished(
        index,
        reason,
        stop_reason,
        message,
        num_preemptions=history.num_preempted,
        waits=history.waits,
        events=history.events,
        kv_transfer_params=history.kv_transfer_params,
    )
