"""Executes step plans on one device: the driver handles whole plans, the runner their rows.

    launch ─> stage, forward, draw ──────────> collect
       └──── stage, forward ─> sample: draw ──┘         (the plan has a ``MaskPart``)

    begin    apply what the plan changes: slots, samplers, features
    stage    copy the step's input to the device in one buffer
    forward  compute the logits of the rows that sample a token
    draw     edit logits, sample, advance the slots, start the copy of tokens to the host

A row (a request) that fails does not fail the others; see ``Driver._isolated``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import RankError
from engine.messages.step import Column, MaskPart, Masks, NewSeq, StepPlan, StepResult
from engine.observe.guard import Failures, ObserverGuard
from engine.sample.edits import WORD, SamplingSpec
from engine.sample.sampler import Draws, RowMasks, RowScores
from engine.worker.batches import (
    NO_PADDING,
    Padding,
    PaddingKind,
    PlanRows,
    Staged,
    draft_tokens,
)
from engine.worker.feature import Feature, Machine
from engine.worker.platform import Mark
from engine.worker.prompt_scores import PromptScores
from engine.worker.repeats import Repeats
from engine.worker.roofline import REPORT_SECONDS, REPORT_STEPS, Measured, Roofline
from engine.worker.slots import LiveSeqs
from engine.worker.states import check_drafts
from engine.worker.steps import (
    BySize,
    EagerStep,
    FailedStep,
    G,
    GraphedStep,
    MixedGraph,
    Pending,
    PendingStep,
    StepPart,
    collect,
    record,
    record_mixed,
    section,
)
from kernels.slots import Rows

logger = logging.getLogger("engine.worker")
FATAL = (torch.AcceleratorError, RankError)
Compute = Callable[[PlanRows, int], StepPart]
"""Computes some rows of a plan; the second argument is the index of the first of them."""


class Driver:
    """Computes plans with one runner. A step that raises is run again in halves until only the rows
    that cause the error fail."""

    def __init__(self, runner: Runner, failures: Failures | None = None) -> None:
        self.runner = runner
        effect = "no roofline share is reported"
        self.watching = ObserverGuard(failures or Failures(), "roofline", effect, stops=True)
        """Keeps errors of the roofline measurement away from the steps."""
        self.roofline: Roofline | None = None  # None: unknown for this model or device
        self._measured: list[Measured] = []  # not in a report yet
        self._measured_seconds = 0.0
        self._undrawn: ForwardedBatch | Exception | None = None  # the step that waits for masks

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step: run the forward pass and, unless the step waits for masks, sample."""
        began = self.runner.machine.platform.mark()
        done = self.runner.repeats.run(plan)
        if done is None:
            return self._launch(plan, began)
        return Pending(plan, [(began, self.runner.machine.platform.mark())], [done])

    @torch.inference_mode()
    def _launch(self, plan: StepPlan, began: Mark) -> Pending:
        """Start a step that does not only repeat the last one."""
        runner, platform = self.runner, self.runner.machine.platform
        specs, rows = runner.begin(plan), self._rows_of(plan)
        staged = [runner.stage(rows, plan, specs)]
        pending = Pending(plan, [])
        if len(plan.rows) and plan.masks is None:
            self._finish(
                pending,
                rows,
                lambda part, first: runner.compute(staged.pop() if staged else runner.stage(part)),
            )
        elif len(plan.rows):
            try:
                self._undrawn = runner.forward(staged.pop(), is_masked=True)
            except FATAL:  # the device is lost, or another rank, and with it every request
                raise
            except Exception as error:  # ``sample`` raises it again and isolates the rows
                self._undrawn = error
        pending.spans.append((began, platform.mark()))
        return pending

    @torch.inference_mode()
    def preview(self, ticket: Pending) -> Column | None:
        """Sample tokens early, before their grammar masks are known, for ``MaskPart.drawn``.
        ``None`` if no row can be sampled early, or on a GPU, where this would block the host."""
        part, forwarded = ticket.plan.masks, self._undrawn
        platform = self.runner.machine.platform
        if not (platform.shares_memory and isinstance(forwarded, ForwardedBatch)):
            return None
        assert part is not None and part.ahead is not None, "preview() for a step without one"
        began = platform.mark()
        try:
            return self.runner.preview(forwarded, part.ahead)
        except FATAL:
            raise
        except Exception:  # ``sample`` tries again and finds the row that fails
            logger.exception("step %d: no token was sampled before its mask", ticket.plan.step)
            return None
        finally:
            ticket.spans.append((began, platform.mark()))

    @torch.inference_mode()
    def sample(self, ticket: Pending, masks: Masks | None) -> None:
        """Start sampling for a step that waited for its masks."""
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
        """Block until a launched step is done and return its results."""
        with section("collect"):
            result = collect(ticket)
        if self.roofline is not None and ticket.plan.num_tokens and not result.errors:
            try:
                self._measure(ticket.plan, result)
            except Exception as error:  # a failed measurement must not fail the step
                self.roofline = None
                self.watching.fail(error)
        for feature in self.runner.machine.features:
            feature.report(result)
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step from launch to result."""
        return self.collect(self.launch(plan))

    # -- helpers

    def _measure(self, plan: StepPlan, result: StepResult) -> None:
        """Add a step to the roofline totals; about once a second, move them to ``result``."""
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
        """Compute the rows of a step, then delete the prompt log-probabilities that its results
        contain."""
        pending.parts = self._isolated(rows, 0, compute)
        for part in pending.parts:
            for row in part.prompt_logprobs:
                self.runner.forget_scored(int(rows.slots[part.first + row]))

    def _isolated(self, rows: PlanRows, first: int, compute: Compute) -> list[StepPart]:
        """Compute rows; if that raises, compute each half of them by itself, down to single rows.
        ``first``: the index of the first row in the plan.

        A rerun is harmless until slots advance: it writes the same K and V to the same places, and
        plan order keeps the writer of a shared block before its readers."""
        num, message = len(rows.counts), ""
        try:
            return [compute(rows, first).placed(first)]
        except FATAL:  # the device is lost, or another rank, and with it every request
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
        """Upload the grammar masks. Returns the masks [M, words], and for each plan row the index
        of its first mask (-1: none).

        If masks are missing or of another size, all are replaced by masks that allow no token, so
        that their rows fail."""
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
            logger.error("step %d: the masks are missing or have the wrong size", plan.step)
            words = np.zeros((max(1, int(each.sum())), num_words), dtype=np.int32)
        return self.runner.machine.platform.upload(words), first_mask

    def _with_drawn(
        self, part: MaskPart, words: torch.Tensor, first_mask: Column
    ) -> tuple[torch.Tensor, Column]:
        """Add grammar masks for a rerun, so that each row sampled before its mask was known gets
        the same token again; rounding in a smaller batch might change it. Returns all masks, and
        the index of each plan row's first mask."""
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
    """Index of each sampled token's mask, -1: none. ``first_mask``: first index by plan row."""
    nth = np.arange(len(draws.rows)) - np.searchsorted(draws.rows, draws.rows)
    mine = first_mask[np.minimum(draws.rows, len(first_mask) - 1)]
    of_row: Column = np.where((mine >= 0) & (draws.slots >= 0), mine + nth, -1).astype(np.int32)
    return of_row


