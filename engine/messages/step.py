"""The messages between core and worker: StepPlan and StepResult, with an array for each field.

A plan lists the tokens to compute for each request. Optional *parts* (``PARTS``) are fields that
only some features need, e.g. drafts. The ``capabilities`` of a worker are the parts that it can
compute, the ``needs`` of a scheduler resource are the parts that it writes.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.messages.kv_orders import KVOrders
from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams
from engine.messages.requests import ErrorCode, MediaItem, TokenLogprobs
from engine.messages.vectors import PooledPart

Column = NDArray[np.int32]

EMPTY: Column = np.empty(0, dtype=np.int32)
PADDING = -1  # stands for a missing draft: computed and always rejected
NO_ADAPTER = -1  # stands for an adapter slot: the base model

PARTS = (
    *("drafts", "masks", "adapters", "media", "kv_transfer", "block_groups", "snapshots"),
    "new_token_ids",
)
"""The optional parts of a plan, by field name. Each is a capability of a worker."""

CAPABILITIES = (*PARTS, "proposals", "pooling", "only_pooling")
"""Capabilities of workers: computing these parts, proposing drafts in results, returning vectors
for pooled requests, and not sampling tokens for others."""


class NewSeq(msgspec.Struct, array_like=True):
    """A sequence that starts to run in a worker slot, with its prompt and parameters.

    It is sent again after a preemption, with prompt and output so far in ``token_ids``.
    """

    request_id: str
    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_token_ids: list[int]  # masked while fewer than params.min_tokens outputs exist
    bad_words_ids: list[list[int]]
    pooling: PoolingParams | None = None  # its result is a vector; None: tokens


class DraftPart(msgspec.Struct, array_like=True):
    """Draft tokens for speculative decoding, for each row of a plan or result.

    In a plan: the last ``counts[i]`` tokens of row i are drafts to verify. In a result: the
    worker's drafts for the next step of row i.
    """

    counts: Column  # [rows]
    tokens: Column  # of all rows, concatenated; PADDING where a row has fewer drafts than counts

    @property
    def inputs(self) -> Column:
        """The draft tokens of all rows, concatenated, with token 0 instead of ``PADDING``."""
        return self.tokens.clip(min=0)

    def by_row(self) -> list[list[int]]:
        """The draft tokens of each row, as lists."""
        tokens = iter(self.tokens.tolist())
        return [[next(tokens) for _ in range(count)] for count in self.counts.tolist()]


class MaskPart(msgspec.Struct, array_like=True):
    """The rows of a plan whose tokens must be sampled under a grammar mask.

    The masks arrive in a ``Masks`` message, while the step's forward pass runs. No later step
    starts before they have arrived."""

    rows: Column  # of the plan, ascending
    ahead: Column | None = None  # rows to sample before their mask is ready, ascending
    # The token of each row in ``ahead``, sampled without a mask; -1 if that is unknown, or if the
    # mask could change it. Executors may write it after the forward pass. If the mask allows the
    # token, it equals the token that is sampled with the mask.
    drawn: Column | None = None


class Masks(msgspec.Struct, array_like=True):
    """Masks of allowed tokens for the rows of a plan's ``MaskPart``, in order.

    A row has one mask for each token that it samples: one more than its drafts. Token t is allowed
    if bit t % 32 of word t // 32 is set.
    """

    words: Column  # [num_masks * words_a_mask]
    words_a_mask: int  # ceil(vocabulary / 32)
    rows: Column | None = None  # the rows with masks, ascending; None: all rows of the part


class AdapterPart(msgspec.Struct, array_like=True):
    """LoRA adapters that the worker must load, and the adapter of each new sequence."""

    load: dict[int, str] = {}  # adapter slot -> name; loaded before the step is computed
    used_by: dict[int, int] = {}  # worker slot of a new sequence -> adapter slot, or NO_ADAPTER


class MediaPart(msgspec.Struct, array_like=True):
    """Encoder work for media such as images, in the order ``free``, ``media``, ``encode``."""

    free: list[str] = []  # hashes of encoder outputs to free
    media: dict[int, list[MediaItem]] = {}  # worker slot of a new sequence -> its media
    encode: list[tuple[int, int]] = []  # worker slot and media index, encoded before the step


class SnapshotPart(msgspec.Struct, array_like=True):
    """Snapshots of recurrent states, which the worker loads before a step or saves after it. A
    snapshot is a copy of a request's states in KV blocks.

    Before the step, snapshot i is copied from ``load_blocks`` to slot ``load_slots[i]``. After the
    step, the state of slot ``save_slots[i]`` after its first ``save_lengths[i]`` tokens is copied
    to ``save_blocks``, unless the last of these tokens are rejected drafts.
    """

    num_blocks: int  # of each snapshot
    load_slots: Column = EMPTY
    load_blocks: Column = EMPTY  # [loads * num_blocks]
    save_slots: Column = EMPTY
    save_lengths: Column = EMPTY
    save_blocks: Column = EMPTY  # [saves * num_blocks]


class StepPlan(msgspec.Struct, array_like=True):
    """What the worker computes in one step. Columns have one entry per scheduled request.

    Request i computes ``counts[i]`` tokens from position ``starts[i]`` on. If ``samples[i]`` is 1,
    it samples a token after them or, if it is pooled, returns its result. It is identified by its
    slot in the worker (``slots[i]``), its row in the scheduler's table (``rows[i]``), and the
    generation of that row, since rows are reused. Entry ``block_indices[k]`` of the block table of
    slot ``block_slots[k]`` becomes ``block_ids[k]``. A worker applies ``freed_slots`` first, then
    ``new``, then the changes of block tables.
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
    drafts: DraftPart | None = None
    masks: MaskPart | None = None
    adapters: AdapterPart | None = None
    media: MediaPart | None = None
    kv_transfer: KVOrders | None = None
    block_groups: Column | None = None  # KV group of each block-table change; None: all group 0
    proposals: Column | None = None  # most drafts that the worker may propose for each row
    snapshots: SnapshotPart | None = None
    # The last known token of each row, if it was sampled after the row's sequence was sent; else
    # -1. The first of several pipeline stages does not know it otherwise.
    new_token_ids: Column | None = None

    @property
    def parts(self) -> list[str]:
        """The names of the parts that are present in this plan."""
        return [name for name in PARTS if getattr(self, name) is not None]

    @property
    def is_empty(self) -> bool:
        """True if the plan has nothing to compute and no message to the worker."""
        parts = (self.adapters, self.media, self.kv_transfer)
        return self.num_tokens == 0 and not self.freed_slots and parts == (None, None, None)


