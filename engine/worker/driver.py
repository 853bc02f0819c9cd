"""Driver: takes plans, returns tickets; a failing row does not fail the others.

launch ─> stage, forward, draw ──────────> collect
   └──── stage, forward ─> sample: draw ──┘         (the plan has a ``MaskPart``)
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from engine.messages.step import Column, MaskPart, Masks, StepPlan, StepResult
from engine.sample.edits import WORD
from engine.sample.sampler import Draws, RowMasks
from engine.worker.batches import PlanRows
from engine.worker.profiler import section
from engine.worker.results import Failed, Homebound, Pending, collect
from engine.worker.runner import Advanced, Forwarded, Runner, Unfit

logger = logging.getLogger("engine.worker")

Compute = Callable[[PlanRows, int], Homebound]
"""Computes some rows, of which the second argument is the place in the plan."""


class Driver:
    """Computes plans with one runner. A step that raises is run again in halves until the culprit
    is alone."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._undrawn: Forwarded | Exception | None = None  # the step that waits for masks

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step: forward pass and, unless it waits for masks, the draw."""
        runner, platform = self.runner, self.runner.machine.platform
        began = platform.mark()
        specs, rows = runner.begin(plan), self._rows_of(plan)
        staged = [runner.stage(rows, plan, specs)]
        pending = Pending(plan, [])
        if len(plan.rows) and plan.masks is None:
            self._finish(
                pending,
                rows,
                lambda part, first: runner.draw(
                    runner.forward(staged.pop() if staged else runner.stage(part))
                ),
            )
        elif len(plan.rows):
            try:
                self._undrawn = runner.forward(staged.pop())
            except torch.AcceleratorError:  # the device is lost, and with it every request
                raise
            except Exception as error:  # raised when the step is drawn, for the rows that need it
                self._undrawn = error
        pending.spans.append((began, platform.mark()))
        return pending

    @torch.inference_mode()
    def sample(self, ticket: Pending, masks: Masks | None) -> None:
        """Start the draw of a step that waited for its masks."""
        runner, part = self.runner, ticket.plan.masks
        assert part is not None, "sample() for a step that does not wait for masks"
        began = runner.machine.platform.mark()
        ready, self._undrawn = [self._undrawn], None
        words, first_mask = self._placed(ticket.plan, part, masks)

        def draw(rows: PlanRows, first: int) -> Homebound:
            forwarded = ready.pop() if ready else None
            if isinstance(forwarded, Exception):
                raise forwarded
            forwarded = forwarded or runner.forward(runner.stage(rows))
            of_row = _masks_of(forwarded.staged.draws, first_mask[first:])
            return runner.draw(forwarded, RowMasks(words, of_row))

        self._finish(ticket, self._rows_of(ticket.plan), draw)
        ticket.spans.append((began, runner.machine.platform.mark()))

    def collect(self, ticket: Pending) -> StepResult:
        """Sleep until a launched step is done and read its results."""
        with section("collect"):
            result = collect(ticket)
        for feature in self.runner.machine.features:
            feature.report(result)
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """A step from its launch to its result."""
        return self.collect(self.launch(plan))

    # -- helpers

    def _rows_of(self, plan: StepPlan) -> PlanRows:
        return PlanRows.of(plan, self.runner.machine.model.vocab_size)

    def _finish(self, pending: Pending, rows: PlanRows, compute: Compute) -> None:
        """Compute the rows of a step; prompt scores leave once nothing is run again."""
        pending.parts = self._isolated(rows, 0, compute)
        for part in pending.parts:
            for row in part.prompt_logprobs:
                self.runner.forget_scored(int(rows.slots[part.first + row]))

    def _isolated(self, rows: PlanRows, first: int, compute: Compute) -> list[Homebound | Failed]:
        """Compute rows, of which ``first`` is the plan's; if that raises, in halves.

        Running again is harmless until slots advance: the same K and V are written to the same
        places, and plan order keeps the writer of a shared block before its readers.
        """
        num, message = len(rows.counts), ""
        try:
            return [compute(rows, first)._replace(first=first)]
        except torch.AcceleratorError:  # the device is lost, and with it every request
            raise
        except Advanced as error:
            message = str(error)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, Unfit):
                message = str(error)
            if num > 1:
                middle = num // 2
                return [
                    *self._isolated(rows.part(0, middle), first, compute),
                    *self._isolated(rows.part(middle, num), first + middle, compute),
                ]
        return [Failed(first + row, message) for row in range(num)]

    def _placed(
        self, plan: StepPlan, part: MaskPart, masks: Masks | None
    ) -> tuple[torch.Tensor, Column]:
        """The masks on the device [M, words], and the first of each row of the plan, -1: none.

        Where none came, or too few, there is one that allows nothing: those rows fail.
        """
        first_mask: Column = np.full(len(plan.rows), -1, dtype=np.int32)
        num_words = -(-self.runner.machine.model.vocab_size // WORD)
        each = np.ones(len(part.rows), dtype=np.int32)
        if plan.drafts is not None:
            each += plan.drafts.counts[part.rows]
        first_mask[part.rows] = each.cumsum() - each
        if masks is not None and len(masks.words) == int(each.sum()) * num_words:
            words = masks.words.reshape(-1, num_words)
        else:
            logger.error("the masks of step %d are missing or of another size", plan.step)
            words = np.zeros((max(1, int(each.sum())), num_words), dtype=np.int32)
        return self.runner.machine.platform.upload(words), first_mask


def _masks_of(draws: Draws, first_mask: Column) -> Column:
    """The mask of each row of the draws, -1: none. ``first_mask``: by row of the plan."""
    behind = np.arange(len(draws.rows)) - np.searchsorted(draws.rows, draws.rows)
    mine = first_mask[np.minimum(draws.rows, len(first_mask) - 1)]
    of_row: Column = np.where((mine >= 0) & (draws.slots >= 0), mine + behind, -1).astype(np.int32)
    return of_row
