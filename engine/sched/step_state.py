"""The state of a step while it is planned: its budgets, and the tokens granted so far."""

from __future__ import annotations

from collections.abc import Sequence
from sys import maxsize

from engine.sched.request import Request, Status
from engine.sched.roster import NO_ROWS, Cause, Roster, Rows


class Step:
    """The decisions of one step so far. Each request is offered tokens at most once per step."""

    decode_room = maxsize  # decodes that may still get tokens, see ``MicroBatches``

    def __init__(self, index: int, max_tokens: int, roster: Roster) -> None:
        self.index = index
        self.tokens_left = max_tokens
        self.max_seqs = roster.num_seats
        self.admission_open = True
        self.grants: list[tuple[Request, int]] = []
        self.new: list[Request] = []
        self.preempted: list[Request] = []
        self.num_prompts = 0  # grants to requests that start or are still in their prompts
        self.num_prompt_tokens = 0
        self.most_prompt_tokens: int | None = None  # see ``room_next_to_decodes``
        self.silent: set[int] = set()  # rows of unfinished prompts, for which no token is sampled
        self.plain_rows: Rows = NO_ROWS
        self.plain: list[int] = []  # rows granted through ``DecodeFastPath.granter``
        self.closed_by = ""  # why admission was closed
        self.decodes: Sequence[Request] = ()  # a token is reserved for each though prompts go first
        self.short: list[Request] = []  # running requests that got no token for lack of blocks
        self.expecting: list[Request] = []  # running requests that await something from outside
        self.refused: list[tuple[Request, str]] = []  # waiting requests refused individually, why
        self._roster = roster
        self._next = 0  # index in the queue: requests before it have been offered tokens

    @property
    def is_full(self) -> bool:
        return self.tokens_left <= 0

    @property
    def num_kept_tokens(self) -> int:
        """Number of tokens reserved for decodes that were not offered tokens yet."""
        if not self.decodes:
            return 0
        considered, index = self._roster.table.considered.at, self.index
        num_left = sum(considered[req.row] != index for req in self.decodes)
        return min(num_left, self.decode_room)

    @property
    def has_grants(self) -> bool:
        return bool(self.grants or self.plain) or self.plain_rows.size > 0

    @property
    def has_decodes(self) -> bool:
        """True if a decode got a token in this step, or if a token is reserved for one."""
        is_bulk = bool(self.plain or self.decodes) or self.plain_rows.size > 0
        return is_bulk or len(self.grants) > self.num_prompts

    @property
    def has_running(self) -> bool:
        """True if a request that ran before this step has been granted tokens."""
        is_bulk = bool(self.plain) or self.plain_rows.size > 0
        return is_bulk or len(self.grants) > len(self.new)

    @property
    def num_free_seats(self) -> int:
        """Number of waiting requests that can still start in this step."""
        free = self._roster.num_free_seats
        return min(free, max(0, self.max_seqs - (self._roster.num_seats - free)))

    def narrow(self, max_tokens: int | None, max_seqs: int | None = None) -> None:
        """Lower the limits of tokens and running requests; ``None`` keeps a limit."""
        if max_tokens is not None:
            self.tokens_left = min(self.tokens_left, int(max_tokens))
        if max_seqs is not None:
            self.max_seqs = min(self.max_seqs, int(max_seqs))

    def next_waiting(self) -> Request | None:
        """The best waiting request not offered tokens yet; ``None`` if admission is closed."""
        waiting = self._roster.waiting
        while self.admission_open and self._next < len(waiting):
            req = waiting[self._next]
            if req.considered != self.index:
                return req
            self._next += 1
        return None

    def offer(self, req: Request) -> bool:
        """Mark a request as offered tokens. Returns False if it was offered tokens or preempted in
        this step, is parked, or is waiting while admission is closed."""
        considered = req.table.considered.at
        if considered[req.row] == self.index:
            return False
        if req.status is not Status.RUNNING and not (self.admission_open and req.is_waiting):
            return False
        considered[req.row] = self.index
        return True

    def reopen(self, index: int, max_tokens: int) -> None:
        """Reset this state for step ``index``, with a budget of ``max_tokens`` tokens."""
        self.index, self.tokens_left, self._next = index, max_tokens, 0
        self.max_seqs = self._roster.num_seats
        self.admission_open, self.closed_by = True, ""
        self.preempted.clear()
        self.refused.clear()
        self.short.clear()
        self.expecting.clear()
        self.decodes = ()
        self.most_prompt_tokens = None

    def closing_cause(self) -> str:
        """Why no further waiting request was admitted in this step."""
        if self.closed_by:
            return self.closed_by
        if self.is_full:
            return Cause.TOKENS
        if len(self.refused) >= len(self._roster.waiting):  # all were refused individually
            return Cause.NEXT_STEP
        return Cause.POLICY if self.num_free_seats else Cause.SEATS

    def close(self, cause: str) -> None:
        """Admit no further waiting request in this step. ``cause``: the reason to report."""
        if self.admission_open:
            self.admission_open, self.closed_by = False, cause

    def skip(self, req: Request, cause: str) -> None:
        """Do not start this waiting request in this step, for the given cause."""
        self.refused.append((req, cause))

    def record(
        self, req: Request, num_tokens: int, *, is_new: bool, is_prompt: bool, samples: bool
    ) -> None:
        """Record that the request is granted ``num_tokens`` tokens. ``is_new``: it starts in this
        step; ``is_prompt``: it is still computing its prompt; ``samples``: a token is sampled for
        it."""
        self.tokens_left -= num_tokens
        self.grants.append((req, num_tokens))
        if is_prompt:
            self.num_prompts += 1
            self.num_prompt_tokens += num_tokens
        if is_new:
            self.new.append(req)
        if not samples:
            self.silent.add(req.row)


def num_draft_places(req: Request) -> int:
    """Number of positions of the request that are scheduled for draft tokens."""
    return max(0, req.num_computed - req.num_tokens - req.num_pending + 1)
