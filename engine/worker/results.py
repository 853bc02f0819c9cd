"""Steps in flight, and their results once the device has finished them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from engine.messages.outputs import TokenLogprobs
from engine.messages.step import EMPTY, Column, StepPlan, StepResult
from engine.sample.logprobs import Scored
from engine.sample.sampler import Draws, why_none_left, why_unsound
from engine.worker.platform import Fetched, Mark

PromptLogprobs = Mapping[int, list[TokenLogprobs]]  # by row of the step they came with
NO_SCORES: PromptLogprobs = MappingProxyType({})


class Failed(NamedTuple):
    """A row of the plan whose step raised, alone."""

    first: int
    message: str
    prompt_logprobs: PromptLogprobs = NO_SCORES


class Homebound(NamedTuple):
    """Rows whose tokens are on their way to the host, counted from one of the plan's."""

    first: int
    draws: Draws
    errors: dict[int, str]  # by row of the draws
    edited: list[int]  # rows of the draws
    scored: list[list[int]]  # rows of the draws, of each group of log-probabilities
    fetched: Fetched  # tokens; were the edited ones sound, if any; three columns for each group
    prompt_logprobs: PromptLogprobs = NO_SCORES


@dataclass(slots=True)
class Pending:
    """A launched step. ``parts`` are rows in order: one part, or more if some rows failed.

    ``spans``: when the device began and ended what it does for it, in order. Between launch and
    draw of a step that waits for masks, the device may wait too.
    """

    plan: StepPlan
    spans: list[tuple[Mark, Mark]]
    parts: list[Homebound | Failed] = field(default_factory=list)


def collect(pending: Pending) -> StepResult:
    """Wait for a step and read its results."""
    plan = pending.plan
    result = StepResult(plan.step, EMPTY, EMPTY, {}, {}, {})
    found = [_read(part, result) for part in pending.parts]
    pending.spans[-1][1].synchronize()
    result.seconds = sum(began.elapsed_time(ended) for began, ended in pending.spans) / 1e3
    if len(found) == 1:
        rows, tokens = found[0]
    else:
        rows = np.concatenate([EMPTY, *(part[0] for part in found)])
        tokens = np.concatenate([EMPTY, *(part[1] for part in found)])
    if result.errors:
        is_good = np.isin(rows, list(result.errors), invert=True)
        rows, tokens = rows[is_good], tokens[is_good]
    result.token_ids = tokens
    is_one_each = len(tokens) == len(plan.rows) and plan.drafts is None
    result.counts = (
        plan.samples.copy()
        if is_one_each
        else np.bincount(rows, minlength=len(plan.rows)).astype(np.int32)
    )
    return result


def _read(part: Homebound | Failed, result: StepResult) -> tuple[Column, Column]:
    """Enter the results of a part. Returns the plan rows of tokens that stand, and the tokens."""
    if isinstance(part, Failed):
        result.errors[part.first] = part.message
        return EMPTY, EMPTY
    part.fetched.done.synchronize()
    draws, columns = part.draws, iter(part.fetched.tensors)
    rows = draws.rows + np.int32(part.first) if part.first else draws.rows
    drawn = next(columns).numpy()
    sound = next(columns).tolist() if part.edited else []
    stands = drawn >= 0
    is_whole = np.count_nonzero(stands) == len(stands)
    if draws.is_padded:
        stands &= draws.slots >= 0
    if not is_whole:
        for row, message in _failures(part, drawn, sound).items():
            result.errors.setdefault(int(rows[row]), message)
    for scored in part.scored:
        entries = Scored(*(next(columns) for _ in range(3))).entries()
        for row, entry in zip(scored, entries, strict=True):
            if stands[row] and int(rows[row]) not in result.errors:
                result.logprobs.setdefault(int(rows[row]), []).append(entry)
    for row, scores in part.prompt_logprobs.items():
        result.prompt_logprobs[row + part.first] = scores
    if is_whole and not draws.is_padded:
        return rows, drawn
    return rows[stands], drawn[stands]


def _failures(part: Homebound, drawn: Column, sound: list[bool]) -> dict[int, str]:
    """Why rows of the draws have no token. ``sound``: were the edited ones.

    Errors behind a rejected draft are ignored: those rows were not needed.
    """
    failed = {}
    was_sound = dict(zip(part.edited, sound, strict=True))
    for row in np.flatnonzero((drawn == -1) & (part.draws.slots >= 0)).tolist():
        why = why_none_left if was_sound.get(row, False) else why_unsound
        failed[row] = part.errors.get(row) or why(int(part.draws.positions[row]))
    return failed
