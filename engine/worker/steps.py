"""Ways to compute a step, and its results: call by call, or by replaying what was recorded, of
decodes the whole step, of all others the layers below the last."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import record_function

from engine.layers.batch import ForwardBatch
from engine.messages.requests import TokenLogprobs
from engine.messages.step import EMPTY, Column, StepPlan, StepResult
from engine.sample.logprobs import Scored
from engine.sample.sampler import Drawing, Draws, why_none_left, why_unsound
from engine.worker.batches import Extent, Picked, PlanRows, Room, Staged
from engine.worker.feature import Machine
from engine.worker.platform import Fetched, Graph, Mark
from engine.worker.prompt_scores import PromptScores
from kernels.slots import Drawn, Rows

NOTHING: AbstractContextManager[None] = nullcontext()
PromptLogprobs = Mapping[int, list[TokenLogprobs]]  # by row of the step they came with


NO_SCORES: PromptLogprobs = MappingProxyType({})


def is_recording() -> bool:
    """Is any torch profiler recording in this process, ours or another?"""
    return torch_profiler._is_profiler_enabled


def section(name: str) -> AbstractContextManager[object]:
    """A part of a step, as a bar in the trace. Costs a fifth of a microsecond without one."""
    return record_function(name) if is_recording() else NOTHING


def advance(machine: Machine, room: Room, drawn: torch.Tensor) -> None:
    """Advance the slots of a decode step by one token each [R] int32."""
    step = room.step
    tokens = Drawn(drawn, step.draw_slots, step.draw_starts, None)
    machine.slots.advance(step.slots, step.query_start, tokens)


class EagerStep:
    """A staged step, launched call by call: what no graph holds whole. Chunks of prompts and drafts
    replay all layers but the last, of which only the rows that are read are computed."""

    def __init__(
        self,
        machine: Machine,
        scores: PromptScores,
        staged: Staged,
        picked: Picked,
        *,
        graph: MixedGraph | None = None,
        is_made_up: bool = False,
        may_take_largest: bool = False,
    ) -> None:
        """may_take_largest: nothing but the draw will look at the logits."""
        self._machine = machine
        self._graph = graph
        self._may_take_largest = may_take_largest
        self._largest: torch.Tensor | None = None
        self._early: torch.Tensor | None = None  # tokens drawn before masks came
        self._scores = scores
        self._staged = staged
        self._picked = picked
        self._is_made_up = is_made_up
        self._is_scored = machine.live.has_scored(staged.rows.slots)
        self.prompt_logprobs = NO_SCORES

    def forward(self) -> Rows:
        """Logits of the rows after which a token is drawn."""
        machine, picked, live = self._machine, self._picked, self._machine.live
        with section("forward"):
            hidden = self._forward()
        if self._is_scored:
            self.prompt_logprobs = self._scores.collect(self._staged.rows, hidden, live)
        if picked.read is not None and self._is_scored:
            hidden = hidden[picked.read.tokens]
        if picked.slots.shape[0]:
            with section("logits"):
                logits = self._logits_of(hidden)
        else:  # the hidden state of one token was read all the same
            logits = hidden.new_empty((0, machine.model.vocab_size), dtype=torch.float32)
        self.rows = Rows(logits, picked.slots, picked.positions)
        return self.rows

    def preview(self, slots: Column) -> Column:
        """Draw from the logits as they are now, of rows whose slot is not -1; [R] int32. Such a
        token stands unless its row is edited."""
        self._early = self._machine.sampler.draw(self.rows._replace(slots=torch.from_numpy(slots)))
        return self._early.numpy()

    def draw(self, drawing: Drawing | None = None) -> torch.Tensor:
        """Draw from the logits as they are now, and advance the slots; [R] int32."""
        step, picked = self._staged.step, self._picked
        tokens = self._tokens(drawing)
        drawn = Drawn(tokens, picked.slots, step.draw_starts, picked.drafts)
        self._machine.slots.advance(step.slots, step.query_start, drawn)
        return tokens

    def tell(self, drawn: torch.Tensor) -> None:
        """Pass what was computed and drawn to the features; none touches the rows of a graph."""
        if not self._is_made_up and self._graph is None:
            for feature in self._machine.features:
                feature.drawn(self._staged.rows, self._hidden, drawn)

    def _tokens(self, drawing: Drawing | None) -> torch.Tensor:
        if self._largest is not None:
            return self._largest
        sampler, early, rows = self._machine.sampler, self._early, self.rows
        edited, masks = ([], None) if drawing is None else (drawing.edited, drawing.masks)
        if early is None:
            return sampler.draw(rows, masks)
        again = early < 0
        again[edited] = True
        late = sampler.draw(rows._replace(slots=rows.slots.where(again, -1)), masks)
        return late.where(again, early)

    def _forward(self) -> torch.Tensor:
        """Hidden states of the tokens that are read, or of all tokens."""
        machine, staged = self._machine, self._staged
        read = None if self._is_scored else self._picked.read
        batch = machine.batches.build_picked(staged, read)
        if self._graph is not None:
            stream = self._graph.replay(len(staged.tokens.slots))
            return machine.model.last_layer(stream, batch, machine.kv)
        self._extend(batch)
        self._hidden = machine.model.forward(batch, machine.kv)
        return self._hidden.last

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits; none if their largest is all that is wanted, and was found without them."""
        model = self._machine.model
        if self._may_take_largest and self._machine.sampler.wants_largest_only:
            largest = model.largest(hidden)
            # Why a row is not sound, its logits tell.
            if largest is not None and np.count_nonzero(largest.numpy() < 0) == 0:
                self._largest = largest
                return hidden.new_empty((0, model.vocab_size), dtype=torch.float32)
        return model.logits(hidden)

    def _extend(self, batch: ForwardBatch) -> None:
        rows, features = self._staged.rows, self._machine.features
        if self._is_made_up:
            for feature in features:
                feature.profile(batch)
            return
        asking = [feature for feature in features if feature.aux_layers and feature.touches(rows)]
        batch.aux_layers = tuple(sorted({layer for f in asking for layer in f.aux_layers}))
        for feature in features:
            feature.extend(batch, rows)
        # Where every token draws one, all rows are decodes, with drafts or without.
        are_decodes = self._picked.read is None
        if self._staged.filled or (are_decodes and not any(f.touches(rows) for f in features)):
            batch.recorder = self._machine.recorder


