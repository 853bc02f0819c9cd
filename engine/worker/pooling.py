"""Computes pooled requests, whose result is a vector in place of a sampled token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from engine.config.pooler import PoolingMode
from engine.messages.pooling import TOKEN_TASKS, PoolingParams, PoolingTask
from engine.messages.step import EMPTY, Column, StepPlan, StepResult
from engine.messages.vectors import PooledPart, Vectors
from engine.models.pooling import Head
from engine.sample.edits import SamplingSpec
from engine.worker.batches import PlanRows, Staged
from engine.worker.feature import Machine
from engine.worker.platform import Fetched
from engine.worker.runner import FATAL, Advanced, Runner, follow
from engine.worker.steps import NO_SCORES, EagerStep, PromptLogprobs, section
from kernels.slots import Drawn


class PoolingRunner(Runner):
    """Runs a model whose requests are all pooled. Its steps are launched kernel by kernel."""

    samples = False

    def __init__(self, machine: Machine, max_model_len: int, head: Head) -> None:
        super().__init__(machine, max_model_len)
        self._head = head
        self._gathered = Gathered(machine, head.spec.mode)
        self._by_token: dict[int, list[torch.Tensor]] = {}  # by slot: results of chunks, in order

    def begin(self, plan: StepPlan) -> list[SamplingSpec]:
        for slot in plan.freed_slots:
            self._by_token.pop(slot, None)
        return super().begin(plan)

    def compute(self, staged: Staged, *, is_made_up: bool = False) -> PooledStep:
        """Compute staged rows and the results of those whose last token is among them. Raises
        ``Advanced`` for an error after the slots advanced."""
        self.check_fit(staged.rows)
        rows, machine = staged.rows, self.machine
        options = [self._options_of(slot, is_made_up) for slot in rows.slots.tolist()]
        by_token = [place for place, own in enumerate(options) if own.is_by_token]
        assert staged.picked is not None
        step = EagerStep(
            machine,
            self._prompt_scores,
            staged,
            staged.picked,
            is_made_up=is_made_up,
            reads_all=bool(by_token) or self._gathered.reads_all,
            token_types=self._token_types(staged, options),
        )
        hidden = step.hidden()
        with section("pool"):
            gathered = self._gathered.gather(staged, hidden)
            results = self._head(gathered.done)
            chunks = self._chunks(staged, hidden, options, by_token)
        nothing = torch.zeros_like(staged.picked.slots)  # in place of sampled tokens
        drawn = Drawn(nothing, staged.picked.slots, staged.step.draw_starts, None)
        machine.slots.advance(staged.step.slots, staged.step.query_start, drawn)
        try:
            self._gathered.keep(gathered)
            self._by_token |= chunks
            for feature in machine.features:
                follow(feature, rows)
            ended = np.flatnonzero(rows.samples).tolist()
            parts = [chunks[int(rows.slots[each])] for each in ended if options[each].is_by_token]
            fetched = machine.platform.fetch([results, *(torch.cat(part) for part in parts)])
        except FATAL:
            raise
        except Exception as error:
            raise Advanced(f"{type(error).__name__}: {error}") from error
        return PooledStep(0, self._head, ended, [options[each] for each in ended], fetched)

    def _options_of(self, slot: int, is_made_up: bool) -> ResultOptions:
        """The options of the request in a slot; the model's own task in dummy and warm-up steps."""
        seq = None if is_made_up else self.machine.live.seqs[slot]
        params = PoolingParams() if seq is None or seq.pooling is None else seq.pooling
        task = params.task or self._head.spec.task
        return ResultOptions(
            task, params.use_activation, params.dimensions, params.second_text_start
        )

    def _token_types(self, staged: Staged, options: Sequence[ResultOptions]) -> torch.Tensor | None:
        """The type of each token [N]: 1 in the second text of a pair; ``None``: all are 0."""
        if all(own.second_text is None for own in options):
            return None
        never = self._max_model_len
        seconds = [never if w.second_text is None else w.second_text for w in options]
        begins = np.repeat(np.array(seconds), staged.rows.counts)
        types = (staged.tokens.positions >= begins).astype(np.int64)
        return self.machine.platform.upload(types)

    def _chunks(
        self,
        staged: Staged,
        hidden: torch.Tensor,
        options: Sequence[ResultOptions],
        places: Sequence[int],
    ) -> dict[int, list[torch.Tensor]]:
        """Compute the results of each token in these rows. Returns, by slot, the results of all
        chunks so far. A chunk that is run again replaces its results."""
        rows, starts = staged.rows, staged.tokens.query_start
        chunks = {}
        for place in places:
            slot, start = int(rows.slots[place]), int(rows.starts[place])
            own = hidden[int(starts[place]) : int(starts[place + 1])].float()
            results = self._head(own, options[place].task)
            known = torch.cat(self._by_token[slot])[:start] if start else results[:0]
            chunks[slot] = [known, results]
        return chunks


class ResultOptions(NamedTuple):
    """The task of a pooled request, and the last operation on its result."""

    task: PoolingTask
    use_activation: bool | None
    dimensions: int | None
    second_text: int | None = None  # index of its first token, in a pair of texts

    @property
    def is_by_token(self) -> bool:
        return self.task in TOKEN_TASKS


