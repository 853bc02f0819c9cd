"""From plans to results on one device: the driver takes plans, the runner computes rows of them.

    launch ─> stage, forward, draw ──────────> collect
       └──── stage, forward ─> sample: draw ──┘         (the plan has a ``MaskPart``)

    begin    seats, samplers, features: what the plan changes
    stage    one buffer to the device
    forward  logits of the rows after which a token is drawn
    draw     edits, the draw, the slots advance; tokens are on their way to the host at the end

A failing row does not fail the others: the driver decides what follows a failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.messages.step import Column, MaskPart, Masks, StepPlan, StepResult
from engine.observe.guard import Failures, Guard
from engine.sample.edits import WORD, SamplingSpec
from engine.sample.sampler import Draws, RowMasks, RowScores
from engine.worker.batches import PlanRows, Staged, draft_tokens
from engine.worker.feature import Feature, Machine
from engine.worker.prompt_scores import PromptScores
from engine.worker.roofline import REPORT_SECONDS, REPORT_STEPS, Measured, Roofline
from engine.worker.slots import LiveSeqs
from engine.worker.steps import (
    BySize,
    EagerStep,
    FailedStep,
    GraphedStep,
    MixedGraph,
    Pending,
    PendingStep,
    collect,
    record,
    record_mixed,
    section,
)
from kernels.slots import Rows

logger = logging.getLogger("engine.worker")
Compute = Callable[[PlanRows, int], PendingStep]
"""Computes some rows, of which the second argument is the place in the plan."""


class Driver:
    """Computes plans with one runner. A step that raises is run again in halves until the culprit
    is alone."""

    def __init__(self, runner: Runner, failures: Failures | None = None) -> None:
        self.runner = runner
        effect = "no share of it is reported"
        self.watching = Guard(failures or Failures(), "roofline", effect, stops=True)
        """Stands between the steps and what is measured of them."""
        self.roofline: Roofline | None = None  # where it is known
        self._measured: list[Measured] = []  # not in a report yet
        self._measured_seconds = 0.0
        self._undrawn: SampledBatch | Exception | None = None  # the step that waits for masks

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
                self._undrawn = runner.forward(staged.pop(), is_masked=True)
            except torch.AcceleratorError:  # the device is lost, and with it every request
                raise
            except Exception as error:  # raised when the step is drawn, for the rows that need it
                self._undrawn = error
        pending.spans.append((began, platform.mark()))
        return pending

    @torch.inference_mode()
    def preview(self, ticket: Pending) -> Column | None:
        """``MaskPart.drawn`` of the step that waits for masks; ``None`` on a GPU, which would have
        to be waited for, and where no token would tell."""
        part, forwarded = ticket.plan.masks, self._undrawn
        if not (self.runner.machine.platform.shares_memory and isinstance(forwarded, SampledBatch)):
            return None
        assert part is not None and part.ahead is not None, "preview() for a step without one"
        began = self.runner.machine.platform.mark()
        try:
            return self.runner.preview(forwarded, part.ahead)
        except Exception:  # drawing again tells of which row
            logger.exception("step %d: no token was drawn ahead of its mask", ticket.plan.step)
            return None
        finally:
            ticket.spans.append((began, self.runner.machine.platform.mark()))

    @torch.inference_mode()
    def sample(self, ticket: Pending, masks: Masks | None) -> None:
        """Start the draw of a step that waited for its masks."""
        runner, part = self.runner, ticket.plan.masks
        assert part is not None, "sample() for a step that does not wait for masks"
        began = runner.machine.platform.mark()
        ready, self._undrawn = [self._undrawn], None
        words, first_mask = self._placed(ticket.plan, part, masks)

        def draw(rows: PlanRows, first: int) -> PendingStep:
            forwarded = ready.pop() if ready else None
            if isinstance(forwarded, Exception):
                raise forwarded
            if forwarded is not None:
                of_row = _masks_of(forwarded.staged.draws, first_mask[first:])
                return runner.draw(forwarded, RowMasks(words, of_row))
            forwarded = runner.forward(runner.stage(rows), is_masked=True)
            all_words, first_of_all = self._with_drawn(part, words, first_mask)
            of_row = _masks_of(forwarded.staged.draws, first_of_all[first:])
            return runner.draw(forwarded, RowMasks(all_words, of_row))

        self._finish(ticket, self._rows_of(ticket.plan), draw)
        ticket.spans.append((began, runner.machine.platform.mark()))

    def collect(self, ticket: Pending) -> StepResult:
        """Sleep until a launched step is done and read its results."""
        with section("collect"):
            result = collect(ticket)
        if self.roofline is not None and ticket.plan.num_tokens and not result.errors:
            try:
                self._measure(ticket.plan, result)
            except Exception as error:  # it only watches: the step is right without it
                self.roofline = None
                self.watching.fail(error)
        for feature in self.runner.machine.features:
            feature.report(result)
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """A step from its launch to its result."""
        return self.collect(self.launch(plan))

    # -- helpers

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        """Floors are worked out for many steps together, about once a second."""
        measured = Measured(result.seconds, plan.counts, plan.starts, plan.samples)
        self._measured.append(measured)
        self._measured_seconds += result.seconds
        if self._measured_seconds >= REPORT_SECONDS or len(self._measured) == REPORT_STEPS:
            assert self.roofline is not None
            result.measured_seconds = self._measured_seconds
            result.floor_seconds = self.roofline.floor(self._measured)
            self._measured, self._measured_seconds = [], 0.0

    def _rows_of(self, plan: StepPlan) -> PlanRows:
        return PlanRows.of(plan, self.runner.machine.model.vocab_size)

    def _finish(self, pending: Pending, rows: PlanRows, compute: Compute) -> None:
        """Compute the rows of a step; prompt scores leave once nothing is run again."""
        pending.parts = self._isolated(rows, 0, compute)
        for part in pending.parts:
            for row in part.prompt_logprobs:
                self.runner.forget_scored(int(rows.slots[part.first + row]))

    def _isolated(
        self, rows: PlanRows, first: int, compute: Compute
    ) -> list[PendingStep | FailedStep]:
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
        return [FailedStep(first + row, message) for row in range(num)]

    def _placed(
        self, plan: StepPlan, part: MaskPart, masks: Masks | None
    ) -> tuple[torch.Tensor, Column]:
        """The masks on the device [M, words], and the first of each row of the plan, -1: none.

        Where none came, or too few, there is one that allows nothing: those rows fail.
        """
        first_mask: Column = np.full(len(plan.rows), -1, dtype=np.int32)
        num_words = -(-self.runner.machine.model.vocab_size // WORD)
        rows = part.rows
        if masks is not None and masks.rows is not None:
            rows = np.intersect1d(masks.rows, rows, assume_unique=True)
        each = np.ones(len(rows), dtype=np.int32)
        if plan.drafts is not None:
            each += plan.drafts.counts[rows]
        first_mask[rows] = each.cumsum() - each
        if masks is not None and len(masks.words) == int(each.sum()) * num_words:
            words = masks.words.reshape(-1, num_words)
        else:
            logger.error("the masks of step %d are missing or of another size", plan.step)
            words = np.zeros((max(1, int(each.sum())), num_words), dtype=np.int32)
        return self.runner.machine.platform.upload(words), first_mask

    def _with_drawn(
        self, part: MaskPart, words: torch.Tensor, first_mask: Column
    ) -> tuple[torch.Tensor, Column]:
        """Masks for rows that are run again, where those drawn ahead draw what was found to be
        allowed: another batch may round otherwise, and then they might draw something else."""
        if part.ahead is None or part.drawn is None:
            return words, first_mask
        is_drawn = (part.drawn >= 0) & (first_mask[part.ahead] < 0)
        rows, tokens = part.ahead[is_drawn], part.drawn[is_drawn]
        more = np.zeros((len(rows), words.shape[1]), dtype=np.uint32)
        more[np.arange(len(rows)), tokens // WORD] = np.uint32(1) << (tokens % WORD).astype(
            np.uint32
        )
        first_mask = first_mask.copy()
        first_mask[rows] = len(words) + np.arange(len(rows), dtype=np.int32)
        upload = self.runner.machine.platform.upload
        return torch.cat([words, upload(more.view(np.int32))]), first_mask


def _masks_of(draws: Draws, first_mask: Column) -> Column:
    """The mask of each row of the draws, -1: none. ``first_mask``: by row of the plan."""
    nth = np.arange(len(draws.rows)) - np.searchsorted(draws.rows, draws.rows)
    mine = first_mask[np.minimum(draws.rows, len(first_mask) - 1)]
    of_row: Column = np.where((mine >= 0) & (draws.slots >= 0), mine + nth, -1).astype(np.int32)
    return of_row


class Unfit(Exception):
    """A feature cannot compute a request of the step; the message says why."""


class Advanced(Exception):
    """A failure after the slots had advanced: running again would advance them twice."""


class SampledBatch(NamedTuple):
    """Rows that are computed and not drawn."""

    staged: Staged
    step: EagerStep | GraphedStep
    rows: Rows


class Runner:
    """One model on one device.

    Steps are launched without waiting: what a step draws stays in the slots, where the next one
    reads it. The host reads it when the step is collected.
    """

    def __init__(self, machine: Machine, max_model_len: int) -> None:
        self.machine = machine
        self._max_model_len = max_model_len
        self._graphed: BySize[GraphedStep] = BySize()
        self._mixed: BySize[MixedGraph] = BySize()
        self._prompt_scores = PromptScores(machine.model.logits)
        self._unfit: dict[int, str] = {}  # slots, and why a feature cannot compute what is there

    def begin(self, plan: StepPlan) -> list[SamplingSpec]:
        """Free and take slots. Returns the sampling options of the new sequences."""
        machine = self.machine
        machine.live.apply(plan)
        for slot in plan.freed_slots:
            machine.sampler.remove(slot)
            self._prompt_scores.remove(slot)
            self._unfit.pop(slot, None)
        specs = [SamplingSpec.of(seq, machine.model.vocab_size) for seq in plan.new]
        for seq, spec in zip(plan.new, specs, strict=True):
            machine.sampler.add(seq, spec)
        for feature in machine.features:
            self._unfit |= _begin(feature, plan, machine.live)
        return specs

    def stage(
        self, rows: PlanRows, plan: StepPlan | None = None, specs: Sequence[SamplingSpec] = ()
    ) -> Staged:
        """Send these rows and, with a plan, all its changes."""
        padded = self._size_for(rows)
        mixed = 0 if padded else self._mixed_size_for(rows)
        sizes = {"padded": padded, "mixed": mixed, "filled": self._filled_size_for(rows)}
        staged = self.machine.batches.stage(rows, plan, specs, **sizes)
        if staged.changes is not None:
            self.machine.slots.apply(*staged.changes)
        return staged

    def forward(
        self, staged: Staged, *, is_made_up: bool = False, is_masked: bool = False
    ) -> SampledBatch:
        """The forward pass, and logits; is_masked: masks will be laid on them. Raises ``Unfit`` for
        a row that a feature has refused."""
        if self._unfit:
            for slot in staged.rows.slots.tolist():
                if slot in self._unfit:
                    raise Unfit(self._unfit[slot])
        step = self._step_for(staged, is_made_up, is_masked)
        return SampledBatch(staged, step, step.forward())

    def preview(self, forwarded: SampledBatch, ahead: Column) -> Column | None:
        """Draw ahead of the masks, of these rows of the plan. Returns the token of each that has no
        drafts and tells; -1: it does not; ``None``: none of them does."""
        step, draws = forwarded.step, forwarded.staged.draws
        if not isinstance(step, EagerStep):
            return None
        first, end = (np.searchsorted(draws.rows, ahead, side) for side in ("left", "right"))
        first = first.clip(max=len(draws.rows) - 1)  # a row that draws nothing
        can_preview = self.machine.sampler.can_preview
        slots = draws.slots[first].tolist()
        is_single = (end - first == 1) & np.fromiter(map(can_preview, slots), bool, len(slots))
        if not is_single.any():
            return None
        wanted: Column = np.full(len(draws.slots), -1, dtype=np.int32)
        wanted[first[is_single]] = draws.slots[first[is_single]]
        drawn: Column = np.where(is_single, step.preview(wanted)[first], -1).astype(np.int32)
        return drawn

    def draw(self, forwarded: SampledBatch, masks: RowMasks | None = None) -> PendingStep:
        """Edit the logits, draw, advance. Running again is harmless until then.

        Raises ``Advanced`` for what fails later.
        """
        machine, (staged, step, rows) = self.machine, forwarded
        self._remember_drafts(staged)
        may_leave = machine.platform.shares_memory and isinstance(step, EagerStep)
        drawing = machine.sampler.prepare(rows, staged.draws, masks, may_leave_masks=may_leave)
        with section("sample"):
            drawn = step.draw(drawing)
        try:
            step.tell(drawn)
            for feature in machine.features:
                _follow(feature, staged.rows)
            scores = machine.sampler.finish(rows, staged.draws, drawing, drawn)
            wanted = [drawn] if drawing.sound is None else [drawn, drawing.sound]
            fetched = machine.platform.fetch(wanted + columns_of(scores))
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise Advanced(f"{type(error).__name__}: {error}") from error
        return PendingStep(
            0,
            staged.draws,
            drawing.errors,
            drawing.checked,
            [group.rows for group in scores],
            fetched,
            step.prompt_logprobs,
            drawing.barred,
        )

    def forget_scored(self, slot: int) -> None:
        """Prompt scores of this slot are being delivered. Called only when no rerun can follow."""
        self._prompt_scores.remove(slot)
        self.machine.live.prompt_scored.discard(slot)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], mixed_sizes: Sequence[int] = ()) -> None:
        """Record decode steps of these numbers of rows, and other steps of this many tokens; larger
        ones are launched call by call."""
        with self.machine.platform.recording():
            self._graphed = record(self.machine, sizes, self._max_model_len)
            self._mixed = record_mixed(self.machine, mixed_sizes, self._max_model_len)
            for feature in self.machine.features:
                feature.capture(sizes, mixed_sizes)

    @torch.inference_mode()
    def profile_run(self, num_tokens: int, num_seqs: int, context: int = 0) -> None:
        """A step of this many tokens, of made-up sequences that all lie in the null block.

        ``context``: tokens of each that are computed already.
        """
        num_computed = self.machine.slots.state.num_computed
        num_computed.fill_(context)
        num_seqs = min(num_seqs, num_tokens)
        slots = np.arange(num_seqs, dtype=np.int32)
        share, rest = divmod(num_tokens, num_seqs)
        counts = np.minimum(share + (slots >= num_seqs - rest), self._max_model_len - context)
        rows = PlanRows(slots, slots * 0 + context, counts.astype(np.int32), slots * 0 + 1)
        try:
            self.draw(self.forward(self.machine.batches.stage(rows), is_made_up=True))
        finally:
            num_computed.zero_()

    # -- helpers

    def _size_for(self, rows: PlanRows) -> int:
        """Rows of the graph that computes these; 0 if none does."""
        counts, machine = rows.counts, self.machine
        if not self._graphed.sizes or not len(counts) or machine.live.has_scored(rows.slots):
            return 0
        if (counts != 1).any() or any(feature.touches(rows) for feature in machine.features):
            return 0
        step = self._graphed.holding(len(counts))
        return 0 if step is None else step.num_rows

    def _mixed_size_for(self, rows: PlanRows) -> int:
        """Tokens of the graph that computes these rows' lower layers; 0 if none does."""
        if not self._mixed.sizes or not len(rows.counts):
            return 0
        if any(feature.touches(rows) for feature in self.machine.features):
            return 0
        graph = self._mixed.holding(int(rows.counts.sum()))
        return 0 if graph is None else graph.num_rows

    def _filled_size_for(self, rows: PlanRows) -> int:
        """Tokens to which a step with chunks is padded for replay on a CPU; 0: no replay."""
        machine = self.machine
        if machine.recorder is None or rows.drafts is not None:
            return 0
        if machine.live.has_scored(rows.slots):
            return 0
        num_tokens = int(rows.counts.sum())
        if num_tokens == len(rows.counts):  # decodes alone
            return 0
        size = machine.recorder.mixed_size(num_tokens)
        is_touched = any(feature.touches(rows) for feature in machine.features)
        return 0 if is_touched or size > machine.batches.max_num_tokens else size

    def _step_for(
        self, staged: Staged, is_made_up: bool, is_masked: bool
    ) -> EagerStep | GraphedStep:
        if staged.picked is not None:
            # Whether the largest is sound is looked at, for which a GPU would have to be waited.
            may_take_largest = self.machine.platform.shares_memory and not is_masked
            return EagerStep(
                self.machine,
                self._prompt_scores,
                staged,
                staged.picked,
                graph=self._mixed.holding(staged.mixed) if staged.mixed else None,
                is_made_up=is_made_up,
                may_take_largest=may_take_largest,
            )
        graphed = self._graphed.holding(staged.room.num_seqs)
        assert graphed is not None, "staged for a size that is not recorded"
        return graphed

    def _remember_drafts(self, staged: Staged) -> None:
        """Drafts are part of the history for the rows after them."""
        drafts = staged.rows.drafts
        if drafts is None or not drafts.counts.any():
            return
        tokens, upload = staged.tokens, self.machine.platform.upload
        places = draft_tokens(drafts, tokens.query_start)
        self.machine.slots.remember(
            upload(tokens.slots[places].astype(np.int32)),
            upload(tokens.positions[places].astype(np.int32)),
            upload(drafts.inputs),
        )


def _begin(feature: Feature, plan: StepPlan, live: LiveSeqs) -> dict[int, str]:
    """Give the feature the plan. Returns the slots that it cannot compute, and why; if it
    raises, these are all slots of the step."""
    try:
        return dict(feature.begin(plan, live) or {})
    except torch.AcceleratorError:  # the device is lost, and with it every request
        raise
    except Exception as error:
        message = f"{type(feature).__name__} raised {type(error).__name__}: {error}"
        logger.exception("step %d: %s", plan.step, message)
        return dict.fromkeys(plan.slots.tolist(), message)


def _follow(feature: Feature, rows: PlanRows) -> None:
    """Let the feature compute after the draw, which it cannot undo by failing."""
    try:
        feature.follow(rows)
    except torch.AcceleratorError:  # the device is lost, and with it every request
        raise
    except Exception:
        logger.exception("%s failed after a step, which stands", type(feature).__name__)


def columns_of(scores: Sequence[RowScores]) -> list[torch.Tensor]:
    """Log-probabilities to copy to the host, three columns for each group."""
    return [column for group in scores for column in group.scored]
