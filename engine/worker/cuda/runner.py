"""DeviceRunner: launches steps and collects them, without waiting in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.errors import ConfigError
from engine.messages.step import Masks, StepPlan, StepResult, check_parts
from engine.worker.batch import Columns
from engine.worker.cuda.batches import Staged
from engine.worker.cuda.results import Drawn, Failed, Pending, bring_home, collect
from engine.worker.cuda.steps import EagerStep, GraphedStep, GraphedSteps, Machine, record
from engine.worker.profiler import section
from engine.worker.prompt_scores import PromptScores


class Settled(Exception):
    """Something failed when the slots had advanced: to run again would advance them twice."""


class DeviceRunner:
    """Computes plans on one device; an `Executor`.

    Steps are launched one behind the other: what a step samples stays in the slots, where the next
    one finds it. The host reads it when the step is collected.
    """

    capabilities: frozenset[str] = frozenset()

    def __init__(self, machine: Machine, max_model_len: int) -> None:
        self.machine = machine
        self.states = machine.live
        self.kv = machine.kv
        self._max_model_len = max_model_len
        self._graphed = GraphedSteps()
        self._prompt_scores = PromptScores(machine.model.logits)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending:
        """Start a step; failing rows fail alone."""
        check_parts(plan, self.capabilities)
        began = self.machine.platform.mark()
        self._reseat(plan)
        columns = Columns.of(plan)
        staged = self.machine.batches.stage(columns, plan, padded=self._size_for(columns))
        assert staged.changes is not None
        self.machine.slots.apply(staged.changes)
        parts = self._isolate(columns, staged) if len(plan.rows) else []
        self._forget_scored(plan, parts)
        return Pending(plan, began, self.machine.platform.mark(), parts)

    def collect(self, ticket: Pending) -> StepResult:
        """Sleep until a launched step is done and read what it brought."""
        with section("collect"):
            return collect(ticket)

    def sample(self, ticket: Any, masks: Masks | None) -> None:
        """No plan waits for masks: see ``capabilities``."""
        raise AssertionError("a step waits for masks, which this worker cannot read")

    def call(self, name: str, *args: Any) -> Any:
        """A method by name: there are none."""
        raise ConfigError(f"{name} is not available")

    def shutdown(self) -> None:
        """Let go of what was opened: nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """A step from its launch to its result."""
        return self.collect(self.launch(plan))

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Record decode steps of these numbers of rows; larger ones stay as they are."""
        self._graphed = record(self.machine, sizes, self._max_model_len)

    @torch.inference_mode()
    def rehearse(self, num_tokens: int, num_seqs: int, context: int = 0) -> None:
        """A step of so many tokens, of made-up sequences that all lie in the null block.

        ``context``: tokens of each that are computed already.
        """
        self.machine.slots.state.num_computed.fill_(context)
        num_seqs = min(num_seqs, num_tokens)
        slots = np.arange(num_seqs, dtype=np.int32)
        share, rest = divmod(num_tokens, num_seqs)
        counts = np.minimum(share + (slots >= num_seqs - rest), self._max_model_len - context)
        columns = Columns(slots, slots * 0 + context, counts.astype(np.int32), slots * 0 + 1)
        self._run(self.machine.batches.stage(columns))
        self.machine.slots.state.num_computed.zero_()

    def _reseat(self, plan: StepPlan) -> None:
        self.states.apply(plan)
        for slot in plan.freed_slots:
            self.machine.sampler.remove(slot)
            self._prompt_scores.remove(slot)
        for seq in plan.new:
            self.machine.sampler.add(seq)

    def _size_for(self, columns: Columns) -> int:
        """Rows of the graph that computes these; 0 if none does."""
        counts = columns.counts
        if self.states.prompt_scored or not len(counts) or (counts != 1).any():
            return 0
        step = self._graphed.holding(len(counts))
        return 0 if step is None else step.num_rows

    def _run(self, staged: Staged) -> Drawn:
        """Forward, logits, draw; what was drawn is on its way home at the end."""
        machine = self.machine
        step = self._step_for(staged)
        with section("forward"):
            rows = step.forward()
        drawing = machine.sampler.prepare(rows, staged.draws)
        with section("sample"):
            chosen = step.sample()
        try:
            scores = machine.sampler.finish(drawing, chosen)
            drawn = bring_home(machine.platform, staged.draws, drawing, chosen, scores)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise Settled(f"{type(error).__name__}: {error}") from error
        return drawn._replace(prompt_logprobs=step.prompt_logprobs)

    def _step_for(self, staged: Staged) -> EagerStep | GraphedStep:
        if staged.picked is not None:
            return EagerStep(self.machine, self._prompt_scores, staged, staged.picked)
        graphed = self._graphed.holding(len(staged.step.slots))
        assert graphed is not None, "staged for a size that is not recorded"
        return graphed

    def _isolate(self, columns: Columns, staged: Staged, first: int = 0) -> list[Drawn | Failed]:
        """Run staged rows, of which ``first`` is the plan's; if that raises, in halves.

        Running again is harmless until slots advance: the same K and V are written to the same
        places, and plan order keeps the writer of a shared block before its readers.
        """
        try:
            return [self._run(staged)._replace(first=first)]
        except torch.AcceleratorError:  # the device is lost, and with it everybody
            raise
        except Settled as error:
            return [Failed(first + row, str(error)) for row in range(len(columns.counts))]
        except Exception as error:
            num = len(columns.counts)
            if num == 1:
                return [Failed(first, f"{type(error).__name__}: {error}")]
        parts: list[Drawn | Failed] = []
        for start, end in ((0, num // 2), (num // 2, num)):
            half = columns.part(start, end)
            again = self.machine.batches.stage(half, padded=self._size_for(half))
            parts += self._isolate(half, again, first + start)
        return parts

    def _forget_scored(self, plan: StepPlan, parts: Sequence[Drawn | Failed]) -> None:
        """Prompt scores that are on their way: only now, as a step may have been run again."""
        for part in parts:
            for row in part.prompt_logprobs:
                slot = int(plan.slots[part.first + row])
                self._prompt_scores.remove(slot)
                self.states.prompt_scored.discard(slot)
