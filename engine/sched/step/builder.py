"""One step while it is being planned: budgets, grants and, at the end, the plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.messages.step import EMPTY, PADDING, DraftPart, NewSeq, StepPlan
from engine.sched.request import WATCHED, Request, Status
from engine.sched.roster import NO_ROWS, Cause, Roster, Rows

ONES = np.ones(1024, dtype=np.int32)
ONES.flags.writeable = False


def ones(count: int) -> NDArray[np.int32]:
    """A read-only array of ones, cached: it is the token counts of most steps."""
    return ONES[:count] if count <= len(ONES) else np.ones(count, dtype=np.int32)


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
        self.num_prompts = 0  # of the grants: those that start, or go on behind their first tokens
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


def canonical_rows(step: Step, roster: Roster) -> tuple[Rows, NDArray[np.int32], bool]:
    """Plain rows by number, then the others in order of grant; their token counts; and whether
    these are all that run, with one token each.

    Plain is a row of one token that is not new and not watched, however it was granted; so planning
    in bulk and one by one give the same plan.
    """
    seated = roster.running_rows
    if not step.grants:
        count = len(step.plain_rows)
        return step.plain_rows, ones(count), 0 < count == len(seated.list)
    flags, new = roster.table.flags.at, {req.row for req in step.new}
    plain, others, sizes = step.plain_rows.tolist(), [], []
    for req, count in step.grants:
        if count == 1 and req.row not in new and not flags[req.row] & WATCHED:
            plain.append(req.row)
        else:
            others.append(req.row)
            sizes.append(count)
    if not others and len(plain) == len(seated.list):
        return seated.columns.rows, ones(len(plain)), True
    plain.sort()
    counts = np.ones(len(plain) + len(others), dtype=np.int32)
    counts[len(plain) :] = sizes
    return np.array(plain + others, dtype=np.intp), counts, False


def seal(step: Step, roster: Roster, kv: KVManager) -> StepPlan:
    """The plan of a step, with all changes since the last one that the worker needs.

    Counts are advanced already, so a row's first token is at ``num_computed - count``.
    """
    table, seated = roster.table, roster.running_rows
    rows, counts, is_whole = canonical_rows(step, roster)
    samples = ones(len(rows))
    if step.silent:
        silent = step.silent
        samples = np.array([row not in silent for row in rows.tolist()], dtype=np.int32)
    if is_whole:
        seated.note_whole(step.index)
        slots, generations = seated.columns.slots, seated.columns.generations
    else:
        slots, generations = table.slot.all[rows], table.generation.all[rows]
    assert not step.preempted or (slots >= 0).all(), "preempted in the step that grants it tokens"
    grown = kv.drain()
    block_slots = block_indices = block_ids = EMPTY
    if grown.rows:
        block_slots = table.slot.all[np.array(grown.rows, dtype=np.intp)]
        block_indices = np.array(grown.indices, dtype=np.int32)
        block_ids = np.array(grown.blocks, dtype=np.int32)
    freed, roster.freed_slots = roster.freed_slots, []
    return StepPlan(
        step=step.index,
        rows=rows,
        slots=slots,
        generations=generations,
        starts=table.num_computed.all[rows] - counts,
        counts=counts,
        samples=samples,
        new=[new_seq(req) for req in step.new],
        block_slots=block_slots,
        block_indices=block_indices,
        block_ids=block_ids,
        freed_slots=freed,
        num_tokens=int(counts.sum()) if step.grants else len(rows),
        block_groups=np.array(grown.groups, dtype=np.int32) if grown.groups else None,
    )


def pad_drafts(plan: StepPlan, step: Step) -> None:
    """Fill the places behind a row's known tokens for which no feature has drafts with ``PADDING``,
    so that the worker verifies and rejects them. Drafts for which there is no place are left out.
    """
    slots = {
        req.row: behind
        for req, count in step.grants
        if count > 1 and (behind := req.num_computed - req.num_tokens - req.num_pending + 1) > 0
    }
    if not slots:
        plan.drafts = None
        return
    counts = [slots.get(row, 0) for row in plan.rows.tolist()]
    known: list[list[int]] = [[]] * len(counts)
    if plan.drafts is not None and _fits(plan.drafts, len(counts)):
        if plan.drafts.counts.tolist() == counts:
            return
        known = plan.drafts.by_row()
    filled = [
        (drafts + [PADDING] * count)[:count] for drafts, count in zip(known, counts, strict=True)
    ]
    tokens = np.array([token for drafts in filled for token in drafts], dtype=np.int32)
    plan.drafts = DraftPart(np.array(counts, dtype=np.int32), tokens)


def _fits(drafts: DraftPart, num_rows: int) -> bool:
    """A plug-in resource may return drafts for other rows, or fewer tokens than its counts."""
    return len(drafts.counts) == num_rows and len(drafts.tokens) == int(drafts.counts.sum())


def new_seq(req: Request) -> NewSeq:
    """What the worker must know of a request that takes a seat."""
    return NewSeq(
        request_id=req.request_id,
        slot=req.slot,
        token_ids=req.tokens.tolist() if req.num_output else req.add.prompt_token_ids,
        num_prompt=req.num_prompt,
        params=req.params,
        seed=req.add.seed,
        stop_token_ids=req.stop_ids,
        bad_words_ids=req.add.bad_words_ids,
    )


def prefill_cap(config: SchedulerConfig, roster: Roster) -> int:
    """Cap on one prompt's tokens in this step: none for a request that is alone."""
    threshold = config.long_prefill_token_threshold
    if not threshold or not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    competing = len(roster.running) + len(roster.waiting)
    if competing <= 1:
        return config.max_num_batched_tokens
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, config.max_num_batched_tokens // competing)
    return threshold


def room_beside_decodes(step: Step, config: SchedulerConfig, roster: Roster) -> int:
    """Tokens that prompts may still have in this step for the sake of its decodes.

    Whoever decodes waits for the whole step, and a prompt of moderate length takes it several times
    as long as its decodes alone. So beside decodes prompts go in small pieces while few tokens
    wait: some steps later they are done. What waits beyond that is computed at once, since larger
    steps end a long queue sooner for everybody. Tokens that a cache holds count as any that wait.
    """
    size = config.max_mixed_prefill_tokens
    if not (size and step.has_decodes):
        return config.max_num_batched_tokens
    if step.most_prompt_tokens is None:
        begun = sum(req.num_uncomputed for req in roster.running_prompts())
        waiting = roster.queued_tokens - roster.parked_tokens + begun + step.num_prompt_tokens
        spread = config.num_mixed_prefill_steps * size
        step.most_prompt_tokens = max(size, waiting - spread)
    return step.most_prompt_tokens - step.num_prompt_tokens