class GraphedStep:
    """A decode step of this many rows, recorded once: up to the logits, and what follows them.

    Between the two there is time to change logits.
    """

    prompt_logprobs = NO_SCORES

    def __init__(self, graphs: tuple[Graph, Graph], rows: Rows, drawn: torch.Tensor) -> None:
        self._graphs = graphs
        self.rows = rows
        self._drawn = drawn

    @property
    def num_rows(self) -> int:
        return len(self._drawn)

    def forward(self) -> Rows:
        """Logits of every row, padding included."""
        with section("forward"):
            self._graphs[0].replay()
        return self.rows

    def draw(self, drawing: Drawing | None = None) -> torch.Tensor:
        """Draw from the logits as they are now, and advance the slots; [R] int32."""
        self._graphs[1].replay()
        return self._drawn

    def tell(self, drawn: torch.Tensor) -> None:
        """Nothing to do: no feature touches its rows."""


class MixedGraph:
    """All layers but the last of any step of this many tokens at most: chunks of prompts among
    decodes, and drafts. What is read of the last layer, and drawn, depends on the step."""

    def __init__(self, graph: Graph, stream: torch.Tensor) -> None:
        self._graph = graph
        self._stream = stream

    @property
    def num_rows(self) -> int:
        """Tokens."""
        return len(self._stream)

    def replay(self, num_tokens: int) -> torch.Tensor:
        """The residual stream below the last layer [N, H], of this many tokens; the next replay of
        any of these graphs writes over it."""
        self._graph.replay()
        return self._stream[:num_tokens]


G = TypeVar("G", GraphedStep, MixedGraph)


