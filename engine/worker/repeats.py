"""Decode steps on a CPU that only add a token to the sequences of the last step, in one replay.

Such a step needs no data from the host: lengths and tokens are on the device already. Its launches,
from the preparation of inputs to the choice of tokens, are joined once and then repeated, without
any other computation by Python or torch, which would take a quarter of a small model's step."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import torch

from engine.layers.batch import Output
from engine.messages.step import Column, StepPlan
from engine.sample.sampler import Drawing, Draws
from engine.worker.batches import Staged
from engine.worker.feature import Machine
from engine.worker.platform import Fetched
from engine.worker.steps import PendingStep, section
from kernels.cpu.recording import Launches, Recording, WholeStep
from kernels.slots import Drawn, Rows

logger = logging.getLogger("engine.worker")


class Repeats:
    """Computes the plans of one worker that repeat the last step."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        are_idle = all(feature.waits_for_part for feature in machine.features)
        self._may_repeat = machine.recorder is not None and are_idle

    def run(self, plan: StepPlan) -> PendingStep | None:
        """Compute a step if it repeats the last one and a step like it was recorded; otherwise do
        nothing and return ``None``."""
        machine, last = self._machine, self._machine.batches.last
        if last is None or not self._may_repeat or not self._is_repeat(plan, last):
            return None
        wanted: Output = "largest" if machine.wants_largest_only else "logits"
        assert machine.recorder is not None
        recording = machine.recorder.of_decodes(len(plan.slots), wanted, last.variant)
        if recording is None:
            return None
        lengths = plan.starts + plan.counts
        longest = max(lengths.tolist())
        if not recording.make_room(len(lengths), longest):
            return None
        with section("replay"):
            way = machine.sampler.way
            whole = recording.wholes.get(way)
            if whole is not None:
                whole.launches.repeat()
            elif (whole := self._try_first(recording, way, last, wanted, longest)) is None:
                return None
        draws, tokens = Draws(last.draws.rows, plan.slots, lengths), whole.tokens.copy()
        errors = {}
        if min(tokens.tolist()) < 0:
            errors = self._errors(recording, last, wanted, draws, tokens)
        fetched = Fetched([], machine.platform.mark())
        return PendingStep(0, draws, errors, [], [], fetched, tokens=tokens)

    def _is_repeat(self, plan: StepPlan, last: Staged) -> bool:
        """True if the plan decodes a token of each sequence of the last staged step, and changes
        nothing else."""
        num, live = len(plan.slots), self._machine.live
        return (
            plan.slots is last.rows.slots
            and plan.num_tokens == num
            and not (plan.new or plan.freed_slots or len(plan.block_ids) or plan.parts)
            and plan.proposals is None
            and self._machine.sampler.is_plain
            and not live.has_scored(plan.slots)
            and bool(np.count_nonzero(plan.samples) == num)
        )

    def _try_first(
        self, recording: Recording, way: str, last: Staged, wanted: Output, longest: int
    ) -> WholeStep | None:
        """Compute a step like `_first`. Returns ``None`` after an error; the step must then be
        computed otherwise, which finds the rows that fail."""
        try:
            recording.wholes[way] = self._first(recording, last, wanted, longest)
        except Exception:
            logger.exception("a decode step cannot be replayed as a whole")
            self._may_repeat = False
        return recording.wholes.get(way)

    def _first(self, recording: Recording, last: Staged, wanted: Output, longest: int) -> WholeStep:
        """Compute a step in three parts, and join their launches for later steps. longest: the
        largest number of keys of a sequence, for which memory is allocated."""
        _, prepared = Launches.of(last.room.prepare)
        recording.launch(replace(recording.meta, max_seq_len=longest))
        tokens, drawn = Launches.of(lambda: self._draw(recording, last, wanted))
        launches = prepared.joined([recording.launches, drawn])
        return WholeStep(launches, tokens.numpy(), owner=last.room)

    def _draw(self, recording: Recording, last: Staged, wanted: Output) -> torch.Tensor:
        """Sample from the outputs of a step, and store the tokens in the slots."""
        picked, step, found = last.room.decodes, last.step, recording.computed.output
        assert found is not None
        if wanted == "logits":
            found = self._machine.sampler.draw(Rows(found, picked.slots, picked.positions))
        drawn = Drawn(found, picked.slots, step.draw_starts, None)
        self._machine.slots.advance(step.slots, step.query_start, drawn)
        return found

    def _errors(
        self, recording: Recording, last: Staged, wanted: Output, draws: Draws, tokens: Column
    ) -> dict[int, str]:
        """Explain why rows got no token. Returns the error text of these rows."""
        (hidden, logits), picked = recording.computed, last.room.decodes
        drawing = Drawing({}, [], [], None, None, [], set())
        try:
            with torch.inference_mode():
                if wanted == "largest" or logits is None:
                    logits = self._machine.logits(hidden)
                rows = Rows(logits, picked.slots, picked.positions)
                self._machine.sampler.finish(rows, draws, drawing, torch.from_numpy(tokens))
        except Exception:  # the slots have advanced, so the step cannot be computed again
            logger.exception("invalid logits cannot be described")
        return drawing.errors
