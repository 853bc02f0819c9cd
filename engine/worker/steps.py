"""Ways to compute a step and to read its results. Decode steps may be recorded as graphs, other
steps without their last layer; what is not recorded is launched kernel by kernel."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import record_function

from engine.layers.batch import ForwardBatch, Output
from engine.messages.requests import TokenLogprobs
from engine.messages.step import EMPTY, Column, StepPlan, StepResult
from engine.sample.logprobs import Scored
from engine.sample.sampler import Drawing, Draws, Sampler, why_none_left, why_unsound
from engine.worker.batches import (
    Extent,
    Padding,
    PaddingKind,
    Picked,
    PlanRows,
    Room,
    Staged,
)
from engine.worker.feature import Machine
from engine.worker.platform import Fetched, Graph, Mark
from engine.worker.prompt_scores import PromptScores
from kernels.slots import Drawn, Rows

NOTHING: AbstractContextManager[None] = nullcontext()
PromptLogprobs = Mapping[int, list[TokenLogprobs]]  # by row of the step they came with


NO_SCORES: PromptLogprobs = MappingProxyType({})
NO_ROWS = PlanRows(EMPTY, EMPTY, EMPTY, EMPTY)


def is_recording() -> bool:
    """True if any torch profiler is recording in this process, ours or another."""
    return torch_profiler._is_profiler_enabled


def section(name: str) -> AbstractContextManager[object]:
    """Mark a part of a step in a profiler's trace. Costs 0.2 us if none is recording."""
    return record_function(name) if is_recording() else NOTHING


def advance(machine: Machine, room: Room, drawn: torch.Tensor) -> None:
    """Store the sampled tokens of a decode step in the slots of its sequences. ``drawn``: the
    tokens [R] int32."""
    step = room.step
    tokens = Drawn(drawn, step.draw_slots, step.draw_starts, None)
    machine.slots.advance(step.slots, step.query_start, tokens)