class BySize(Generic[G]):
    """The graphs of all sizes. A step takes the smallest that holds it; the rest is padding."""

    def __init__(self, graphs: Sequence[G] = ()) -> None:
        self._graphs: list[G] = sorted(graphs, key=lambda graph: graph.num_rows)
        self.sizes: list[int] = [graph.num_rows for graph in self._graphs]

    def holding(self, num_rows: int) -> G | None:
        """The smallest that has this many rows; ``None`` if they are too many for any."""
        index = bisect.bisect_left(self.sizes, num_rows)
        return self._graphs[index] if index < len(self._graphs) else None


def record(machine: Machine, sizes: Sequence[int], max_model_len: int) -> BySize[GraphedStep]:
    """Record decode steps of these sizes, the largest first: the others fit into its memory."""
    if not sizes:
        return BySize()
    most, platform = max(sizes), machine.platform
    logits = platform.zeros((most, machine.model.vocab_size), torch.float32)
    drawn = platform.zeros((most,), torch.int32)
    return BySize(
        [
            _recorded(machine, logits[:size], drawn[:size], max_model_len)
            for size in sorted(set(sizes), reverse=True)
        ]
    )


def record_mixed(machine: Machine, sizes: Sequence[int], max_model_len: int) -> BySize[MixedGraph]:
    """Record the layers below the last of steps of this many tokens, the largest first."""
    if not sizes:
        return BySize()
    graphs: list[MixedGraph] = []
    few = _lower_layers(machine, min(sizes), max_model_len)()  # many would take memory once more
    whole = few.new_empty((max(sizes), *few.shape[1:]))
    for size in sorted(set(sizes), reverse=True):
        graph, place = machine.platform.graph(), whole[:size]
        graph.capture(partial(_copy, place, _lower_layers(machine, size, max_model_len)))
        graphs.append(MixedGraph(graph, place))
    return BySize(graphs)


class FailedStep(NamedTuple):
    """A row of the plan whose step raised, alone."""

    first: int
    message: str
    prompt_logprobs: PromptLogprobs = NO_SCORES


class PendingStep(NamedTuple):
    """Rows whose tokens are on their way to the host, counted from one of the plan's."""

    first: int
    draws: Draws
    errors: dict[int, str]  # by row of the draws
    checked: list[int]  # rows of the draws that were looked at before they were edited
    scored: list[list[int]]  # rows of the draws, of each group of log-probabilities
    fetched: Fetched  # tokens; were the checked ones sound, if any; three columns for each group
    prompt_logprobs: PromptLogprobs = NO_SCORES
    barred: Collection[int] = ()  # rows with an error whose own parameters mask all tokens


@dataclass(slots=True)
class Pending:
    """A launched step. ``parts`` are rows in order: one part, or more if some rows failed.

    ``spans``: when the device began and ended what it does for it, in order. Between launch and
    draw of a step that waits for masks, the device may wait too.
    """

    plan: StepPlan
    spans: list[tuple[Mark, Mark]]
    parts: list[PendingStep | FailedStep] = field(default_factory=list)


def collect(pending: Pending) -> StepResult:
    """Wait for a step and read its results."""
    plan = pending.plan
    result = StepResult(plan.step, EMPTY, EMPTY, {}, {}, {})
    found = [_read(part, result) for part in pending.parts]
    pending.spans[-1][1].synchronize()
    result.seconds = sum(began.elapsed_time(ended) for began, ended in pending.spans) / 1e3
    if len(found) == 1:
        rows, tokens = found[0]
    else:
        rows = np.concatenate([EMPTY, *(part[0] for part in found)])
        tokens = np.concatenate([EMPTY, *(part[1] for part in found)])
    if result.errors:
        is_good = np.isin(rows, list(result.errors), invert=True)
        rows, tokens = rows[is_good], tokens[is_good]
    result.token_ids = tokens
    is_one_each = len(tokens) == len(plan.rows) and plan.drafts is None
    result.counts = (
        plan.samples.copy()
        if is_one_each
        else np.bincount(rows, minlength=len(plan.rows)).astype(np.int32)
    )
    return result


