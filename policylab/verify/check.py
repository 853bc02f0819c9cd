"""Checks of single plans and of the scheduler's state.

Invariants are numbered as in ``invariants.py``."""

from __future__ import annotations

import numpy as np

from engine.kv.retention import ShelvedPool
from engine.messages.step import StepPlan
from engine.sched.interface import PauseState
from engine.sched.plugins.hooks import SHAPING
from engine.sched.policy import as_columns
from engine.sched.request import Request, Status
from engine.sched.roster import by_rank
from engine.sched.scheduler import Scheduler
from engine.sched.step.builder import prefill_cap

# A policy with one of these hooks may leave resources unused.
FRUGAL_HOOKS = (
    "limits",
    "evict",
    "order",
    "next_waiting",
    "admit",
    "chunk",
    "victim",
    "outranks",
    "takes_blocks",
)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that a plan keeps the token budget and the number of seats, cuts no prompt that must be
    computed whole (invariant 5), and that no KV slot has two writers (invariant 3)."""
    config, table, kv = scheduler.config, scheduler.roster.table, scheduler.kv
    rows, counts = plan.rows.tolist(), plan.counts.tolist()
    assert plan.num_tokens == sum(counts) <= config.max_num_batched_tokens, "token budget"
    assert len(rows) <= config.max_num_seqs, "seats"
    assert all(count > 0 for count in counts), "a scheduled row has no tokens"
    assert len(set(rows)) == len(rows), "a row is scheduled twice"
    assert len(set(plan.slots.tolist())) == len(rows), "two rows share a slot"
    upto = plan.starts + plan.counts
    assert (upto <= kv.num_held[plan.rows] * kv.block_size).all(), "computes without blocks"
    assert (upto < table.limit.all[plan.rows]).all(), "computes KV that no token will read"
    assert (plan.generations == table.generation.all[plan.rows]).all(), "names an old request"
    cuts = {"encoder", "pictures", "moods"} & {each.name for each in scheduler.resources.members}
    if not (config.enable_chunked_prefill or cuts):  # these resources may cut it
        assert (upto >= table.num_tokens.all[plan.rows]).all(), "cuts a prompt"
    if plan.drafts is not None:
        assert plan.drafts.counts.any(), "the plan has a draft part without drafts"
        assert (plan.drafts.counts < plan.counts).all(), "a draft takes the place of a known token"
    written: set[int] = set()
    for row, start, end in zip(rows, plan.starts.tolist(), upto.tolist(), strict=True):
        req = scheduler.roster.by_row[row]
        assert req is not None and req.status is Status.RUNNING, f"{req} is scheduled"
        first, last = start // kv.block_size, (end - 1) // kv.block_size
        for block in kv.held(req)[first : last + 1]:
            assert block not in written, f"two rows write block {block}"
            written.add(block)
            # A published block may be shared within this step: one writer, and readers of the same
            # prefix.
            alone = kv.pool.num_refs[block] == 1 or kv.cache.hash_of(block) is not None
            assert alone, f"{req} writes block {block}, which others hold"


def check_snapshots(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check the snapshots of states in a plan (invariant 27): a request that starts after a prefix
    hit loads one, no other does, and those that are saved lie in blocks of their own, which no
    request holds."""
    states, part = scheduler.kv.states, plan.snapshots
    assert states is not None or part is None, "the plan has snapshots, the model has no states"
    if states is None:
        return
    starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
    hits = sorted(new.slot for new in plan.new if starts[new.slot] > 0)
    loads = [] if part is None else sorted(part.load_slots.tolist())
    assert loads == hits, f"slots {hits} start after a prefix hit, slots {loads} load a snapshot"
    if part is None:
        return
    blocks, refs = part.save_blocks.tolist(), scheduler.kv.pool.num_refs
    assert len(set(blocks)) == len(blocks), "two snapshots share a block"
    assert not any(refs[block] for block in blocks), "a snapshot is saved in a block that is held"
    assert len(blocks) == len(part.save_slots) * part.num_blocks, "blocks of saved snapshots"
    assert len(part.load_blocks) == len(loads) * part.num_blocks, "blocks of loaded snapshots"


def check_state(scheduler: Scheduler, *, num_drafts: int = 0) -> None:
    """Check blocks, reference counts, queues, ranks, seats and token counts.

    ``num_drafts``: the largest number of draft tokens of a request, which add to its computed
    tokens and blocks."""
    check_blocks(scheduler)
    check_kept(scheduler)
    check_members(scheduler)
    check_ranks(scheduler)
    check_seats(scheduler)
    check_counts(scheduler, num_drafts)


