"""Core to worker and back, on one page. Columns, not objects per request."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.messages.outputs import TokenLogprobs
from engine.messages.params import SamplingParams

Column = NDArray[np.int32]

EMPTY: Column = np.empty(0, dtype=np.int32)


class NewSeq(msgspec.Struct, array_like=True):
    """A sequence that takes a worker slot: prompt and parameters travel once.

    A request that comes back after a preemption is simply new again; its ``token_ids`` then hold
    what it has generated so far behind its prompt.
    """

    request_id: str
    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_token_ids: list[int]  # masked while fewer than params.min_tokens outputs exist
    bad_words_ids: list[list[int]]


class StepPlan(msgspec.Struct, array_like=True):
    """What the worker computes in one step. All columns have one entry per scheduled request.

    ``starts[i]`` is the position of the first token computed for row i, ``counts[i]`` how many are;
    ``samples[i]`` is 1 if a token is sampled behind the last of them. ``(rows, slots,
    generations)`` name the request: row in the scheduler's table, slot in the worker's, generation
    of the row. ``block_slots``/``block_indices``/``block_ids`` are the block-table deltas: entry k
    says that table index ``block_indices[k]`` of slot ``block_slots[k]`` now holds block
    ``block_ids[k]``. A worker applies ``freed_slots`` first, then ``new``, then the deltas.
    """

    step: int
    rows: NDArray[np.intp]
    slots: Column
    generations: Column
    starts: Column
    counts: Column
    samples: Column
    new: list[NewSeq]
    block_slots: Column
    block_indices: Column
    block_ids: Column
    freed_slots: list[int]
    num_tokens: int
    draft_counts: Column | None = None  # drafts among counts[i]; None: there are none
    draft_tokens: Column | None = None  # flat; -1 pads a row that has fewer drafts than slots
    block_groups: Column | None = None  # KV group of each block-table delta; None: all of group 0
    parts: dict[str, Any] = {}  # what else features tell the worker, by resource name

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to tell the worker."""
        return self.num_tokens == 0 and not (self.freed_slots or self.parts)


class StepResult(msgspec.Struct, array_like=True):
    """What a step brought, in the plan's row order.

    ``token_ids`` is flat, ``counts[i]`` of them (0 for a prompt chunk; the accepted drafts and one
    more for a row with drafts) belong to row i. ``errors``
    maps a row index to a message: that request failed alone and what it wrote must leave the
    prefix cache.
    """

    step: int
    token_ids: Column
    counts: Column
    errors: dict[int, str] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    seconds: float = 0.0
    parts: dict[str, Any] = {}  # what else features learn from the worker, by resource name
