"""Step: one step while it is planned. Its budgets, and what was granted so far."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sched.request import Request, Status
from engine.sched.roster import NO_ROWS, Cause, Roster, Rows


class Step:
    """Decisions so far. A request is offered once; it then counts as considered, granted or not."""

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
        self.most_prompt_tokens: int | None = None  # see ``room_beside_decodes``
        self.silent: set[int] = set()  # rows of prompts that are not complete: no draw
        self.plain_rows: Rows = NO_ROWS
        self.plain: list[int] = []  # rows granted by ``DecodeFastPath.granter``
        self.closed_by = ""  # why admission was closed
        self.decodes: Sequence[Request] = ()  # get a token although prompts go first
        self.short: list[Request] = []  # running ones that got nothing for lack of blocks
        self.refused: list[tuple[Request, str]] = []  # waiting ones refused by themselves
        self._roster = roster
        self._next = 0  # index in the queue from which to look for one not offered yet

    @property
    def is_full(self) -> bool:
        return self.tokens_left <= 0

    @property
    def num_kept_tokens(self) -> int:
        """Tokens that a prompt leaves to those of ``decodes`` not offered theirs yet."""
        if not self.decodes:
            return 0
        considered, index = self._roster.table.considered.at, self.index
        return sum(considered[req.row] != index for req in self.decodes)

    @property
    def has_grants(self) -> bool:
        return bool(self.grants or self.plain) or self.plain_rows.size > 0

    @property
    def has_decodes(self) -> bool:
        """Does a request get its next token in this step, or is one kept for it?"""
        is_bulk = bool(self.plain or self.decodes) or self.plain_rows.size > 0
        return is_bulk or len(self.grants) > self.num_prompts

    @property
    def has_running(self) -> bool:
        """Was a request granted tokens that ran before this step?"""
        is_bulk = bool(self.plain) or self.plain_rows.size > 0
        return is_bulk or len(self.grants) > len(self.new)

    @property
    def num_free_seats(self) -> int:
        """Seats that waiting requests may take in this step."""
        free = self._roster.num_free_seats
        return min(free, max(0, self.max_seqs - (self._roster.num_seats - free)))

    def narrow(self, max_tokens: int | None, max_seqs: int | None = None) -> None:
        """Grant no more tokens and seats than this; ``None`` is no bound."""
        if max_tokens is not None:
            self.tokens_left = min(self.tokens_left, int(max_tokens))
        if max_seqs is not None:
            self.max_seqs = min(self.max_seqs, int(max_seqs))

    def next_waiting(self) -> Request | None:
        """The best waiting request that was not offered in this step, while admission is open."""
        waiting = self._roster.waiting
        while self.admission_open and self._next < len(waiting):
            req = waiting[self._next]
            if req.considered != self.index:
                return req
            self._next += 1
        return None

    def offer(self, req: Request) -> bool:
        """Mark as considered. False if it was before, is parked, or waits while admission is
        closed."""
        considered = req.table.considered.at
        if considered[req.row] == self.index:
            return False
        if req.status is not Status.RUNNING and not (self.admission_open and req.is_waiting):
            return False
        considered[req.row] = self.index
        return True

    def reopen(self, index: int, max_tokens: int) -> None:
        """Begin again under a new index: every request may be offered tokens once more."""
        self.index, self.tokens_left, self._next = index, max_tokens, 0
        self.max_seqs = self._roster.num_seats
        self.admission_open, self.closed_by = True, ""
        self.preempted.clear()
        self.refused.clear()
        self.short.clear()
        self.decodes = ()
        self.most_prompt_tokens = None

    def closing_cause(self) -> str:
        """Why the requests that still wait were not admitted."""
        if self.closed_by:
            return self.closed_by
        if self.is_full:
            return Cause.TOKENS
        if len(self.refused) >= len(self._roster.waiting):  # each for a reason of its own
            return Cause.NEXT_STEP
        return Cause.POLICY if self.num_free_seats else Cause.SEATS

    def close(self, cause: str) -> None:
        """Admit no further request in this step."""
        if self.admission_open:
            self.admission_open, self.closed_by = False, cause

    def skip(self, req: Request, cause: str) -> None:
        """Pass over this waiting request alone."""
        self.refused.append((req, cause))

    def record(
        self, req: Request, num_tokens: int, *, is_new: bool, is_prompt: bool, samples: bool
    ) -> None:
        """The request computes this many tokens."""
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
    """Tokens that the request was granted after its last one that is known or being sampled: they
    are computed for drafts."""
    return max(0, req.num_computed - req.num_tokens - req.num_pending + 1)
