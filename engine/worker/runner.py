"""ModelRunner: one step on one screen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.layers.batch import last_tokens
from engine.messages.outputs import TokenLogprobs
from engine.messages.step import Column, StepPlan, StepResult
from engine.models.model import Model
from engine.sample.sampler import Sampler
from engine.worker.batch import Columns, build_batch
from engine.worker.profiler import section
from engine.worker.prompt_scores import PromptScores
from engine.worker.states import States


@dataclass(slots=True)
class Partial:
    """What some rows of a step brought; row numbers count from the first of them."""

    token_ids: Column  # of the rows that sample
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)


class ModelRunner:
    """Computes plans with one model, one sampler and one KV cache (a tensor per layer)."""

    def __init__(
        self, model: Model, sampler: Sampler, states: States, kv: list[torch.Tensor]
    ) -> None:
        self.model = model
        self.sampler = sampler
        self.states = states
        self.kv = kv
        self.prompt_scores = PromptScores(model.logits)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's changes and compute its rows; failing rows fail alone."""
        self.states.apply(plan)
        for slot in plan.freed_slots:
            self.sampler.remove(slot)
            self.prompt_scores.remove(slot)
        for seq in plan.new:
            self.sampler.add(seq)
        columns = Columns.of(plan)
        counts = plan.samples.copy()
        if not len(plan.rows):
            return StepResult(plan.step, np.empty(0, dtype=np.int32), counts)
        part = self._isolate(columns)
        for row in part.prompt_logprobs:  # only now: the step may have been run again
            self.prompt_scores.remove(int(plan.slots[row]))
            self.states.prompt_scored.discard(int(plan.slots[row]))
        token_ids = part.token_ids
        if part.errors:
            failed = np.array(list(part.errors))
            counts[failed] = 0
            token_ids = token_ids[np.isin(np.flatnonzero(plan.samples), failed, invert=True)]
        return StepResult(
            plan.step, token_ids, counts, part.errors, part.logprobs, part.prompt_logprobs
        )

    def _run(self, columns: Columns) -> Partial:
        """Forward, logits, sample."""
        batch = build_batch(columns, self.states, every_row=bool(self.states.prompt_scored))
        with section("forward"):
            hidden = self.model.forward(batch, self.kv)
        rows = np.flatnonzero(columns.samples)
        scored = {}
        if self.states.prompt_scored:
            scored = self.prompt_scores.collect(columns, hidden, self.states)
            hidden = hidden[last_tokens(batch.attn, torch.from_numpy(rows)).rows]
        if not rows.size:
            return Partial(np.empty(0, dtype=np.int32), prompt_logprobs=scored)
        slots = columns.slots[rows]
        positions = (columns.starts + columns.counts)[rows]
        with section("logits"):
            logits = self.model.logits(hidden)
        with section("sample"):
            out = self.sampler.sample(logits, slots, positions, self.states.tokens)
        self.states.tokens[slots, positions] = out.token_ids
        return Partial(
            out.token_ids,
            {int(rows[i]): message for i, message in out.errors.items()},
            {int(rows[i]): [scores] for i, scores in out.logprobs.items()},
            scored,
        )

    def _isolate(self, columns: Columns) -> Partial:
        """Run the rows; if that raises, run them in halves until the culprit is alone.

        Running again is harmless: the same K and V are written to the same places, and plan order
        keeps the writer of a shared block before its readers.
        """
        try:
            return self._run(columns)
        except Exception as error:
            num = len(columns.counts)
            if num == 1:
                message = f"{type(error).__name__}: {error}"
                token = np.zeros(int(columns.samples[0]), dtype=np.int32)
                return Partial(token, {0: message})
        middle = num // 2
        return _joined(
            self._isolate(columns.part(0, middle)), self._isolate(columns.part(middle, num)), middle
        )


def _joined(first: Partial, second: Partial, offset: int) -> Partial:
    """Two parts as one; rows of the second count on from the first's."""
    return Partial(
        np.concatenate([first.token_ids, second.token_ids]),
        first.errors | {row + offset: text for row, text in second.errors.items()},
        first.logprobs | {row + offset: scores for row, scores in second.logprobs.items()},
        first.prompt_logprobs
        | {row + offset: scores for row, scores in second.prompt_logprobs.items()},
    )