def check_blocks(scheduler: Scheduler) -> None:
    """Check that each KV block is either free or held, and that its reference count is the number
    of block tables and loads that use it (invariants 1 and 2). Also check the numbers
    of blocks in use by group."""
    kv, roster = scheduler.kv, scheduler.roster
    pool = kv.pool
    refs = [0] * pool.num_blocks
    used: list[set[int]] = [set() for _ in kv.groups]
    for req in roster.by_id.values():
        for group in range(kv.num_groups):
            blocks = [block for block in kv.held(req, group) if block]
            assert len(set(blocks)) == len(blocks), f"{req} holds a block twice"
            for block in blocks:
                refs[block] += 1
            used[group].update(blocks)
    for promotion in kv.promotions:
        for block in (*promotion.blocks, *promotion.all_held):
            refs[block] += 1
        for group, held in enumerate(promotion.held):
            used[group].update(held)
    if kv.num_groups == 1:
        used[0] = {block for block, num in enumerate(refs) if num}
    assert kv.num_used == list(map(len, used)), "num_used differs from the tables"
    assert refs == pool.num_refs, "reference counts differ from the tables"
    free = pool.free_order()
    assert len(free) == pool.num_free, "num_free differs from the length of the free list"
    assert sorted(free) == [b for b in range(1, pool.num_blocks) if not refs[b]], (
        "free blocks are missing"
    )


def check_kept(scheduler: Scheduler) -> None:
    """Check that free blocks with content are taken by level, and that no more are pinned than
    allowed (invariant 35)."""
    pool = scheduler.kv.pool
    if not isinstance(pool, ShelvedPool):
        return
    order, hashes = pool.free_order(), scheduler.kv.cache.hashes
    num_blank = next((n for n, block in enumerate(order) if hashes[block] is not None), len(order))
    levels = [pool.level_of(block) for block in order[num_blank:]]
    assert levels == sorted(levels), "blocks are not taken by level"
    num_pinned = sum(pool.level_of(block)[0] for block in order)  # content may be withdrawn
    assert num_pinned == pool.num_pinned <= pool.most_pinned, (
        f"{pool.num_pinned} blocks are pinned, {pool.most_pinned} may be"
    )


def check_members(scheduler: Scheduler) -> None:
    """Check that each live request is in exactly one queue (invariant 6), and that only running
    requests hold KV blocks (invariant 4)."""
    kv, roster = scheduler.kv, scheduler.roster
    running, waiting, parked = roster.running, roster.waiting, roster.parked
    members = [*running, *waiting, *parked.values()]
    assert len(members) == len(roster.by_id), "a request is in no queue, or in two"
    assert set(members) == set(roster.by_id.values()), "a member is unknown"
    _check_status(running, Status.RUNNING)
    _check_status(waiting, Status.WAITING)
    _check_status(parked.values(), Status.PARKED)
    for name, req in roster.by_id.items():
        assert req.request_id == name and roster.by_row[req.row] is req, (
            f"{req}: by_id or by_row is wrong"
        )
        num_blocks = len(kv.held(req))
        assert int(kv.num_held[req.row]) == num_blocks, f"{req}: num_held differs from its table"
        assert req.status is Status.RUNNING or not num_blocks, f"{req} holds blocks"
    queued = sum(req.num_prompt for req in members[len(running) :])
    assert roster.queued_tokens == queued, "queued_tokens differs from the queue"
    num_parked = sum(req.num_prompt for req in roster.parked.values())
    assert roster.parked_tokens == num_parked, "parked_tokens differs from the parked requests"
    for queue in (running, waiting):
        ranks = [(*req.rank, req.arrival) for req in queue]
        assert ranks == sorted(ranks), "a queue is out of order"


def check_ranks(scheduler: Scheduler) -> None:
    """Check that the policy's ``rank`` and ``ranks`` agree, if it has both (invariant 25)."""
    guard, view = scheduler.guard, scheduler.view
    if not guard.writes_both or guard.faults.num_faults:  # faults are reported by themselves
        return
    for queue in (scheduler.roster.running, scheduler.roster.waiting):
        columns = as_columns(guard.inner.ranks(queue, view)) if queue else None
        for req, *rank in zip(queue, *(column.tolist() for column in columns or ()), strict=False):
            alone = guard.inner.rank(req, view)
            is_same = alone in (tuple(rank), (*rank, req.arrival))
            assert is_same or not rank, f"{req}: rank returns {alone}, ranks returns {tuple(rank)}"