class EagerStep:
    """A step that is launched kernel by kernel. With a ``MixedGraph``, all layers but the last are
    replayed instead. The last layer computes only the tokens whose logits are needed."""

    def __init__(  # noqa: PLR0913
        self,
        machine: Machine,
        scores: PromptScores,
        staged: Staged,
        picked: Picked,
        *,
        graph: MixedGraph | None = None,
        is_made_up: bool = False,
        may_take_largest: bool = False,
        reads_all: bool = False,
        token_types: torch.Tensor | None = None,
    ) -> None:
        """may_take_largest: True if only the sampler reads the logits; greedy sampling then needs
        just their argmax. reads_all: the hidden states of all tokens are needed. token_types: see
        ``ForwardBatch``."""
        self._machine = machine
        self._graph = graph
        only_largest = may_take_largest and machine.wants_largest_only
        self._wanted: Output = "largest" if only_largest else "logits"
        self._computed: torch.Tensor | None = None  # ``Hidden.output``
        self._largest: torch.Tensor | None = None
        self._early: torch.Tensor | None = None  # tokens sampled before the masks were known
        self._scores = scores
        self._staged = staged
        self._picked = picked
        self._is_made_up = is_made_up
        self._token_types = token_types
        self._is_scored = reads_all or machine.live.has_scored(staged.rows.slots)
        self.prompt_logprobs = NO_SCORES

    def hidden(self) -> torch.Tensor:
        """Compute the hidden states of the rows that sample a token, or of all tokens."""
        with section("forward"):
            return self._forward()

    def forward(self) -> Rows:
        """Compute the logits of the rows that sample a token."""
        machine, picked, live = self._machine, self._picked, self._machine.live
        hidden = self.hidden()
        if self._is_scored:
            self.prompt_logprobs = self._scores.collect(self._staged.rows, hidden, live)
        if picked.read is not None and self._is_scored:
            hidden = hidden[picked.read.tokens]
        if picked.slots.shape[0]:
            with section("logits"):
                logits = self._logits_of(hidden)
        else:  # no row samples; ``draws_of`` still reads one token
            logits = hidden.new_empty((0, machine.sampler.vocabulary.width), dtype=torch.float32)
        self.rows = Rows(logits, picked.slots, picked.positions)
        return self.rows

    def preview(self, slots: Column) -> Column:
        """Sample tokens without grammar masks, for rows whose entry in ``slots`` is not -1. Returns
        tokens [R] int32. ``draw`` later samples only the rows in ``drawing.edited`` again."""
        self._early = self._machine.sampler.draw(self.rows._replace(slots=torch.from_numpy(slots)))
        return self._early.numpy()

    def draw(self, drawing: Drawing | None = None) -> torch.Tensor:
        """Sample the step's tokens and store them in the slots. Returns tokens [R] int32."""
        step, picked = self._staged.step, self._picked
        tokens = self._tokens(drawing)
        drawn = Drawn(tokens, picked.slots, step.draw_starts, picked.drafts)
        self._machine.slots.advance(step.slots, step.query_start, drawn)
        return tokens

    def notify(self, drawn: torch.Tensor) -> None:
        """Pass hidden states and sampled tokens to the features. Does nothing in a step of dummy
        rows, or if a graph computed the lower layers."""
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
        """Run the model. Returns the hidden states of the tokens whose logits are needed, or those
        of all tokens if prompt log-probabilities are wanted."""
        machine, staged = self._machine, self._staged
        read = None if self._is_scored else self._picked.read
        batch = machine.batches.build_picked(staged, read)
        batch.token_types = self._token_types
        if machine.entering is not None:
            batch.stream = machine.entering.of(staged.rows, len(batch.input_ids))
        if self._graph is not None:
            stream = self._graph.replay(len(staged.tokens.slots))
            return machine.model.last_layer(stream, batch, machine.kv)
        self._extend(batch)
        self._hidden = machine.model.forward(batch, machine.kv)
        self._computed = self._hidden.output
        return self._hidden.last

    def _logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [R, V] from hidden states. Returns [0, V] if the sampler needs only the
        argmax and the model found it without storing logits."""
        model, computed = self._machine.model, self._computed
        if self._wanted == "largest":
            largest = model.largest(hidden) if computed is None else computed
            # A negative entry is an invalid row; its logits are then needed for the error message.
            if largest is not None and np.count_nonzero(largest.numpy() < 0) == 0:
                self._largest = largest.clone()  # a later step overwrites what is recorded
                return hidden.new_empty((0, model.vocab_size), dtype=torch.float32)
        elif computed is not None:
            return computed
        return self._machine.logits(hidden)

    def _extend(self, batch: ForwardBatch) -> None:
        rows, features = self._staged.rows, self._machine.features
        if self._is_made_up:
            for feature in features:
                feature.profile(batch)
            return
        touching = [feature for feature in features if feature.touches(rows)]
        batch.aux_layers = tuple(sorted({layer for f in touching for layer in f.aux_layers}))
        for feature in features:
            feature.extend(batch, rows)
        # If every token samples one, all rows are decodes, with or without drafts.
        are_decodes = self._picked.read is None
        is_replay = self._staged.padding.kind is PaddingKind.CPU_REPLAY
        if is_replay or (are_decodes and not touching):
            batch.recorder, batch.variant = self._machine.recorder, self._staged.variant
            batch.output = self._wanted if are_decodes and not self._is_scored else None


class GraphedStep:
    """A recorded decode step of a fixed number of rows, as two graphs: up to the logits, and from
    sampling on (one for each way to sample). The host may change logits between the two."""

    prompt_logprobs = NO_SCORES

    def __init__(
        self,
        forward: Graph,
        draws: Mapping[str, Graph],
        sampler: Sampler,
        rows: Rows,
        drawn: torch.Tensor,
    ) -> None:
        """draws: by ``Sampler.way``."""
        self._forward = forward
        self._draws = draws
        self._sampler = sampler
        self.rows = rows
        self._drawn = drawn

    @property
    def num_rows(self) -> int:
        return len(self._drawn)

    def forward(self) -> Rows:
        """Logits of every row, padding included."""
        with section("forward"):
            self._forward.replay()
        return self.rows

    def draw(self, drawing: Drawing | None = None) -> torch.Tensor:
        """Sample the step's tokens and store them in the slots. Returns tokens [R] int32."""
        self._draws[self._sampler.way].replay()
        return self._drawn

    def notify(self, drawn: torch.Tensor) -> None:
        """Does nothing: no feature touches the rows of a graph."""


class MixedGraph:
    """A graph of all layers but the last, for any step of at most ``num_rows`` tokens: decodes,
    prompt chunks and drafts. The last layer is launched kernel by kernel, since what it computes
    differs by step."""

    def __init__(self, graph: Graph, stream: torch.Tensor) -> None:
        self._graph = graph
        self._stream = stream

    @property
    def num_rows(self) -> int:
        """The number of tokens for which the graph was recorded (in mixed steps, a row is a
        token)."""
        return len(self._stream)

    def replay(self, num_tokens: int) -> torch.Tensor:
        """Replay the graph. Returns the residual stream below the last layer, [num_tokens, H]; the
        next replay of any mixed graph overwrites it."""
        self._graph.replay()
        return self._stream[:num_tokens]