def _recorded(
    machine: Machine, logits: torch.Tensor, drawn: torch.Tensor, max_model_len: int
) -> GraphedStep:
    """The step of as many rows as there is room for; while it is recorded they are padding."""
    size = len(drawn)
    room = machine.batches.stage(PlanRows(EMPTY, EMPTY, EMPTY, EMPTY), padded=size).room
    rows = Rows(logits, room.step.draw_slots, machine.batches.seq_lens(size))
    # A graph's launches are those of the longest sequences there may be.
    extent = Extent(num_decodes=size, max_query_len=1, max_seq_len=max_model_len)

    def forward() -> None:
        batch = machine.batches.build(room, extent)
        machine.model.logits(machine.model.forward(batch, machine.kv).last, out=logits)

    def draw() -> None:
        drawn.copy_(machine.sampler.draw(rows))
        advance(machine, room, drawn)

    graphs = (machine.platform.graph(), machine.platform.graph())
    for graph, work in zip(graphs, (forward, draw), strict=True):
        graph.capture(work)
    return GraphedStep(graphs, rows, drawn)


def _lower_layers(machine: Machine, size: int, max_model_len: int) -> Callable[[], torch.Tensor]:
    """A pass of this many tokens below the last layer; while it is recorded they are padding."""
    machine.batches.stage(PlanRows(EMPTY, EMPTY, EMPTY, EMPTY), mixed=size)
    room = machine.batches.mixed_room(size)
    extent = Extent(0, max_query_len=size, max_seq_len=max_model_len, is_mixed=True)

    def stream() -> torch.Tensor:
        return machine.model.lower_layers(machine.batches.build(room, extent), machine.kv)

    return stream


def _copy(place: torch.Tensor, made: Callable[[], torch.Tensor]) -> None:
    place.copy_(made())


def _read(part: PendingStep | FailedStep, result: StepResult) -> tuple[Column, Column]:
    """Enter the results of a part. Returns the plan rows of tokens that stand, and the tokens."""
    if isinstance(part, FailedStep):
        result.fail(part.first, part.message)
        return EMPTY, EMPTY
    part.fetched.done.synchronize()
    draws, columns = part.draws, iter(part.fetched.tensors)
    rows = draws.rows + np.int32(part.first) if part.first else draws.rows
    drawn = next(columns).numpy()
    sound = next(columns).tolist() if part.checked else []
    stands = drawn >= 0
    is_whole = np.count_nonzero(stands) == len(stands)
    if draws.is_padded:
        stands &= draws.slots >= 0
    if not is_whole:
        _fail(part, drawn, sound, rows, result)
    for scored in part.scored:
        entries = Scored(*(next(columns) for _ in range(3))).entries()
        for row, entry in zip(scored, entries, strict=True):
            if stands[row] and int(rows[row]) not in result.errors:
                result.logprobs.setdefault(int(rows[row]), []).append(entry)
    for row, scores in part.prompt_logprobs.items():
        result.prompt_logprobs[row + part.first] = scores
    if is_whole and not draws.is_padded:
        return rows, drawn
    return rows[stands], drawn[stands]


def _fail(
    part: PendingStep, drawn: Column, sound: list[bool], rows: Column, result: StepResult
) -> None:
    """Enter why rows of the draws have no token. ``sound``: whether each checked draw was;
    ``rows``: those of the plan. A row of the plan keeps its first error.

    Errors after a rejected draft are ignored: those rows were not needed.
    """
    was_sound = dict(zip(part.checked, sound, strict=True))
    for row in np.flatnonzero((drawn == -1) & (part.draws.slots >= 0)).tolist():
        index, position = int(rows[row]), int(part.draws.positions[row])
        if index in result.errors:
            continue
        is_barred = row in part.barred
        if (why := part.errors.get(row)) is None:
            is_barred = was_sound.get(row, False)
            why = (why_none_left if is_barred else why_unsound)(position)
        result.fail(index, why, "no_token_is_allowed" if is_barred else "request_failed")