def _check_status(reqs: object, status: Status) -> None:
    for req in reqs:  # type: ignore[attr-defined]
        assert req.status is status, f"{req} is in the queue of status {status.value}"


def check_seats(scheduler: Scheduler) -> None:
    """Check that each seat is free or taken by one running request (invariant 5)."""
    roster = scheduler.roster
    taken = [req.slot for req in roster.running]
    seats = sorted([*taken, *roster._free_slots])
    assert seats == list(range(scheduler.config.max_num_seqs)), "seats are lost or shared"
    for req in roster.waiting:
        assert req.slot == -1, f"{req} has a seat"


def check_counts(scheduler: Scheduler, num_drafts: int = 0) -> None:
    """Check that each request's known, pending and computed tokens and its number of KV blocks are
    consistent (invariant 4)."""
    table, kv, size = scheduler.roster.table, scheduler.kv, scheduler.kv.block_size
    known, pending, computed = table.num_tokens.at, table.num_pending.at, table.num_computed.at
    for req in scheduler.roster.by_id.values():
        row = req.row
        assert known[row] == len(req.tokens) <= table.limit.at[row], f"{req}: token count"
        assert 0 <= computed[row] <= known[row] + pending[row] + num_drafts, f"{req}: computed"
        assert 0 <= pending[row] <= table.in_flight.at[row], f"{req}: pending"
        assert table.alive.at[row] == 1, f"{req} is not alive"
        first, last = req.first_token_time, req.last_token_time
        if req.num_output:
            # The times are not compared: the clock may have jumped back.
            assert first is not None and last is not None, f"{req}: token times"
        else:
            assert first is None and last is None, f"{req}: token times"
        if req.status is Status.RUNNING:
            held = len(kv.held(req))
            most = -(-(computed[row] + num_drafts) // size)
            assert -(-computed[row] // size) <= held <= most, f"{req} holds {held} blocks"


def check_empty(scheduler: Scheduler) -> None:
    """Check that no block, table row or timer is in use without requests (invariant 13)."""
    check_state(scheduler)
    roster = scheduler.roster
    assert not roster.by_id, f"unfinished: {list(roster.by_id)}"
    assert scheduler.num_in_flight == 0, "steps are in flight"
    assert scheduler.kv.pool.num_free == scheduler.kv.num_usable, "blocks are lost"
    assert not np.any(roster.table.alive.all), "a row is alive"
    assert all(req is None for req in roster.by_row), "a row is taken"
    assert len(set(roster.table._free)) == roster.table.num_rows, "a row is lost"
    assert not roster.queued_tokens, "a request is still queued"
    assert scheduler.intake.timers.next_time() is None, "a timer is left"


def check_ranked(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that no request was preempted or refused for lack of KV blocks while a lower-ranked
    request with enough blocks got tokens (invariant 21).

    Not checked if the policy itself chooses the order of requests or the victims, or if a request
    has ended in this step, whose blocks may have come too late for others."""
    step, guard = scheduler.view.step, scheduler.guard
    if type(scheduler) is not Scheduler or guard.overrides("order") or not plan.num_tokens:
        return
    if scheduler.settler.has_ended:
        return
    granted = scheduler.roster.requests(plan.rows)
    if guard.waiting_may_preempt:  # new ones were waiting when ``outranks`` was called
        granted = [req for req in granted if req not in step.new]
    if not guard.overrides("victim"):
        for req in step.short:
            _check_granted(scheduler, req, granted)
    if not guard.overrides("victim", "evict"):
        for req in step.preempted:
            _check_granted(scheduler, req, granted)


def _check_granted(scheduler: Scheduler, req: Request, granted: list[Request]) -> None:
    lower = [other for other in granted if is_lower(scheduler, req, other)]
    start = req.num_computed if req.slot >= 0 else scheduler.kv.ready(req)
    least = 1 if scheduler.config.enable_chunked_prefill else req.num_uncomputed
    enough = bool(lower) and scheduler.kv.fits(req, start + least, lower)
    assert not enough, f"{req} lacks blocks, but {lower}, which it outranks, were granted tokens"


def is_lower(scheduler: Scheduler, req: Request, other: Request) -> bool:
    """True if ``req`` has a better rank than ``other`` and may take the KV blocks of ``other``."""
    guard = scheduler.guard
    may_take = guard.outranks if req.is_waiting else guard.takes_blocks
    return by_rank(req) < by_rank(other) and may_take(req, other)


def check_spare(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check that no tokens, seats or KV blocks stay unused that a request could have used
    (invariant 20). Not checked if the policy or a resource decides who gets them."""
    frugal = scheduler.guard.overrides(*FRUGAL_HOOKS) or scheduler.guard.waiting_may_preempt
    is_paused = scheduler.pause_state is not PauseState.UNPAUSED
    if frugal or is_paused or scheduler.resources.members or type(scheduler) is not Scheduler:
        return
    # Blocks that become free within a step may come too late for another request.
    if scheduler.view.step.preempted or scheduler.kv.tables.windows:
        return
    left = scheduler.config.max_num_batched_tokens - plan.num_tokens
    if left <= 0:
        return
    counts = dict(zip(plan.rows.tolist(), plan.counts.tolist(), strict=True))
    for req in scheduler.roster.running:
        _check_running(scheduler, req, counts.get(req.row, 0), left)
    _check_head(scheduler, left)


def _check_running(scheduler: Scheduler, req: Request, count: int, left: int) -> None:
    """Check that a running request got all tokens it could compute with its KV blocks and the
    limits on prompts. ``count``: tokens it got; ``left``: tokens left in the step's budget."""
    missing, config = req.num_uncomputed - (req.num_pending if count else 0), scheduler.config
    if missing <= 0 or not (config.enable_chunked_prefill or missing <= left):
        return
    cap = prefill_cap(config, scheduler.roster)
    if count >= cap or _is_mixed_full(scheduler):
        return
    least = 1 if config.enable_chunked_prefill else min(missing, left, cap)
    fits = scheduler.kv.fits(req, req.num_computed + least)
    assert not fits, f"{req} got {count} tokens, lacks {missing}, and {left} are left"


def _spares_decodes(scheduler: Scheduler) -> bool:
    """True if the scheduler limits the prompt tokens in a step that also has decodes."""
    is_whole = scheduler.guard.overrides(*SHAPING) or type(scheduler) is not Scheduler
    return scheduler.config.max_mixed_prefill_tokens > 0 and not is_whole


def _is_mixed_full(scheduler: Scheduler) -> bool:
    """True if prompt tokens may have been postponed to keep this step's decodes fast."""
    step, size = scheduler.view.step, scheduler.config.max_mixed_prefill_tokens
    return _spares_decodes(scheduler) and step.has_decodes and step.num_prompt_tokens >= size


def check_mixed(scheduler: Scheduler, plan: StepPlan) -> None:
    """Check the limit on prompt tokens in a step that also has decodes (invariant 24):
    ``max_mixed_prefill_tokens``, or more if the queued prompts do not fit into
    ``num_mixed_prefill_steps`` such steps."""
    config, roster, rows = scheduler.config, scheduler.roster, plan.rows
    size = config.max_mixed_prefill_tokens
    spread = config.num_mixed_prefill_steps * size
    if (
        not _spares_decodes(scheduler) or scheduler.resources.members
    ):  # a resource may require whole prompts
        return
    table = roster.table
    known = table.num_tokens.all[rows] + table.num_pending.all[rows] - plan.samples
    is_new = np.isin(rows, [req.row for req in scheduler.view.step.new])
    is_prompt = known - plan.starts > 1
    if (is_prompt | is_new).all():
        return
    begun = sum(req.num_uncomputed for req in roster.running_prompts())
    most = roster.queued_tokens + begun + int(known[is_prompt | is_new].sum()) - spread
    num_tokens = int(plan.counts[is_prompt].sum())
    assert num_tokens <= max(size, most), f"{num_tokens} tokens of prompts next to decodes"


def _check_head(scheduler: Scheduler, left: int) -> None:
    """Check that the first waiting request had a reason to wait: no seat, too few KV blocks or
    tokens, or a pending token. ``left``: tokens left in the step's budget."""
    kv, roster = scheduler.kv, scheduler.roster
    if not len(roster.waiting) or not roster.num_free_seats:
        return
    head = roster.waiting[0]
    if head.num_pending or not (scheduler.config.enable_chunked_prefill or head.num_tokens <= left):
        return
    if _is_mixed_full(scheduler):
        return
    promised = sum(kv.blocks_for(req.num_tokens + 1) for req in roster.running)
    needed = kv.blocks_for(head.num_tokens) + promised + len(roster.running)
    if roster.running and scheduler.config.watermark is not None:
        needed += int(scheduler.config.watermark * kv.num_blocks)
    assert needed > kv.num_free, f"{head} waits, but seats, blocks and {left} tokens are left"