G = TypeVar("G", GraphedStep, MixedGraph)


class BySize(Generic[G]):
    """Recorded graphs by number of rows. A step is padded to the smallest one that fits."""

    def __init__(self, graphs: Sequence[G] = ()) -> None:
        self._graphs: list[G] = sorted(graphs, key=lambda graph: graph.num_rows)
        self.sizes: list[int] = [graph.num_rows for graph in self._graphs]

    def smallest(self, num_rows: int) -> G | None:
        """The smallest graph of at least this many rows; ``None`` if all are too small."""
        index = bisect.bisect_left(self.sizes, num_rows)
        return self._graphs[index] if index < len(self._graphs) else None


def record(machine: Machine, sizes: Sequence[int], max_model_len: int) -> BySize[GraphedStep]:
    """Record graphs of decode steps with these numbers of rows. The largest comes first; the
    smaller ones reuse its memory."""
    if not sizes:
        return BySize()
    most, platform = max(sizes), machine.platform
    logits = platform.zeros((most, machine.sampler.vocabulary.width), torch.float32)
    drawn = platform.zeros((most,), torch.int32)
    return BySize(
        [
            _recorded(machine, logits[:size], drawn[:size], max_model_len)
            for size in sorted(set(sizes), reverse=True)
        ]
    )


def record_mixed(machine: Machine, sizes: Sequence[int], max_model_len: int) -> BySize[MixedGraph]:
    """Record graphs of all layers but the last, for steps of these numbers of tokens."""
    if not sizes:
        return BySize()
    graphs: list[MixedGraph] = []
    few = _lower_layers(machine, min(sizes), max_model_len)()  # for shape and dtype only
    whole = few.new_empty((max(sizes), *few.shape[1:]))
    for size in sorted(set(sizes), reverse=True):
        graph, place = machine.platform.graph(), whole[:size]
        graph.capture(partial(_copy, place, _lower_layers(machine, size, max_model_len)))
        graphs.append(MixedGraph(graph, place))
    return BySize(graphs)


class FailedStep(NamedTuple):
    """The error of a plan's row that failed even when it was computed alone. ``first``: the row's
    index in the plan."""

    first: int
    message: str
    prompt_logprobs: PromptLogprobs = NO_SCORES

    def placed(self, first: int) -> FailedStep:
        """This failure, as that of plan row ``first``."""
        return self._replace(first=first)

    def read(self, result: StepResult) -> tuple[Column, Column]:
        """Enter the error into ``result``. Returns no token, see ``PendingStep.read``."""
        result.fail(self.first, self.message)
        return EMPTY, EMPTY


class PendingStep(NamedTuple):
    """A range of plan rows whose sampled tokens are being copied to the host. ``first``: index of
    the first row."""

    first: int
    draws: Draws
    errors: dict[int, str]  # by sampled row (``draws``)
    checked: list[int]  # sampled rows whose logits were checked before they were edited
    scored: list[list[int]]  # sampled rows of each group of log-probabilities
    fetched: Fetched  # tokens; validity of checked rows, if any; three tensors for each group
    prompt_logprobs: PromptLogprobs = NO_SCORES
    barred: Collection[int] = ()  # rows with an error whose own parameters forbid all tokens
    tokens: Column | None = None  # the sampled tokens, if they are on the host already

    def placed(self, first: int) -> PendingStep:
        """A copy whose rows begin at plan row ``first``."""
        return self._replace(first=first)

    def read(self, result: StepResult) -> tuple[Column, Column]:
        """Enter the results of these rows into ``result``, except their tokens. Returns two arrays,
        with one entry per accepted token: its row in the plan, and the token."""
        self.fetched.done.synchronize()
        draws, columns = self.draws, iter(self.fetched.tensors)
        rows = draws.rows + np.int32(self.first) if self.first else draws.rows
        drawn = next(columns).numpy() if self.tokens is None else self.tokens
        valid = next(columns).tolist() if self.checked else []
        accepted = drawn >= 0
        all_accepted = np.count_nonzero(accepted) == len(accepted)
        if draws.is_padded:
            accepted &= draws.slots >= 0
        if not all_accepted:
            _fail(self, drawn, valid, rows, result)
        for scored in self.scored:
            entries = Scored(*(next(columns) for _ in range(3))).entries()
            for row, entry in zip(scored, entries, strict=True):
                if accepted[row] and int(rows[row]) not in result.errors:
                    result.logprobs.setdefault(int(rows[row]), []).append(entry)
        for row, scores in self.prompt_logprobs.items():
            result.prompt_logprobs[row + self.first] = scores
        if all_accepted and not draws.is_padded:
            return rows, drawn
        return rows[accepted], drawn[accepted]


