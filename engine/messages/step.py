"""Core to worker and back, on one page. Columns, not objects per request.

A plan has the tokens of each request to compute; its optional *parts* are what features need of the
worker. Each part is one typed field, named in ``PARTS``. A worker declares which of them it can
compute (``capabilities``), a resource which of them it writes (``needs``); both are compared before
the start.
``engine.ipc.plans`` turns both messages into bytes and back.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.messages.params import SamplingParams
from engine.messages.requests import ErrorCode, MediaItem, TokenLogprobs

Column = NDArray[np.int32]

EMPTY: Column = np.empty(0, dtype=np.int32)
PADDING = -1  # in place of a draft: computed and never right
NO_ADAPTER = -1  # in place of an adapter slot: the base model

PARTS = ("drafts", "masks", "adapters", "media", "kv_transfer", "block_groups")
"""The optional parts of a plan, by the name of their field. Each is a capability of a worker."""

CAPABILITIES = (*PARTS, "proposals")
"""What a worker may be able to do: compute these parts, and propose drafts in its results."""


class NewSeq(msgspec.Struct, array_like=True):
    """A sequence that takes a worker slot: prompt and parameters travel once.

    A request that comes back after a preemption is simply new again; its ``token_ids`` then hold
    what it has generated so far after its prompt.
    """

    request_id: str
    slot: int
    token_ids: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_token_ids: list[int]  # masked while fewer than params.min_tokens outputs exist
    bad_words_ids: list[list[int]]


class DraftPart(msgspec.Struct, array_like=True):
    """Guessed tokens that follow the last known one of a row.

    In a plan: to be verified, the last ``counts[i]`` of the row's tokens. In a result: proposed by
    the worker for the row's next step.
    """

    counts: Column  # [rows]
    tokens: Column  # flat, PADDING in a row that has fewer drafts than places for them

    @property
    def inputs(self) -> Column:
        """What is computed in their places, flat: ``PADDING`` is computed as any token."""
        return self.tokens.clip(min=0)

    def by_row(self) -> list[list[int]]:
        """The tokens of each row."""
        tokens = iter(self.tokens.tolist())
        return [[next(tokens) for _ in range(count)] for count in self.counts.tolist()]


class MaskPart(msgspec.Struct, array_like=True):
    """Rows whose tokens are drawn among those that a mask allows.

    The masks come when all steps before this one are settled (``Masks``); the forward pass need
    not wait for them. No step is launched after one that waits.
    """

    rows: Column  # of the plan, ascending
    ahead: Column | None = None  # rows to sample before their mask is ready, ascending
    # What each row of ``ahead`` draws if every token is allowed; -1 if that is unknown, or if the
    # mask could change it. Written after the forward pass by an executor that knows. A token that
    # is allowed is then the one that would be drawn among those allowed.
    drawn: Column | None = None


class Masks(msgspec.Struct, array_like=True):
    """Masks of rows of a plan's ``MaskPart``: of each in order, one for every token drawn of it.

    A row draws one more than it has drafts. Bit t % 32 of word t // 32 is set where token t is
    allowed.
    """

    words: Column  # flat [num_masks * words_a_mask]
    words_a_mask: int  # ceil(vocabulary / 32)
    rows: Column | None = None  # of the plan, ascending; the part's others draw freely. None: all


class AdapterPart(msgspec.Struct, array_like=True):
    """Which adapter a sequence uses that takes its seat."""

    load: dict[int, str] = {}  # adapter slot -> name; loaded before anything is computed
    used_by: dict[int, int] = {}  # worker slot of a new sequence -> adapter slot, or NO_ADAPTER


class MediaPart(msgspec.Struct, array_like=True):
    """What to encode. The worker goes through the fields in this order."""

    free: list[str] = []  # hashes of encoder outputs to let go of
    media: dict[int, list[MediaItem]] = {}  # worker slot of a new sequence -> its media
    encode: list[tuple[int, int]] = []  # worker slot and index of a media item, before the step


class StepPlan(msgspec.Struct, array_like=True):
    """What the worker computes in one step. All columns have one entry per scheduled request.

    ``starts[i]`` is the position of the first token computed for row i, ``counts[i]`` how many are;
    ``samples[i]`` is 1 if a token is sampled after the last of them. ``(rows, slots,
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
    drafts: DraftPart | None = None
    masks: MaskPart | None = None
    adapters: AdapterPart | None = None
    media: MediaPart | None = None
    kv_transfer: bytes | None = None  # what the KV source tells its half in the worker
    block_groups: Column | None = None  # KV group of each block-table delta; None: all of group 0
    proposals: Column | None = None  # drafts that the worker may make after each row, if it can

    @property
    def parts(self) -> list[str]:
        """Names of the parts that this plan has."""
        return [name for name in PARTS if getattr(self, name) is not None]

    @property
    def is_empty(self) -> bool:
        """Nothing to compute and nothing to tell the worker."""
        parts = (self.adapters, self.media, self.kv_transfer)
        return self.num_tokens == 0 and not self.freed_slots and parts == (None, None, None)


class Received(msgspec.Struct, array_like=True):
    """A load is over. ``num_tokens`` from its first on are good; ``error`` says why not all are."""

    request_id: str
    num_tokens: int
    error: str = ""


class KVReport(msgspec.Struct, array_like=True):
    """Transfers that are over since the last report."""

    received: list[Received] = []
    sent: list[str] = []  # request ids


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
    drafts: DraftPart | None = None  # proposed for the next step
    kv_transfer: KVReport | None = None
    measured_seconds: float = 0.0  # of steps since the last report, this one among them
    floor_seconds: float = 0.0  # that memory and arithmetic need for those at least
    codes: dict[int, str] = {}  # ErrorCode of rows in errors; "request_failed" where there is none

    def fail(self, index: int, message: str, code: ErrorCode = "request_failed") -> None:
        """The request of this row fails, for this reason and no other."""
        self.errors[index], self.codes[index] = message, code


def check_parts(plan: StepPlan, capabilities: frozenset[str]) -> None:
    """Raise ``RuntimeError`` if the plan asks for what its worker does not compute.

    Resources and requests are checked before; what passes them must not be left out in silence.
    """
    if unread := [name for name in plan.parts if name not in capabilities]:
        raise RuntimeError(
            f"the plan of step {plan.step} has {' and '.join(unread)}, and this worker computes "
            f"{', '.join(sorted(capabilities)) or 'none of the optional parts'}"
        )
