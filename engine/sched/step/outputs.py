"""The outputs of a step: columns over its requests, split by client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from engine.messages.pooling import PooledColumns
from engine.messages.requests import CoreOutputs, Finished, FinishReason
from engine.messages.step import StepResult
from engine.messages.vectors import Vectors
from engine.sched.request import End, Request, end_of, start_of
from engine.sched.roster import Roster, Rows
from engine.sched.table import Counts

NOWHERE = -1  # index of a request that is not in the plan


class Members:
    """The requests in the rows of a plan, with their constant fields as arrays. An object can be
    reused for later plans with the same rows."""

    def __init__(self, rows: Rows, roster: Roster) -> None:
        table = roster.table
        self.reqs = roster.requests(rows)
        self.ids = [req.request_id for req in self.reqs]
        self.tokens = [req.tokens for req in self.reqs]
        self._rows = rows
        self._has_output = table.has_output
        self._limits = table.limit.all[rows]
        self._stop_ids = table.stop_id.all[rows]
        self._may_stop = bool((self._stop_ids != -1).any())
        have_several = self._stop_ids == -2
        self._have_several = have_several if have_several.any() else None
        clients = table.client.all[rows]
        is_one = rows.size > 0 and (clients == clients[0]).all()
        self.only_client = int(clients[0]) if is_one else None
        self._have_started = False

    def take_started(self) -> list[int]:
        """Indices of requests whose next token is their first since they started to run. Only the
        first call returns them, later calls return []."""
        if self._have_started:
            return []
        self._have_started = True
        indices: list[int] = (self._has_output.all[self._rows] == 0).nonzero()[0].tolist()
        self._has_output.all[self._rows] = 1
        return indices

    def may_have_ended(self, tokens: Counts, num_tokens: Counts) -> list[int]:
        """Indices of requests that may end with their new token. ``tokens``: the new token of each
        request; ``num_tokens``: the length of each request with it."""
        ended = num_tokens >= self._limits
        if self._may_stop:
            ended |= self._stop_ids == tokens
        if self._have_several is not None:
            ended |= self._have_several
        indices: list[int] = ended.nonzero()[0].tolist()
        return indices


class OutputColumns:
    """Collects the outputs of a step and splits them by client."""

    def __init__(self, now: float, result: StepResult) -> None:
        self.now = now
        self.result = result
        self.reqs: list[Request] = []
        self._ids: list[str] = []
        self._only_client: int | None = None
        self._are_own = False
        self._tokens: list[int] = []  # of all requests, concatenated
        self._counts: list[int] | None = None  # tokens per request; None: one each
        self._places: list[int] = []  # index of each request in the plan
        self._started: set[int] = set()
        self._finished: dict[int, Finished] = {}
        self._pooled: dict[int, tuple[Vectors, int]] = {}  # values, numbers in a vector

    def add_members(
        self,
        members: Members,
        tokens: list[int],
        places: Iterable[int],
        started: Iterable[int],
    ) -> None:
        """Add one token for each member. ``places``: the members' indices in the plan; ``started``:
        indices of members whose token is the first since they started to run."""
        self.reqs, self._ids, self._tokens = members.reqs, members.ids, tokens
        self._only_client = members.only_client
        if self.result.logprobs or self.result.prompt_logprobs:
            self._places = list(places)
        self._started = set(started)

    def add(self, req: Request, tokens: list[int], place: int, *, is_first: bool) -> int:
        """Add a request's new tokens to these outputs; returns the request's index in the outputs.
        ``place``: its index in the plan; ``is_first``: it had no output token before."""
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
        """Set the finish reason of the request at this index."""
        self._finished[index] = end_of(self.reqs[index], index, reason, stop_reason)

    def end(self, end: End) -> None:
        """Add a request that has ended without a token."""
        self._own_lists()
        index = self.add(end.req, [], NOWHERE, is_first=False)
        self._finished[index] = end_of(end.req, index, end.reason, end=end)

    def add_pooled(self, req: Request, place: int, values: Vectors, width: int) -> int:
        """Add the result of a pooled request, in vectors of ``width`` numbers. Returns the
        request's index in the outputs; ``place``: its index in the plan."""
        self._own_lists()
        index = self.add(req, [], place, is_first=True)
        self._pooled[index] = values, width
        return index

    def _own_lists(self) -> None:
        """Copy the lists that ``Members`` shares with later steps, so that they can grow."""
        if not self._are_own:
            self.reqs, self._ids, self._only_client = [*self.reqs], [*self._ids], None
            self._places = self._places or [NOWHERE] * len(self.reqs)
            self._are_own = True

    def by_client(self) -> dict[int, CoreOutputs]:
        """One ``CoreOutputs`` for each client that has outputs in this step."""
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
        if self._pooled:
            out.pooled = self._pooled_of(picked)
        if not (self._started or self._finished or result.logprobs or result.prompt_logprobs):
            return out
        places = {i: index for index, i in enumerate(picked)} if not whole else None
        for i in self._with_details():
            if places is None:
                self._details(out, i, i)
            elif i in places:
                self._details(out, places[i], i)
        return out

    def _pooled_of(self, picked: Sequence[int]) -> PooledColumns | None:
        rows = [place for place, index in enumerate(picked) if index in self._pooled]
        if not rows:
            return None
        results = [self._pooled[picked[row]] for row in rows]
        values = b"".join(each.astype("<f4", copy=False).tobytes() for each, _ in results)
        sizes, widths = [len(each) for each, _ in results], [width for _, width in results]
        return PooledColumns(rows, sizes, widths, values)

    def _tokens_of(self, picked: Sequence[int]) -> list[int]:
        if self._counts is None:
            return [self._tokens[i] for i in picked]
        ends = list(accumulate(self._counts))
        return [
            token for i in picked for token in self._tokens[ends[i] - self._counts[i] : ends[i]]
        ]

    def _with_details(self) -> Iterable[int]:
        """Indices of the requests that may have a start, an end or log-probabilities to return."""
        result = self.result
        if result.logprobs or result.prompt_logprobs:
            return range(len(self.reqs))
        return sorted(self._started | self._finished.keys())

    def _details(self, out: CoreOutputs, index: int, i: int) -> None:
        """Add the start or end of a request and its log-probabilities to ``out``, the outputs of
        its client. ``i``: index of the request in this object; ``index``: its index in ``out``."""
        req, result = self.reqs[i], self.result
        at = self._places[i] if self._places else NOWHERE
        if i in self._started:
            out.started.append(start_of(req, index, self.now))
        if i in self._finished:
            finished = self._finished[i]
            finished.index = index
            out.finished.append(finished)
        if at in result.logprobs:
            num = 1 if self._counts is None else self._counts[i]
            out.logprobs[index] = result.logprobs[at][:num]  # without drafts after a stop token
        if at in result.prompt_logprobs:
            out.prompt_logprobs[index] = result.prompt_logprobs[at]
