"""The worker of a stage, which has some layers of a model and computes them for each plan.

    first stage    tokens ──> layers ──> send
    middle stage   receive ──> layers ──> send
    last stage     receive ──> layers ──> logits, tokens ──> send the result

All stages get every plan. Only the last one samples, so the tokens that others compute come with
plans: those of new sequences, and ``StepPlan.new_token_ids``. What the other stages do not know
either, how many drafts of a sequence were accepted, follows from the start of its next row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.config.engine import ResolvedConfig
from engine.config.model import ModelInfo
from engine.config.pooling import PoolingSpec
from engine.ipc.plans import encode
from engine.messages.step import Column, Masks, NewSeq, StepPlan, StepResult, check_parts
from engine.models.decoder import NativeDecoder
from engine.models.model import Model
from engine.models.stages import Pipeline
from engine.observe.guard import Failures
from engine.parallel.channel import Outbox, Receiver
from engine.parallel.meeting import Stoppable
from engine.parallel.stages import Links
from engine.sample.edits import SamplingSpec
from engine.worker.batches import PlanRows, Staged
from engine.worker.device import make_platform, resolve_device
from engine.worker.feature import Feature, Machine
from engine.worker.known_tokens import KnownTokens
from engine.worker.rank_report import log_sums
from engine.worker.rank_times import Waited
from engine.worker.runner import Driver, Runner, check_fit, follow
from engine.worker.slots import Slots
from engine.worker.steps import EagerStep, FailedStep, Pending, StepPart
from engine.worker.worker import ModelWorker
from kernels.slots import Drawn

MOST_OF_A_REASON = 300  # characters of why a row is not computed, which later stages get


class Entering:
    """The hidden states with which the layers of a later stage begin."""

    def __init__(self, machine: Machine, width: int, source: Receiver) -> None:
        """width: of hidden states; source: the stage before."""
        self._source = source
        shape, dtype = (machine.batches.max_num_tokens, width), machine.model.dtype
        # What was received stays as it is: layers change what they get, and rows that fail are
        # computed again. A batch is always at the same place, for recorded steps.
        self._kept = torch.zeros(shape, dtype=dtype)
        self._place = machine.platform.zeros(shape, dtype)
        self._begins: dict[int, int] = {}  # index of the first token of each slot's row
        self._plan: StepPlan | None = None  # whose hidden states are not received yet
        self._refused: dict[int, str] = {}  # slots of the plan's rows that a former stage lacks

    def begin(self, plan: StepPlan) -> None:
        """Prepare for a plan. Its hidden states are awaited when they are needed."""
        if plan.num_tokens:
            begins = plan.counts.cumsum() - plan.counts
            self._begins = dict(zip(plan.slots.tolist(), begins.tolist(), strict=True))
            self._plan, self._refused = plan, {}

    def of(self, rows: PlanRows, num_tokens: int) -> torch.Tensor:
        """The hidden states [num_tokens, H] of rows of the plan, followed by those of padding, in
        memory that layers may change. Raises ``RankError``, or ``Unfit`` if a former stage could
        not compute one of the rows."""
        if refused := self.finish():
            check_fit(rows, refused)
        if len(rows.slots):
            begin, count = self._begins.get(int(rows.slots[0]), 0), int(rows.counts.sum())
            self._place[:count].copy_(self._kept[begin : begin + count])
        return self._place[:num_tokens]

    def finish(self) -> Mapping[int, str]:
        """Receive the hidden states of the plan, unless they were: no row needs them if all have
        failed, and those of the next plan come after them. Returns the slots of rows that a former
        stage could not compute, and why. Raises ``RankError``."""
        if self._plan is not None:
            plan, self._plan = self._plan, None
            note = self._source.receive_into(plan.step, bytes_of(self._kept[: plan.num_tokens]))
            self._refused = note_of(note)
        return self._refused


class LowerRunner(Runner):
    """Runs the layers of a stage that is not the last. No sampler hears of its requests."""

    def begin(self, plan: StepPlan) -> list[SamplingSpec]:
        """Add and remove requests as the plan says. Returns the options of new sequences."""
        specs = super().begin(plan)
        self.machine.live.prompt_scored.clear()  # by the last stage
        return specs

    def seat(self, seq: NewSeq, spec: SamplingSpec) -> None:
        """Do nothing: no tokens are sampled here."""

    def unseat(self, slot: int) -> None:
        """Do nothing, see ``seat``."""

    def refuse(self, refused: Mapping[int, str]) -> None:
        """Compute no rows of these slots, which a former stage could not compute."""
        self._unfit = {**refused, **self._unfit}

    def refused(self, rows: PlanRows) -> dict[int, str]:
        """The slots of rows that are not computed, and why."""
        slots = rows.slots.tolist() if self._unfit else []
        return {slot: self._unfit[slot] for slot in slots if slot in self._unfit}

    def fit_parts(self, rows: PlanRows) -> list[range]:
        """Adjacent rows that can be computed."""
        if not self._unfit:
            return [range(len(rows.slots))]
        found: list[range] = []
        for index, slot in enumerate(rows.slots.tolist()):
            if slot in self._unfit:
                continue
            if found and found[-1].stop == index:
                found[-1] = range(found[-1].start, index + 1)
            else:
                found.append(range(index, index + 1))
        return found

    def pass_on(self, staged: Staged) -> torch.Tensor:
        """Compute staged rows and advance their slots. Returns hidden states [N, H], which the next
        step overwrites."""
        machine, (picked, step) = self.machine, (staged.picked, staged.step)
        assert picked is not None, "no steps of stages are recorded as graphs"
        eager = EagerStep(machine, self._prompt_scores, staged, picked, reads_all=True)
        hidden = eager.hidden()[: len(staged.tokens.slots)]
        # No draft counts as accepted yet: ``follow_starts`` corrects this with the next plan.
        drawn = Drawn(torch.zeros_like(picked.slots), picked.slots, step.draw_starts, None)
        machine.slots.advance(step.slots, step.query_start, drawn)
        for feature in machine.features:
            follow(feature, staged.rows)
        return hidden

    def compute(self, staged: Staged, *, is_made_up: bool = False) -> StepPart:
        """Compute dummy rows, to measure memory and compile kernels."""
        assert is_made_up and staged.picked is not None
        picked = staged.picked
        step = EagerStep(
            *(self.machine, self._prompt_scores, staged, picked), is_made_up=True, reads_all=True
        )
        step.hidden()
        return FailedStep(0, "dummy rows sample nothing")


@dataclass(slots=True)
class Passed(Pending):
    """A launched step of a stage that is not the last. ``hidden``: what it has computed [N, H].
    ``refused``: slots of rows that it could not compute, and why."""

    hidden: torch.Tensor | None = None
    refused: Mapping[int, str] = field(default_factory=dict)


class LowerDriver(Driver):
    """Computes the plans of a stage that is not the last. Any error in a step ends the group, as
    other stages compute the same rows."""

    def __init__(self, runner: LowerRunner, failures: Failures) -> None:
        super().__init__(runner, failures)
        self._lower = runner

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Passed:
        """Compute the layers of a step."""
        runner, platform = self._lower, self.runner.machine.platform
        began = platform.mark()
        specs = runner.begin(plan)
        rows, hidden = self._rows_of(plan), None
        staged = runner.stage(rows, plan, specs)
        if isinstance(entering := runner.machine.entering, Entering):
            runner.refuse(entering.finish())
        if len(plan.rows):
            parts, whole = runner.fit_parts(rows), [range(len(plan.rows))]
            hidden = runner.pass_on(staged) if parts == whole else self._hidden_of(rows, parts)
        began_and_ended = [(began, platform.mark())]
        return Passed(plan, began_and_ended, hidden=hidden, refused=runner.refused(rows))

    def _hidden_of(self, rows: PlanRows, parts: Sequence[range]) -> torch.Tensor:
        """Hidden states [N, H] of all rows, of which only some are computed, in several steps. The
        others are 0, and later stages are notified that they fail."""
        model = self.runner.machine.model
        assert isinstance(model, NativeDecoder)
        ends = rows.counts.cumsum().tolist()
        hidden = torch.zeros((ends[-1], model.spec.hidden_size), dtype=model.dtype)
        for part in parts:
            mine = self._lower.stage(rows.part(part.start, part.stop))
            first = ends[part.start] - int(rows.counts[part.start])
            hidden[first : ends[part.stop - 1]] = self._lower.pass_on(mine)
        return hidden

    def preview(self, ticket: Pending) -> Column | None:
        """Return ``None``: the last stage samples."""
        return None

    def sample(self, ticket: Pending, masks: Masks | None) -> None:
        """Do nothing: the last stage samples."""


@dataclass(slots=True)
class Ticket:
    """A step that a stage has launched. ``result``: once it is known."""

    pending: Pending
    result: StepResult | None = None


class StageWorker(ModelWorker):
    """The worker of a stage of a pipeline; ``pipeline``: which one, ``links``: to other ranks."""

    def __init__(
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        features: Sequence[Feature],
        failures: Failures,
        links: Links,
        pipeline: Pipeline,
        pooling: PoolingSpec | None = None,
    ) -> None:
        platform = make_platform(resolve_device(config.device))
        ranks = links.collectives
        super().__init__(config, info, platform, features, failures, pooling, ranks, pipeline)
        self.capabilities |= {"new_token_ids"}
        self._links = links
        self._results = None if links.results is None else Outbox(links.results)
        self._place = pipeline
        self._known = KnownTokens(config.scheduler.max_num_seqs)
        self._entering: Entering | None = None
        self._has_drafts = False
        self.step_seconds = float("inf")
        """How long another rank may take for a step, once this one has started."""

    @property
    def is_first(self) -> bool:
        """True for the stage that begins with tokens."""
        return self._place.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage that samples."""
        return self._place.index == self._place.count - 1

    def allocate(self, num_blocks: int) -> None:
        super().allocate(num_blocks)
        if not self.is_last:
            self.driver.roofline = None  # only the last stage reports
        if self.collectives is not None:
            log_sums(self.collectives, self.platform)
        self._links.limit(self.step_seconds)

    def launch(self, plan: StepPlan) -> Ticket:  # type: ignore[override]
        """Compute a step as far as this stage goes, and send what follows from it. Raises
        ``RuntimeError`` for a plan that it cannot compute, ``RankError`` if another rank fails."""
        check_parts(plan, self.capabilities)
        brought = self._known.read(plan)
        with self.platform.current():
            self._follow(plan, brought)
            ticket = Ticket(self.driver.launch(plan))
            if self._entering is not None:
                self._entering.finish()
            self._send_hidden(plan, ticket.pending)
        if plan.masks is None:
            self._send_result(ticket)
        return ticket

    def preview(self, ticket: Ticket) -> Column | None:  # type: ignore[override]
        """Sample a step before its grammar masks are ready; ``None`` if impossible."""
        return self.driver.preview(ticket.pending)

    def sample(self, ticket: Ticket, masks: Masks | None) -> None:  # type: ignore[override]
        """Start sampling for a step that waited for its masks."""
        with self.platform.current():
            self.driver.sample(ticket.pending, masks)
        self._send_result(ticket)

    def collect(self, ticket: Ticket) -> StepResult:  # type: ignore[override]
        """Block until a launched step is done. Returns its result, which is empty in all stages but
        the last, and sends it to rank 0 unless it was sent."""
        if ticket.result is None:
            self._finish(ticket)
        assert ticket.result is not None
        if self._results is not None:
            self._results.send(ticket.result.step)
        return ticket.result

    def shutdown(self) -> None:
        super().shutdown()
        self._links.close()

    def waited(self) -> Waited:
        """What this rank has waited for the others of its stage, and for the stage before."""
        ranks, source = self._links.collectives, self._links.entering
        return Waited(
            0 if ranks is None else ranks.waited_ns,
            0 if source is None else round(source.waited_seconds * 1e9),
        )

    @property
    def collectives(self) -> Stoppable | None:
        """The operations of the ranks of this stage, if there are several."""
        return self._links.collectives

    # -- helpers

    def _make_driver(self, machine: Machine, model: Model) -> Driver:
        assert isinstance(model, NativeDecoder)
        source = self._links.entering
        if source is not None:
            self._entering = Entering(machine, model.spec.hidden_size, source)
            machine = machine._replace(entering=self._entering)
        if self.is_last:
            return super()._make_driver(machine, model)
        longest = self.config.scheduler.max_model_len
        return LowerDriver(LowerRunner(machine, longest), self._failures)

    def _graph_sizes(self) -> tuple[list[int], list[int]]:
        return [], []  # what enters a stage would have to be recorded, too

    def _follow(self, plan: StepPlan, brought: Column | None) -> None:
        """Take from a plan what this stage does not know from its own steps."""
        slots = self.driver.runner.machine.slots
        if self._entering is not None:
            self._entering.begin(plan)
        if self.is_last:
            return
        upload = self.platform.upload
        self._has_drafts |= plan.drafts is not None
        if self._has_drafts:
            follow_starts(slots, plan, upload)
        if self.is_first and brought is not None and plan.new_token_ids is not None:
            columns = plan.slots, plan.starts, plan.new_token_ids
            slots.remember(*(upload(column[brought]) for column in columns))

    def _send_hidden(self, plan: StepPlan, pending: Pending) -> None:
        target = self._links.leaving
        if target is not None and isinstance(pending, Passed) and pending.hidden is not None:
            message = bytes_of(pending.hidden)
            if pending.refused:
                message = np.concatenate([message, note_about(pending.refused)])
            target.send(plan.step, message)
            pending.hidden = None

    def _send_result(self, ticket: Ticket) -> None:
        """Send the result of a step that is sampled, if it is done already, as on a CPU, and there
        is room for it. Rank 0 reads none before it collects the step, and until then may wait for
        this rank to read a plan, or to answer a call."""
        if self.is_last and self.platform.shares_memory:
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        ticket.result = self.driver.collect(ticket.pending)
        if self._results is not None:
            data = np.frombuffer(encode(ticket.result), np.uint8)
            self._results.add(ticket.result.step, data)


