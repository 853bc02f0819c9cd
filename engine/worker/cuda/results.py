"""Steps in flight, and what they bring once the device is there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch

from engine.messages.outputs import TokenLogprobs
from engine.messages.step import Column, StepPlan, StepResult
from engine.worker.cuda.platform import Fetched, Mark, Platform
from engine.worker.cuda.sampler import Drawing, Draws, Scores, entries_of

PromptLogprobs = Mapping[int, list[TokenLogprobs]]  # by row of the step they came with
NO_SCORES: PromptLogprobs = MappingProxyType({})


class Failed(NamedTuple):
    """A row of the plan whose step raised, alone."""

    first: int
    message: str
    prompt_logprobs: PromptLogprobs = NO_SCORES


class Drawn(NamedTuple):
    """Rows whose tokens are on their way home, counted from one of the plan's."""

    first: int
    draws: Draws
    errors: dict[int, str]  # by row of the draws
    is_edited: bool
    scored: list[list[int]]  # rows of the draws, of each group of log-probabilities
    fetched: Fetched  # tokens; were they sound, if edited; three columns for each group
    prompt_logprobs: PromptLogprobs = NO_SCORES


class Pending(NamedTuple):
    """A launched step."""

    plan: StepPlan
    began: Mark
    ended: Mark
    parts: list[Drawn | Failed]


def bring_home(
    platform: Platform,
    draws: Draws,
    drawing: Drawing,
    chosen: torch.Tensor,
    scores: list[Scores],
) -> Drawn:
    """Start copying what a step's draws brought."""
    wanted = [chosen] if drawing.sound is None else [chosen, drawing.sound]
    for group in scores:
        wanted += [group.ids, group.logprobs, group.ranks]
    return Drawn(
        0,
        draws,
        drawing.errors,
        drawing.sound is not None,
        [group.rows for group in scores],
        platform.fetch(wanted),
    )


def collect(pending: Pending) -> StepResult:
    """Wait for a step and read what it brought."""
    plan = pending.plan
    tokens: Column = np.zeros(len(plan.rows), dtype=np.int32)
    result = StepResult(plan.step, tokens, plan.samples.copy(), {}, {}, {})
    for part in pending.parts:
        if isinstance(part, Failed):
            result.errors[part.first] = part.message
        else:
            _read(part, tokens, result)
    pending.ended.synchronize()
    result.counts[list(result.errors)] = 0
    result.token_ids = tokens[result.counts > 0]
    result.seconds = pending.began.elapsed_time(pending.ended) / 1e3
    return result


def _read(part: Drawn, tokens: Column, result: StepResult) -> None:
    """Enter what a part brought; tokens by row of the plan."""
    part.fetched.done.synchronize()
    draws, columns = part.draws, iter(part.fetched.tensors)
    rows = draws.rows + part.first
    chosen = next(columns).numpy()
    sound = next(columns).numpy() if part.is_edited else np.zeros(len(chosen), dtype=bool)
    failed = dict(part.errors)
    for draw in np.flatnonzero((chosen < 0) & (draws.slots >= 0)).tolist():
        failed.setdefault(draw, _why_none(int(draws.positions[draw]), bool(sound[draw])))
    real = np.flatnonzero(draws.slots >= 0)
    tokens[rows[real]] = chosen[real]
    result.errors.update({int(rows[draw]): message for draw, message in failed.items()})
    for group in part.scored:
        for draw, entry in entries_of(group, [next(columns) for _ in range(3)]).items():
            if draw not in failed:
                result.logprobs[int(rows[draw])] = [entry]
    for row, scores in part.prompt_logprobs.items():
        result.prompt_logprobs[row + part.first] = scores


def _why_none(position: int, was_sound: bool) -> str:
    if was_sound:
        return (
            f"no token is left for position {position}: allowed_token_ids, bad_words, min_tokens "
            "and logits processors mask all tokens, or a processor left NaN or +inf"
        )
    return f"the model's logits for position {position} hold NaN or +inf, or are all -inf"