class Unfit(Exception):
    """A feature cannot compute a request of the step; the message gives the reason."""


class Advanced(Exception):
    """A failure after the slots had advanced: a rerun would advance them twice."""


class ForwardedBatch(NamedTuple):
    """Rows whose logits are computed and that are not sampled yet."""

    staged: Staged
    step: EagerStep | GraphedStep
    rows: Rows


class Runner:
    """Runs one model on one device. The subclass ``PoolingRunner`` returns vectors in place of
    tokens.

    Steps are launched without waiting for the device: sampled tokens stay in the slots, where the
    next step reads them. The host reads them when the step is collected.
    """

    samples = True
    """False for the runner of a model whose requests are all pooled."""

    def __init__(self, machine: Machine, max_model_len: int) -> None:
        self.machine = machine
        self._max_model_len = max_model_len
        self._graphed: dict[str, BySize[GraphedStep]] = {"": BySize()}  # by variant
        self._mixed: dict[str, BySize[MixedGraph]] = {"": BySize()}
        self._prompt_scores = PromptScores(partial(logits_alone, machine))
        self.repeats = Repeats(machine)
        self._unfit: dict[int, str] = {}  # slot -> why a feature cannot compute its request

    def begin(self, plan: StepPlan) -> list[SamplingSpec]:
        """Add and remove requests as the plan says. Returns the sampling options of new sequences.
        Raises ``RuntimeError`` for drafts that the recurrent states have no copies for."""
        machine = self.machine
        check_drafts(plan, machine.slots.state.num_copies)
        machine.live.apply(plan)
        for slot in plan.freed_slots:
            self.unseat(slot)
            self._prompt_scores.remove(slot)
            self._unfit.pop(slot, None)
        specs = [SamplingSpec.of(seq, machine.model.vocab_size) for seq in plan.new]
        for seq, spec in zip(plan.new, specs, strict=True):
            self.seat(seq, spec)
        for feature in machine.features:
            self._unfit |= _begin(feature, plan, machine.live)
        return specs

    def seat(self, seq: NewSeq, spec: SamplingSpec) -> None:
        """Let the sampler keep what a new sequence needs."""
        self.machine.sampler.add(seq, spec)

    def unseat(self, slot: int) -> None:
        """Let the sampler forget the sequence in a slot."""
        self.machine.sampler.remove(slot)

    def stage(
        self, rows: PlanRows, plan: StepPlan | None = None, specs: Sequence[SamplingSpec] = ()
    ) -> Staged:
        """Copy these rows' input to the device. Apply the changes of ``plan``, if given."""
        features = self.machine.features
        variant = "+".join(filter(None, [feature.variant(rows) for feature in features]))
        padding = self._padding_for(rows, variant)
        staged = self.machine.batches.stage(rows, plan, specs, padding, variant=variant)
        if staged.changes is not None:
            self.machine.slots.apply(*staged.changes)
        for feature in features:
            feature.fill(staged)
        return staged

    def compute(self, staged: Staged, *, is_made_up: bool = False) -> StepPart:
        """Compute staged rows and sample their tokens. ``is_made_up``: see ``forward``."""
        return self.draw(self.forward(staged, is_made_up=is_made_up))

    def forward(
        self, staged: Staged, *, is_made_up: bool = False, is_masked: bool = False
    ) -> ForwardedBatch:
        """Run the forward pass and compute the logits. ``is_made_up``: the rows are dummies for
        profiling; ``is_masked``: masks will be applied to the logits. Raises ``Unfit`` if a feature
        has refused one of the rows."""
        self.check_fit(staged.rows)
        step = self._step_for(staged, is_made_up, is_masked)
        return ForwardedBatch(staged, step, step.forward())

    def preview(self, forwarded: ForwardedBatch, ahead: Column) -> Column | None:
        """Sample the plan rows ``ahead`` before their grammar masks are known. Returns one token
        per row, -1 if the row has drafts or its mask could change the token; ``None`` if no row can
        be sampled early."""
        step, draws = forwarded.step, forwarded.staged.draws
        if not isinstance(step, EagerStep):
            return None
        first, end = (np.searchsorted(draws.rows, ahead, side) for side in ("left", "right"))
        first = first.clip(max=len(draws.rows) - 1)  # for a row that samples nothing
        can_preview = self.machine.sampler.can_preview
        slots = draws.slots[first].tolist()
        is_single = (end - first == 1) & np.fromiter(map(can_preview, slots), bool, len(slots))
        if not is_single.any():
            return None
        wanted: Column = np.full(len(draws.slots), -1, dtype=np.int32)
        wanted[first[is_single]] = draws.slots[first[is_single]]
        drawn: Column = np.where(is_single, step.preview(wanted)[first], -1).astype(np.int32)
        return drawn

    def draw(self, forwarded: ForwardedBatch, masks: RowMasks | None = None) -> PendingStep:
        """Edit the logits, sample, and advance the slots. Raises ``Advanced`` for an error after
        the slots advanced, when the rows must not be computed again."""
        machine, (staged, step, rows) = self.machine, forwarded
        self._remember_drafts(staged)
        may_leave = machine.platform.shares_memory and isinstance(step, EagerStep)
        drawing = machine.sampler.prepare(rows, staged.draws, masks, may_leave_masks=may_leave)
        with section("sample"):
            drawn = step.draw(drawing)
        try:
            step.notify(drawn)
            for feature in machine.features:
                follow(feature, staged.rows)
            scores = machine.sampler.finish(rows, staged.draws, drawing, drawn)
            wanted = [drawn] if drawing.sound is None else [drawn, drawing.sound]
            fetched = machine.platform.fetch(wanted + columns_of(scores))
        except FATAL:
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
        """Delete a slot's prompt log-probabilities once they have been delivered."""
        self._prompt_scores.remove(slot)
        self.machine.live.prompt_scored.discard(slot)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], mixed_sizes: Sequence[int] = ()) -> None:
        """Record graphs of decode steps (``sizes`` in rows) and of steps with prompt chunks or
        drafts (``mixed_sizes`` in tokens). Larger steps are launched kernel by kernel."""
        machine, longest = self.machine, self._max_model_len
        with machine.platform.recording():
            for variant in ("", *(one for each in machine.features for one in each.variants)):
                for feature in machine.features:
                    feature.pose(variant)
                self._graphed[variant] = record(machine, sizes, longest)
                self._mixed[variant] = record_mixed(machine, mixed_sizes, longest)
            for feature in machine.features:
                feature.pose("")
                feature.capture(sizes, mixed_sizes)

    @torch.inference_mode()
    def profile_run(self, num_tokens: int, num_seqs: int, context: int = 0) -> None:
        """Run a step of this many tokens with dummy sequences whose KV all goes to the null block.

        ``context``: number of tokens of each sequence that count as computed already.
        """
        num_computed = self.machine.slots.state.num_computed
        num_computed.fill_(context)
        num_seqs = min(num_seqs, num_tokens)
        slots = np.arange(num_seqs, dtype=np.int32)
        share, rest = divmod(num_tokens, num_seqs)
        counts = np.minimum(share + (slots >= num_seqs - rest), self._max_model_len - context)
        rows = PlanRows(slots, slots * 0 + context, counts.astype(np.int32), slots * 0 + 1)
        try:
            self.compute(self.machine.batches.stage(rows), is_made_up=True)
        finally:
            num_computed.zero_()

    def free(self) -> None:
        """Free the KV tensors and all recorded steps. Nothing can be computed afterwards."""
        self._graphed.clear()
        self._mixed.clear()
        self.machine.kv.clear()
        if self.machine.recorder is not None:
            self.machine.recorder.forget()

    def check_fit(self, rows: PlanRows) -> None:
        """Raise ``Unfit`` if a feature has refused one of the rows."""
        if self._unfit:
            check_fit(rows, self._unfit)

    # -- helpers

    def _padding_for(self, rows: PlanRows, variant: str) -> Padding:
        """Padding of the rows to the smallest graph or CPU recording that fits, if any does."""
        machine, num_rows, num_tokens = self.machine, len(rows.counts), int(rows.counts.sum())
        if not num_rows or any(feature.touches(rows) for feature in machine.features):
            return NO_PADDING
        only_decodes, is_scored = num_tokens == num_rows, machine.live.has_scored(rows.slots)
        if only_decodes and not is_scored:
            step = _smallest(self._graphed, variant, num_rows)
            if step is not None:
                return Padding(PaddingKind.DECODE_GRAPH, step.num_rows)
        graph = _smallest(self._mixed, variant, num_tokens)
        if graph is not None:
            return Padding(PaddingKind.MIXED_GRAPH, graph.num_rows)
        if machine.recorder is None or only_decodes or is_scored or rows.drafts is not None:
            return NO_PADDING
        size = machine.recorder.mixed_size(num_tokens)
        fits = 0 < size <= machine.batches.max_num_tokens
        return Padding(PaddingKind.CPU_REPLAY, size) if fits else NO_PADDING

    def _step_for(
        self, staged: Staged, is_made_up: bool, is_masked: bool
    ) -> EagerStep | GraphedStep:
        if staged.picked is not None:
            # The host looks at the largest logits, which on a GPU would block it.
            may_take_largest = self.machine.platform.shares_memory and not is_masked
            is_mixed, size = staged.padding.kind is PaddingKind.MIXED_GRAPH, staged.padding.size
            return EagerStep(
                self.machine,
                self._prompt_scores,
                staged,
                staged.picked,
                graph=_smallest(self._mixed, staged.variant, size) if is_mixed else None,
                is_made_up=is_made_up,
                may_take_largest=may_take_largest,
            )
        graphed = _smallest(self._graphed, staged.variant, staged.room.num_seqs)
        assert graphed is not None, "the step is staged for a size that is not recorded"
        return graphed

    def _remember_drafts(self, staged: Staged) -> None:
        """Write a step's drafts into the token histories, for penalties at later positions."""
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