class StepPart(Protocol):
    """The computed rows of a plan, from index ``first`` on, whose results are being copied to the
    host."""

    @property
    def first(self) -> int: ...

    @property
    def prompt_logprobs(self) -> PromptLogprobs: ...

    def placed(self, first: int) -> StepPart:
        """A copy whose rows begin at plan row ``first``."""
        ...

    def read(self, result: StepResult) -> tuple[Column, Column]:
        """Enter the results into ``result``, see ``PendingStep.read``."""
        ...


@dataclass(slots=True)
class Pending:
    """A launched step. ``parts``: the step's rows in order; one part, or several if some rows
    failed.

    ``spans``: (begin, end) marks of each period in which the device works on the step. There are
    several if the step waits for masks, since the device may be idle meanwhile."""

    plan: StepPlan
    spans: list[tuple[Mark, Mark]]
    parts: Sequence[StepPart] = field(default_factory=list)


def collect(pending: Pending) -> StepResult:
    """Block until a step is done and return its results."""
    plan = pending.plan
    result = StepResult(plan.step, EMPTY, EMPTY, {}, {}, {})
    found = [part.read(result) for part in pending.parts]
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
    """Record a decode step of ``len(drawn)`` rows, all of which are padding during the
    recording."""
    size = len(drawn)
    padding = Padding(PaddingKind.DECODE_GRAPH, size)
    room = machine.batches.stage(NO_ROWS, padding=padding).room
    rows = Rows(logits, room.step.draw_slots, machine.batches.seq_lens(size))
    # A graph must serve the longest sequences possible.
    extent = Extent(num_decodes=size, max_query_len=1, max_seq_len=max_model_len)

    def forward() -> None:
        batch = machine.batches.build(room, extent)
        machine.logits(machine.model.forward(batch, machine.kv).last, out=logits)

    def draw(way: str) -> None:
        drawn.copy_(machine.sampler.draw(rows, way=way))
        advance(machine, room, drawn)

    ways = machine.sampler.vocabulary.ways
    first, draws = machine.platform.graph(), {way: machine.platform.graph() for way in ways}
    first.capture(forward)
    for way, graph in draws.items():
        graph.capture(partial(draw, way))
    return GraphedStep(first, draws, machine.sampler, rows, drawn)


def _lower_layers(machine: Machine, size: int, max_model_len: int) -> Callable[[], torch.Tensor]:
    """Return a function that runs all layers but the last on ``size`` tokens, all padding."""
    machine.batches.stage(NO_ROWS, padding=Padding(PaddingKind.MIXED_GRAPH, size))
    room = machine.batches.mixed_room(size)
    extent = Extent(0, max_query_len=size, max_seq_len=max_model_len, is_mixed=True)

    def stream() -> torch.Tensor:
        return machine.model.lower_layers(machine.batches.build(room, extent), machine.kv)

    return stream


def _copy(place: torch.Tensor, made: Callable[[], torch.Tensor]) -> None:
    place.copy_(made())


def _fail(
    part: PendingStep, drawn: Column, valid: list[bool], rows: Column, result: StepResult
) -> None:
    """Enter an error into ``result`` for each sampled row that got no token, except after a
    rejected draft. ``valid``: for each row of ``part.checked``, whether its logits were valid;
    ``rows``: plan row of each sampled row.

    A plan row keeps its first error."""
    was_valid = dict(zip(part.checked, valid, strict=True))
    for row in np.flatnonzero((drawn == -1) & (part.draws.slots >= 0)).tolist():
        index, position = int(rows[row]), int(part.draws.positions[row])
        if index in result.errors:
            continue
        is_barred = row in part.barred
        if (why := part.errors.get(row)) is None:
            is_barred = was_valid.get(row, False)
            why = (why_none_left if is_barred else why_unsound)(position)
        result.fail(index, why, "no_token_is_allowed" if is_barred else "request_failed")
