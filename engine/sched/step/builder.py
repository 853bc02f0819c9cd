"""Builds the plan of a step (rows, drafts, changes), and limits the prompt tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.messages.step import EMPTY, PADDING, DraftPart, NewSeq, SnapshotPart, StepPlan
from engine.sched.request import Request
from engine.sched.roster import Roster, Rows
from engine.sched.step_state import Step, num_draft_places
from engine.sched.table import WATCHED

ONES = np.ones(1024, dtype=np.int32)
ONES.flags.writeable = False


def ones(count: int) -> NDArray[np.int32]:
    """A read-only array of ``count`` ones, cached if it is short."""
    return ONES[:count] if count <= len(ONES) else np.ones(count, dtype=np.int32)


def canonical_rows(step: Step, roster: Roster) -> tuple[Rows, NDArray[np.int32], bool]:
    """Return the plan's requests: their rows in the request table, their token counts, and whether
    these are exactly the running requests with one token each.

    Rows with one token that did not start in this step and that no resource watches come first,
    ascending. The others follow in the order in which they got tokens. Thereby plans are equal
    whether tokens are granted in bulk or one by one."""
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
    """Build the plan of a step, with all changes since the last plan that the worker needs.

    ``num_computed`` of each row must already include the tokens of this step.
    """
    table, seated = roster.table, roster.running_rows
    rows, counts, is_full = canonical_rows(step, roster)
    samples = ones(len(rows))
    if step.silent:
        silent = step.silent
        samples = np.array([row not in silent for row in rows.tolist()], dtype=np.int32)
    if is_full:
        seated.add_full_step(step.index)
        slots, generations = seated.columns.slots, seated.columns.generations
    else:
        slots, generations = table.slot.all[rows], table.generation.all[rows]
    assert not step.preempted or (slots >= 0).all(), "preempted in the step that grants it tokens"
    grown = kv.drain(is_launched=len(rows) > 0 or bool(roster.freed_slots))
    block_slots = block_indices = block_ids = EMPTY
    if grown.rows:
        block_slots = table.slot.all[np.array(grown.rows, dtype=np.intp)]
        block_indices = np.array(grown.indices, dtype=np.int32)
        block_ids = np.array(grown.blocks, dtype=np.int32)
    table.launch(rows)
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
        snapshots=states_to_load(step.new, kv) if step.new else None,
    )


def states_to_load(new: Sequence[Request], kv: KVManager) -> SnapshotPart | None:
    """The snapshots of recurrent states that requests with a prefix hit start from. ``new``: the
    requests that start in this step."""
    if (states := kv.states) is None:
        return None
    loads = [(req.slot, blocks) for req in new if (blocks := states.to_load(req))]
    if not loads:
        return None
    return SnapshotPart(
        states.snapshots.num_blocks,
        load_slots=np.array([slot for slot, _ in loads], dtype=np.int32),
        load_blocks=np.array([blocks for _, blocks in loads], dtype=np.int32).reshape(-1),
    )


def pad_drafts(plan: StepPlan, step: Step) -> None:
    """Make each row's number of drafts match the draft positions granted to it: add ``PADDING``,
    which the worker rejects, or drop drafts."""
    slots = {
        req.row: num_places
        for req, count in step.grants
        if count > 1 and (num_places := num_draft_places(req)) > 0
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
    """True if the drafts fit the plan: one count per row, and enough tokens. Drafts that a plug-in
    has written may not."""
    return len(drafts.counts) == num_rows and len(drafts.tokens) == int(drafts.counts.sum())


def new_seq(req: Request) -> NewSeq:
    """Make the worker's description of a request that starts to run."""
    return NewSeq(
        request_id=req.request_id,
        slot=req.slot,
        token_ids=req.tokens.tolist() if req.num_output else req.add.prompt_token_ids,
        num_prompt=req.num_prompt,
        params=req.params,
        seed=req.add.seed,
        stop_token_ids=req.stop_ids,
        bad_words_ids=req.add.bad_words_ids,
        pooling=req.add.pooling,
    )


def prefill_cap(config: SchedulerConfig, roster: Roster) -> int:
    """Return the most tokens that one prompt may get in this step. A prompt without competing
    requests may get the whole token budget."""
    threshold = config.long_prefill_token_threshold
    if not threshold or not config.enable_chunked_prefill:
        return config.max_num_batched_tokens
    competing = len(roster.running) + len(roster.waiting)
    if competing <= 1:
        return config.max_num_batched_tokens
    if config.long_prefill_token_threshold_adaptive:
        return max(threshold, config.max_num_batched_tokens // competing)
    return threshold


def room_next_to_decodes(step: Step, config: SchedulerConfig, roster: Roster) -> int:
    """Return how many more prompt tokens this step may get without slowing its decodes too much.

    Decodes wait for the whole step. A short queue of prompts is therefore computed in chunks of
    ``max_mixed_prefill_tokens`` over some steps. The excess of a longer queue may be computed at
    once, since larger steps empty the queue sooner."""
    size = config.max_mixed_prefill_tokens
    if not (size and step.has_decodes):
        return config.max_num_batched_tokens
    if step.most_prompt_tokens is None:
        begun = sum(req.num_uncomputed for req in roster.running_prompts())
        waiting = roster.queued_tokens - roster.parked_tokens + begun + step.num_prompt_tokens
        spread = config.num_mixed_prefill_steps * size
        step.most_prompt_tokens = max(size, waiting - spread)
    return step.most_prompt_tokens - step.num_prompt_tokens
