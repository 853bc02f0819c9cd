"""The two ways to compute a step: call by call, or by replaying a graph of decodes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch

from engine.layers.batch import ForwardBatch
from engine.messages.step import EMPTY
from engine.worker.batches import Extent, Picked, PlanRows, Staged
from engine.worker.feature import Machine
from engine.worker.platform import Graph
from engine.worker.profiler import section
from engine.worker.prompt_scores import PromptScores
from engine.worker.results import NO_SCORES
from kernels.slots import Drawn, Rows


class EagerStep:
    """A staged step, launched call by call: chunks of prompts, and what no graph holds."""

    def __init__(
        self,
        machine: Machine,
        scores: PromptScores,
        staged: Staged,
        picked: Picked,
        *,
        is_made_up: bool = False,
    ) -> None:
        self._machine = machine
        self._scores = scores
        self._staged = staged
        self._picked = picked
        self._is_made_up = is_made_up
        self.prompt_logprobs = NO_SCORES

    def forward(self) -> Rows:
        """Logits of the rows behind which a token is drawn."""
        machine, picked, live = self._machine, self._picked, self._machine.live
        read = None if live.prompt_scored else picked.read
        batch = machine.batches.build_picked(self._staged, read)
        self._extend(batch)
        with section("forward"):
            self._hidden = machine.model.forward(batch, machine.kv)
        hidden = self._hidden.last
        if live.prompt_scored:
            self.prompt_logprobs = self._scores.collect(self._staged.rows, hidden, live)
            hidden = hidden if picked.read is None else hidden[picked.read.tokens]
        if picked.slots.shape[0]:
            with section("logits"):
                logits = machine.model.logits(hidden)
        else:  # the hidden state of one token was read all the same
            logits = hidden.new_empty((0, machine.model.vocab_size), dtype=torch.float32)
        self.rows = Rows(logits, picked.slots, picked.positions)
        return self.rows

    def draw(self) -> torch.Tensor:
        """Draw from the logits as they are now, and advance the slots; [R] int32."""
        tokens, step, picked = (
            self._machine.sampler.draw(self.rows),
            self._staged.step,
            self._picked,
        )
        drawn = Drawn(tokens, picked.slots, step.draw_starts, picked.drafts)
        self._machine.slots.advance(step, drawn)
        return tokens

    def tell(self, drawn: torch.Tensor) -> None:
        """Pass what was computed and drawn to the features."""
        if not self._is_made_up:
            for feature in self._machine.features:
                feature.drawn(self._staged.rows, self._hidden, drawn)

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


class GraphedStep:
    """A decode step of so many rows, recorded once: up to the logits, and what follows them.

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

    def draw(self) -> torch.Tensor:
        """Draw from the logits as they are now, and advance the slots; [R] int32."""
        self._graphs[1].replay()
        return self._drawn

    def tell(self, drawn: torch.Tensor) -> None:
        """Nothing to do: no feature touches its rows."""


class GraphedSteps:
    """The graphs of all sizes. A step takes the smallest that holds it; the rest is padding."""

    def __init__(self, steps: Sequence[GraphedStep] = ()) -> None:
        self._steps = sorted(steps, key=lambda step: step.num_rows)
        self.sizes = [step.num_rows for step in self._steps]

    def holding(self, num_rows: int) -> GraphedStep | None:
        """The smallest that has so many rows; ``None`` if they are too many for any."""
        index = bisect.bisect_left(self.sizes, num_rows)
        return self._steps[index] if index < len(self._steps) else None


def record(machine: Machine, sizes: Sequence[int], max_model_len: int) -> GraphedSteps:
    """Record decode steps of these sizes, the largest first: the others fit into its memory."""
    if not sizes:
        return GraphedSteps()
    most, platform = max(sizes), machine.platform
    logits = platform.zeros((most, machine.model.vocab_size), torch.float32)
    drawn = platform.zeros((most,), torch.int32)
    return GraphedSteps(
        [
            _recorded(machine, logits[:size], drawn[:size], max_model_len)
            for size in sorted(set(sizes), reverse=True)
        ]
    )


def _recorded(
    machine: Machine, logits: torch.Tensor, drawn: torch.Tensor, max_model_len: int
) -> GraphedStep:
    """The step of as many rows as there is room for; while it is recorded they are padding."""
    size = len(drawn)
    room = machine.batches.stage(PlanRows(EMPTY, EMPTY, EMPTY, EMPTY), padded=size).room
    step = room.step
    rows = Rows(logits, step.draw_slots, machine.batches.seq_lens(size))
    # A graph's launches are those of the longest sequences there may be.
    extent = Extent(num_decodes=size, max_query_len=1, max_seq_len=max_model_len)

    def forward() -> None:
        batch = machine.batches.build(room, extent)
        machine.model.logits(machine.model.forward(batch, machine.kv).last, out=logits)

    def draw() -> None:
        drawn.copy_(machine.sampler.draw(rows))
        machine.slots.advance(step, Drawn(drawn, step.draw_slots, step.draw_starts, None))

    graphs = (machine.platform.graph(), machine.platform.graph())
    for graph, work in zip(graphs, (forward, draw), strict=True):
        graph.capture(work)
    return GraphedStep(graphs, rows, drawn)
