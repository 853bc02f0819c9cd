"""The two ways to compute a step: call by call, or by replaying a graph of decodes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.layers.batch import last_tokens
from engine.messages.step import EMPTY
from engine.models.model import Model
from engine.worker.batch import Columns
from engine.worker.cuda.batches import Batches, Extent, Picked, Staged
from engine.worker.cuda.graphs import Graph
from engine.worker.cuda.platform import Platform
from engine.worker.cuda.results import NO_SCORES
from engine.worker.cuda.sampler import DeviceSampler
from engine.worker.cuda.slots import Slots
from engine.worker.prompt_scores import PromptScores
from engine.worker.states import LiveSeqs
from kernels.slots import Rows


class Machine(NamedTuple):
    """A model on a device, and the owners of all that a step needs."""

    model: Model
    kv: list[torch.Tensor]
    platform: Platform
    live: LiveSeqs  # what the scheduler sent, on the host
    slots: Slots  # tokens, lengths, block tables, parameters, on the device
    sampler: DeviceSampler  # what requests do to their logits
    batches: Batches  # the step that is being sent


class EagerStep:
    """A staged step, launched call by call: chunks of prompts, and what no graph holds."""

    def __init__(
        self, machine: Machine, scores: PromptScores, staged: Staged, picked: Picked
    ) -> None:
        self._machine = machine
        self._scores = scores
        self._staged = staged
        self._picked = picked
        self.prompt_logprobs = NO_SCORES

    def forward(self) -> Rows:
        """Logits of the rows behind which a token is sampled."""
        model, live = self._machine.model, self._machine.live
        columns, step, seqs = self._staged.columns, self._staged.step, self._picked.draws
        batch = self._machine.batches.build_picked(columns, step, self._picked)
        hidden = model.forward(batch, self._machine.kv)
        if live.prompt_scored:
            self.prompt_logprobs = self._scores.collect(columns, hidden, live)
            hidden = hidden[last_tokens(batch.attn, seqs).rows]
        if len(seqs):
            logits = model.logits(hidden)
        else:  # the hidden state of one row was wanted all the same
            logits = hidden.new_empty((0, model.vocab_size), dtype=torch.float32)
        self._rows = Rows(logits, step.slots[seqs], batch.attn.seq_lens[seqs])
        return self._rows

    def sample(self) -> torch.Tensor:
        """Draw from the logits as they are now, and advance the slots; [R] int32."""
        chosen = self._machine.sampler.draw(self._rows)
        self._machine.slots.settle(self._staged.step, self._rows, chosen, self._picked.draws)
        return chosen


class GraphedStep:
    """A decode step of so many rows, recorded once: up to the logits, and what follows them.

    Between the two there is time to change logits.
    """

    prompt_logprobs = NO_SCORES

    def __init__(self, graphs: tuple[Graph, Graph], rows: Rows, chosen: torch.Tensor) -> None:
        self._graphs = graphs
        self._rows = rows
        self._chosen = chosen

    @property
    def num_rows(self) -> int:
        return len(self._chosen)

    def forward(self) -> Rows:
        """Logits of every row, those of nobody included."""
        self._graphs[0].replay()
        return self._rows

    def sample(self) -> torch.Tensor:
        """Draw from the logits as they are now, and advance the slots; [R] int32."""
        self._graphs[1].replay()
        return self._chosen


class GraphedSteps:
    """The graphs of all sizes. A step takes the smallest that holds it; the rest is padding."""

    def __init__(self, steps: Sequence[GraphedStep] = ()) -> None:
        self._steps = sorted(steps, key=lambda step: step.num_rows)
        self._sizes = [step.num_rows for step in self._steps]

    def holding(self, num_rows: int) -> GraphedStep | None:
        """The smallest that has so many rows; ``None`` if they are too many for any."""
        index = bisect.bisect_left(self._sizes, num_rows)
        return self._steps[index] if index < len(self._steps) else None


def record(machine: Machine, sizes: Sequence[int], max_model_len: int) -> GraphedSteps:
    """Record decode steps of these sizes, the largest first: the others fit into its memory."""
    if not sizes:
        return GraphedSteps()
    device, most = machine.platform.device, max(sizes)
    logits = torch.zeros((most, machine.model.vocab_size), dtype=torch.float32, device=device)
    chosen = torch.zeros(most, dtype=torch.int32, device=device)
    return GraphedSteps(
        [
            _recorded(machine, logits[:size], chosen[:size], max_model_len)
            for size in sorted(set(sizes), reverse=True)
        ]
    )


def _recorded(
    machine: Machine, logits: torch.Tensor, chosen: torch.Tensor, max_model_len: int
) -> GraphedStep:
    """The step of as many rows as there is room for; while it is recorded they are nobody's."""
    size = len(chosen)
    nobody = Columns(EMPTY, EMPTY, EMPTY, EMPTY)
    step = machine.batches.stage(nobody, padded=size).step
    rows = Rows(logits, step.draws, machine.batches.seq_lens(size))
    # A graph's launches are those of the longest sequences there may be.
    extent = Extent(num_decodes=size, max_query_len=1, max_seq_len=max_model_len)

    def forward() -> None:
        batch = machine.batches.build(step, extent)
        machine.model.logits(machine.model.forward(batch, machine.kv), out=logits)

    def sample() -> None:
        machine.slots.settle(step, rows, chosen.copy_(machine.sampler.draw(rows)), None)

    graphs = (machine.platform.graph(), machine.platform.graph())
    for graph, work in zip(graphs, (forward, sample), strict=True):
        graph.capture(work)
    return GraphedStep(graphs, rows, chosen)
