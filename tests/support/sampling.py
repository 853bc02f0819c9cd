"""A sampler and the tables of the worker that would call it, for tests."""

from typing import Any, NamedTuple

import numpy as np
import torch

from engine.messages.params import SamplingParams
from engine.messages.requests import TokenLogprobs
from engine.messages.step import NewSeq, StepPlan, StepResult
from engine.sample.edits import SamplingSpec
from engine.sample.parts import Vocabulary
from engine.sample.sampler import DraftRows, Draws, RowMasks, Sampler
from engine.worker.batches import Staging, stage_changes
from engine.worker.platform import Platform
from engine.worker.platform.host import CpuPlatform
from engine.worker.runner import columns_of
from engine.worker.slots import Slots
from engine.worker.steps import Pending, PendingStep, collect
from kernels import slots as on_slots
from kernels.slots import Drawn, Rows

VOCAB = 50
SLOTS = 8
MAX_LEN = 64
NONE = np.empty(0, dtype=np.int32)


class Sampled(NamedTuple):
    """What a step brought; rows in errors failed alone, their token is -1."""

    token_ids: np.ndarray
    logprobs: dict[int, TokenLogprobs]
    errors: dict[int, str]


class Bench:
    """A sampler and the tables of slots. ``padded``: with a row of padding behind each, as a graph
    has them; it samples from NaN."""

    def __init__(
        self,
        vocab_size: int = VOCAB,
        processors: tuple[Any, ...] = (),
        platform: Platform | None = None,
        *,
        num_slots: int = SLOTS,
        padded: bool = False,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.padded = padded
        self.platform = platform or CpuPlatform()
        self.slots = Slots(self.platform, num_slots, MAX_LEN, 4)
        self.staging = Staging(self.platform, num_slots, num_slots, 1)
        self.sampler = Sampler(
            self.platform.upload,
            self.slots.tables,
            vocabulary or Vocabulary(vocab_size),
            processors,
        )
        self.lengths = np.zeros(num_slots, dtype=np.int32)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int],
        output: list[int] | None = None,
        **more: Any,
    ) -> None:
        known = prompt + (output or [])
        settings = {"seed": slot, "stop_token_ids": [], "bad_words_ids": [], **more}
        self.add_all([NewSeq(f"r{slot}", slot, known, len(prompt), params, **settings)])

    def add_all(self, new: list[NewSeq]) -> None:
        """All in one step."""
        specs = [SamplingSpec.of(seq, self.vocab_size) for seq in new]
        for seq, spec in zip(new, specs, strict=True):
            self.sampler.add(seq, spec)
            self.lengths[seq.slot] = len(seq.token_ids)
        self.staging.open(0)
        changes = stage_changes(
            plan_of([seq.slot for seq in new], new=new), specs, self.staging, self.slots
        )
        self.staging.send()
        self.slots.apply(*changes)

    def sample(
        self, logits: torch.Tensor, slots: list[int], masks: RowMasks | None = None
    ) -> Sampled:
        """One step: what is sampled becomes known."""
        result = self.step(logits.clone(), slots, masks)
        tokens = np.full(len(slots), -1, dtype=np.int32)
        tokens[result.counts > 0] = result.token_ids
        scores = {row: entry for row, (entry,) in result.logprobs.items()}
        return Sampled(tokens, scores, result.errors)

    def step(
        self,
        logits: torch.Tensor,
        slots: list[int],
        masks: RowMasks | None = None,
        *,
        may_leave_masks: bool = False,
        drafts: DraftRows | None = None,
    ) -> StepResult:
        column = np.array(slots, dtype=np.int32)
        positions = self.lengths[column]
        rows, draws = self._rows(logits, column, positions)
        draws = draws._replace(drafts=drafts)
        drawing = self.sampler.prepare(rows, draws, masks, may_leave_masks=may_leave_masks)
        drawn = self.sampler.draw(rows, drawing.masks)
        kept = Drawn(drawn, rows.slots, NONE, None)
        on_slots.remember(
            self.slots.tables.history,
            *(x[rows.slots >= 0] for x in (rows.slots, rows.positions, kept.tokens.clamp(min=0))),
        )
        scores = self.sampler.finish(rows, draws, drawing, drawn)
        wanted = [drawn] if drawing.sound is None else [drawn, drawing.sound]
        fetched = self.platform.fetch(wanted + columns_of(scores))
        groups = [group.rows for group in scores]
        home = PendingStep(0, draws, drawing.errors, drawing.checked, groups, fetched)
        self.lengths[column] += 1
        mark = self.platform.mark()
        return collect(Pending(plan_of(slots), [(mark, mark)], [home]))

    def _rows(
        self, logits: torch.Tensor, column: np.ndarray, positions: np.ndarray
    ) -> tuple[Rows, Draws]:
        num = len(column)
        if not self.padded:
            rows = Rows(logits, torch.from_numpy(column), torch.from_numpy(positions))
            return rows, Draws(np.arange(num, dtype=np.int32), column, positions)
        places = np.arange(0, 2 * num, 2)
        padded = torch.full((2 * num, self.vocab_size), torch.nan)
        padded[places] = logits
        slots, there = np.full(2 * num, -1, np.int32), np.zeros(2 * num, np.int32)
        slots[places], there[places] = column, positions
        rows = Rows(padded, torch.from_numpy(slots), torch.from_numpy(there))
        of_plan = np.arange(2 * num, dtype=np.int32) // 2
        return rows, Draws(of_plan, slots, there, is_padded=True)


def plan_of(slots: list[int], new: list[NewSeq] | None = None) -> StepPlan:
    """A plan in which these slots have one token each."""
    column = np.array(slots, dtype=np.int32)
    ones = np.ones(len(slots), dtype=np.int32)
    starts = np.array([len(seq.token_ids) - 1 for seq in new or []], dtype=np.int32)
    return StepPlan(
        0,
        column.astype(np.intp),
        column,
        ones,
        starts if new else ones,
        ones,
        ones,
        new or [],
        NONE,
        NONE,
        NONE,
        [],
        len(slots),
    )


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, size=shape).astype(np.float32))