class StepResult(msgspec.Struct, array_like=True):
    """The result of a step, with rows in the plan's order.

    ``token_ids``: the sampled tokens of all rows, concatenated; row i has ``counts[i]`` of them: 0
    if its prompt is not complete, accepted drafts + 1 if it has drafts. ``errors``: messages by row
    index, for requests that failed; their new KV must leave the prefix cache.
    """

    step: int
    token_ids: Column
    counts: Column
    errors: dict[int, str] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    seconds: float = 0.0
    drafts: DraftPart | None = None  # proposed for the next step
    measured_seconds: float = 0.0  # duration of the steps since the last report, including this one
    floor_seconds: float = 0.0  # least time of these steps, by memory and arithmetic speed
    codes: dict[int, str] = {}  # ErrorCode of rows in errors; the default is "request_failed"
    lost_snapshots: Column | None = None  # indices in the plan's ``save_slots`` that failed
    pooled: PooledPart | None = None  # results of pooled requests, whose ``counts`` are 0

    def fail(self, index: int, message: str, code: ErrorCode = "request_failed") -> None:
        """Record an error for row ``index``, so that its request fails. It replaces any earlier
        error of the row."""
        self.errors[index], self.codes[index] = message, code


def check_parts(plan: StepPlan, capabilities: frozenset[str]) -> None:
    """Raise ``RuntimeError`` if the plan has parts that the worker cannot compute."""
    if unread := [name for name in plan.parts if name not in capabilities]:
        raise RuntimeError(
            f"the plan of step {plan.step} has {' and '.join(unread)}, which this worker cannot "
            f"compute; it has {', '.join(sorted(capabilities)) or 'no optional parts'}"
        )