def check_fit(rows: PlanRows, refused: Mapping[int, str]) -> None:
    """Raise ``Unfit`` if the slot of one of the rows is in ``refused``, with the reason."""
    for slot in rows.slots.tolist():
        if slot in refused:
            raise Unfit(refused[slot])


def logits_alone(machine: Machine, hidden: torch.Tensor, slot: int) -> torch.Tensor:
    """Logits [n, V] of hidden states [n, H] of the sequence in a slot, which are not those that the
    step is staged for."""
    with ExitStack() as contexts:
        for feature in machine.features:
            contexts.enter_context(feature.alone(slot, len(hidden)))
        return machine.model.logits(hidden)


def _smallest(graphs: Mapping[str, BySize[G]], variant: str, num_rows: int) -> G | None:
    """The smallest recorded graph of a variant for this many rows, if there is one."""
    by_size = graphs.get(variant)
    return None if by_size is None else by_size.smallest(num_rows)


def _begin(feature: Feature, plan: StepPlan, live: LiveSeqs) -> dict[int, str]:
    """Pass the plan to a feature. Returns the slots that the feature cannot compute, with the
    reasons: all slots of the step if the feature raises."""
    try:
        return dict(feature.begin(plan, live) or {})
    except FATAL:  # the device is lost, or another rank, and with it every request
        raise
    except Exception as error:
        message = f"{type(feature).__name__} raised {type(error).__name__}: {error}"
        logger.exception("step %d: %s", plan.step, message)
        return dict.fromkeys(plan.slots.tolist(), message)


def follow(feature: Feature, rows: PlanRows) -> None:
    """Run a feature's hook after sampling. An error is logged, and the sampled tokens stay
    valid."""
    try:
        feature.follow(rows)
    except FATAL:  # the device is lost, or another rank, and with it every request
        raise
    except Exception:
        logger.exception(
            "%s failed after a step; the step's tokens are kept", type(feature).__name__
        )


def columns_of(scores: Sequence[RowScores]) -> list[torch.Tensor]:
    """Return the log-probability tensors to copy to the host, three per entry of ``scores``."""
    return [column for group in scores for column in group.scored]