def follow_starts(
    slots: Slots, plan: StepPlan, upload: Callable[[NDArray[np.generic]], torch.Tensor]
) -> None:
    """Let slots begin where the rows of a plan do. A stage that does not sample has advanced them
    as if no draft was accepted, and the states of accepted drafts are in the next copies."""
    is_old = ~np.isin(plan.slots, [seq.slot for seq in plan.new])
    rows, starts = upload(plan.slots[is_old].astype(np.int64)), upload(plan.starts[is_old])
    state = slots.state
    if state.copy is not None:
        num_accepted = starts - state.num_computed[rows]
        state.copy[rows] = (state.copy[rows] + num_accepted).remainder(state.num_copies)
    state.num_computed[rows] = starts


def note_about(refused: Mapping[int, str]) -> NDArray[np.uint8]:
    """What is sent after hidden states about the slots of rows that a stage could not compute, and
    why."""
    short = {slot: reason[:MOST_OF_A_REASON] for slot, reason in refused.items()}
    return np.frombuffer(msgspec.msgpack.encode(short), np.uint8)


def note_of(message: NDArray[np.uint8]) -> dict[int, str]:
    """The contents of ``note_about``; {} for no bytes."""
    return msgspec.msgpack.decode(message.tobytes(), type=dict[int, str]) if len(message) else {}


def bytes_of(values: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor [n, H], on the host."""
    found: NDArray[np.uint8] = values.cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
    return found