class PooledStep(NamedTuple):
    """Results of plan rows that are being copied to the host. ``first``: index of the first row."""

    first: int
    head: Head
    rows: list[int]  # with results, counted from ``first``
    options: list[ResultOptions]  # of each
    fetched: Fetched  # results of all rows [R, D], then those of each row by token
    prompt_logprobs: PromptLogprobs = NO_SCORES

    def placed(self, first: int) -> PooledStep:
        """A copy whose rows begin at plan row ``first``."""
        return self._replace(first=first)

    def read(self, result: StepResult) -> tuple[Column, Column]:
        """Enter the results into ``result``. Returns no tokens."""
        self.fetched.done.synchronize()
        pooled, *by_token = self.fetched.tensors
        left, alike = iter(by_token), defaultdict(list)
        found: list[tuple[int, Vectors]] = []
        for place, (row, own) in enumerate(zip(self.rows, self.options, strict=True)):
            if own.is_by_token:
                found.append((self.first + row, self._activated(next(left), own)))
            else:
                alike[own._replace(second_text=None)].append((place, self.first + row))
        for own, pairs in alike.items():
            places, rows = zip(*pairs, strict=True)
            found += zip(rows, self._activated(pooled[list(places)], own), strict=True)
        sound = []
        for row, values in sorted(found, key=itemgetter(0)):
            if np.isfinite(values).all():
                sound.append((row, values))
            else:
                result.fail(row, "the model's result has NaN or infinities")
        if sound:
            result.pooled = PooledPart.of([*entries_of(result.pooled), *sound])
        return EMPTY, EMPTY

    def _activated(self, values: torch.Tensor, own: ResultOptions) -> Vectors:
        activated: Vectors = self.head.activate(
            values, own.task, use_activation=own.use_activation, dimensions=own.dimensions
        ).numpy()
        return activated


def entries_of(pooled: PooledPart | None) -> list[tuple[int, Vectors]]:
    """The rows and results of a part, [vectors, width] each; [] without one."""
    if pooled is None:
        return []
    return [(row, values.reshape(-1, width)) for row, width, values in pooled.entries()]


class Chunk(NamedTuple):
    """The vectors of a step's rows."""

    slots: torch.Tensor  # [S]
    sums: torch.Tensor | None  # [S, H] float32, over all tokens so far, if that is needed
    done: torch.Tensor  # [R, H] float32, of the rows whose last token is in the step


class Gathered:
    """Makes the vector of each request from the hidden states of its tokens, over all chunks of its
    prompt: that of its last or first token, or their mean."""

    def __init__(self, machine: Machine, mode: PoolingMode) -> None:
        self._mode = mode
        self._machine = machine
        self._held: torch.Tensor | None = None  # [slots, H] float32

    @property
    def reads_all(self) -> bool:
        """True if the vectors depend on more tokens than the last."""
        return self._mode != "last"

    def gather(self, staged: Staged, hidden: torch.Tensor) -> Chunk:
        """Pool the hidden states of a step: [N, H] if they are of all tokens, else [R, H]."""
        rows, tokens, upload = staged.rows, staged.tokens, self._machine.platform.upload
        slots, ended = staged.step.slots[: len(rows.slots)].long(), np.flatnonzero(rows.samples)
        starts = tokens.query_start.astype(np.int64)
        if self._mode == "last":
            if len(hidden) == starts[-1]:
                hidden = hidden[upload(starts[1:][ended] - 1)]
            return Chunk(slots, None, hidden[: len(ended)].float())
        if self._mode == "mean":
            states, counts = hidden.float(), rows.counts.astype(np.int64)
            if rows.starts.any() and self._held is not None:
                states, counts = self._after_held(slots, states, rows), counts + 1
            sums = torch.segment_reduce(states, "sum", lengths=upload(counts), unsafe=True)
        else:
            sums = hidden[upload(starts[:-1])].float()
            if rows.starts.any() and self._held is not None:
                sums = self._later(slots, sums, rows)
        done = sums[upload(ended.astype(np.int64))]
        if self._mode == "mean":
            num_tokens = (rows.starts + rows.counts)[ended].astype(np.float32)
            done = done / upload(num_tokens)[:, None]
        return Chunk(slots, sums, done)

    def keep(self, chunk: Chunk) -> None:
        """Store the sums of rows, for their next chunks."""
        if chunk.sums is None:
            return
        if self._held is None:
            num = len(self._machine.slots.state.num_computed)
            self._held = chunk.sums.new_zeros((num, chunk.sums.shape[1]))
        self._held[chunk.slots] = chunk.sums

    def _after_held(
        self, slots: torch.Tensor, states: torch.Tensor, rows: PlanRows
    ) -> torch.Tensor:
        """Put the sum over a row's earlier chunks, or zeros, in front of its hidden states, so that
        they are added in the order of the tokens, however a prompt was cut. Returns [N + R, H]."""
        upload, places = self._machine.platform.upload, np.arange(len(rows.counts))
        after = np.repeat(places + 1, rows.counts) + np.arange(len(states))
        first = np.cumsum(rows.counts) - rows.counts + places
        joined = states.new_empty((len(states) + len(places), states.shape[1]))
        joined[upload(after)] = states
        joined[upload(first.astype(np.int64))] = self._later(
            slots, states.new_zeros((len(places), states.shape[1])), rows
        )
        return joined

    def _later(self, slots: torch.Tensor, firsts: torch.Tensor, rows: PlanRows) -> torch.Tensor:
        """What earlier chunks left for each row, or that of ``firsts`` if this is its first."""
        assert self._held is not None
        is_later = self._machine.platform.upload(rows.starts > 0)[:, None]
        return torch.where(is_later, self._held[slots], firsts)
