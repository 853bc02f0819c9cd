"""Sampling options of requests, and tables on the device for the edits of logits that they need.

Tables are indexed by slot and allocated when first needed; edits and bad words are packed again
when a request with edits starts or ends. Requests without edits are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column, NewSeq
from kernels import slots as on_slots
from kernels.slots import BadWords, Edits, Rows

WORD = 32  # tokens in one word of a mask
Upload = Callable[[NDArray[np.generic]], torch.Tensor]
"""Copies values to the device; the array may be changed afterwards."""
SEED_BITS = 2**64 - 1
ALWAYS = 2**31 - 1  # a position that no token reaches
NO_PENALTIES = (1.0, 0.0, 0.0)
FIRST_SEATS = 8


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling options of a request: edits of logits, in the order in which they are applied, then
    options for choosing the token.

    A new sampling parameter becomes a field here, set in ``of``.
    """

    # Edits.
    allowed: list[int] | None  # allowed token ids; None: all
    edit_ids: list[int]
    edit_values: list[float]  # added to the logits of edit_ids; -inf forbids a token
    edit_until: list[int]  # the edit ends before this position
    words: list[
        list[int]
    ]  # bad words of 2 or more tokens: the last one is forbidden after the rest
    penalties: tuple[float, float, float] | None  # repetition, presence, frequency
    # Choice.
    temperature: float  # 0: greedy
    top_k: int  # < 1: off
    top_p: float
    min_p: float
    seed: int
    num_logprobs: int | None  # number of most likely tokens to report; None: off; -1: all

    @property
    def truncates(self) -> bool:
        """True if top-k, top-p or min-p limits the candidates."""
        has_limit = self.top_k >= 1 or self.top_p < 1 or self.min_p > 0
        return self.temperature != 0 and has_limit

    @property
    def edits_logits(self) -> bool:
        """True if any logits may be changed."""
        has_lists = self.edit_ids or self.words
        return bool(has_lists) or self.allowed is not None or self.penalties is not None

    @classmethod
    def of(cls, seq: NewSeq, vocab_size: int) -> SamplingSpec:
        params, edits = seq.params, []
        edits += [(token, bias, ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        edits += [(word[0], -np.inf, ALWAYS) for word in seq.bad_words_ids if len(word) == 1]
        if params.min_tokens:
            free = seq.num_prompt + params.min_tokens
            edits += [(token, -np.inf, free) for token in seq.stop_token_ids]
        ids, values, until = map(list, zip(*edits, strict=True)) if edits else ([], [], [])
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return cls(
            allowed=params.allowed_token_ids,
            edit_ids=ids,
            edit_values=values,
            edit_until=until,
            words=[word for word in seq.bad_words_ids if len(word) > 1],
            penalties=None if penalties == NO_PENALTIES else penalties,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=min(params.top_k, vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seq.seed & SEED_BITS,
            num_logprobs=params.logprobs,
        )


class EditTables:
    """Allowed tokens, logit edits and bad words of all slots."""

    def __init__(self, upload: Upload, max_num_seqs: int, vocab_size: int) -> None:
        self._upload = upload
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._masks: torch.Tensor | None = None  # [slots, words of 32 tokens] int32
        self._masked: set[int] = set()
        self._edited: dict[int, SamplingSpec] = {}  # specs with edit_ids
        self._worded: dict[int, SamplingSpec] = {}
        self._packed: tuple[Edits, BadWords] | None = None  # None: must be packed again

    def add(self, slot: int, spec: SamplingSpec) -> None:
        if spec.allowed is not None:
            self._mask(slot, spec.allowed)
        if spec.edit_ids:
            self._edited[slot] = spec
        if spec.words:
            self._worded[slot] = spec
        if spec.edit_ids or spec.words:
            self._packed = None

    def remove(self, slot: int) -> None:
        self._masked.discard(slot)
        edited, worded = self._edited.pop(slot, None), self._worded.pop(slot, None)
        if edited is not None or worded is not None:
            self._packed = None

    def apply(
        self, rows: Rows, slots: Column, history: torch.Tensor, num_prompt: torch.Tensor
    ) -> None:
        """Edit the logits of ``rows`` in place. slots: host copy of ``rows.slots``; history,
        num_prompt: tokens and prompt length of each slot, on the device."""
        if self._masked and self._masks is not None:
            mine = [slot if slot in self._masked else -1 for slot in slots.tolist()]
            mask_of_row = self._upload(np.array(mine, dtype=np.int32))
            on_slots.apply_bitmask(rows.logits, self._masks, mask_of_row)
        if self._edited or self._worded:
            edits, words = self._tables()
            if self._edited:
                on_slots.apply_edits(rows.logits, edits, rows.slots, rows.positions)
            if self._worded:
                on_slots.forbid_words(
                    rows.logits, words, rows.slots, rows.positions, history, num_prompt
                )

    def _mask(self, slot: int, allowed: Iterable[int]) -> None:
        num_words = -(-self._vocab_size // WORD)
        if self._masks is None:
            self._masks = self._upload(np.zeros((self._max_num_seqs, num_words), dtype=np.int32))
        bits = np.zeros(num_words * WORD, dtype=bool)
        bits[list(allowed)] = True
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        self._masks[slot] = self._upload(packed)
        self._masked.add(slot)

    def _tables(self) -> tuple[Edits, BadWords]:
        if self._packed is None:
            edited = [self._edited.get(slot) for slot in range(self._max_num_seqs)]
            worded = [self._worded.get(slot) for slot in range(self._max_num_seqs)]
            mine = [spec for spec in edited if spec is not None]
            words = [word for spec in worded if spec is not None for word in spec.words]
            self._packed = (
                Edits(
                    self._column(_starts([len(spec.edit_ids) if spec else 0 for spec in edited])),
                    self._column([token for spec in mine for token in spec.edit_ids]),
                    self._column([v for spec in mine for v in spec.edit_values], np.float32),
                    self._column([until for spec in mine for until in spec.edit_until]),
                ),
                BadWords(
                    self._column(_starts([len(spec.words) if spec else 0 for spec in worded])),
                    self._column(_starts([len(word) for word in words])),
                    self._column([token for word in words for token in word]),
                ),
            )
        return self._packed

    def _column(
        self, values: list[int] | list[float] | NDArray[np.int32], dtype: type = np.int32
    ) -> torch.Tensor:
        return self._upload(np.asarray(values, dtype=dtype))


def _starts(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


class PenaltyTables:
    """Token counts of requests with penalties. Only such a request gets a seat (a row of these
    tables), as counts of the whole vocabulary are large."""

    def __init__(self, upload: Upload, vocab_size: int, first_seats: int = FIRST_SEATS) -> None:
        self._upload = upload
        self._vocab_size = vocab_size
        self._first_seats = first_seats
        self._state = on_slots.new_penalties(0, vocab_size, upload(np.empty(0)).device)
        self._seat_of: dict[int, int] = {}  # by slot
        self._free: list[int] = []

    def add(
        self,
        slot: int,
        penalties: tuple[float, float, float],
        prompt: NDArray[np.int32],
        output: NDArray[np.int32],
    ) -> None:
        """Count the tokens of a request with penalties (repetition, presence, frequency)."""
        if not self._free:
            self._grow()
        seat = self._seat_of[slot] = self._free.pop()
        for column, value in zip(self._state[2:], penalties, strict=True):
            column[seat].fill_(value)
        on_slots.seat(self._state, seat, self._upload(np.append(prompt, output)), len(prompt))

    def remove(self, slot: int) -> None:
        if slot in self._seat_of:
            self._free.append(self._seat_of.pop(slot))

    def seats(self, slots: Column) -> torch.Tensor | None:
        """Each slot's row in these tables [R] int32, -1 without penalties; ``None`` if all -1."""
        if self._seat_of.keys().isdisjoint(slots.tolist()):
            return None
        seats = [self._seat_of.get(slot, -1) for slot in slots.tolist()]
        return self._upload(np.array(seats, dtype=np.int32))

    def apply(self, rows: Rows, seats: torch.Tensor, drafts: torch.Tensor | None) -> None:
        """Apply penalties to the logits in place. drafts [R, K] int32: the draft tokens before each
        row's token, which count as output; -1 for none."""
        on_slots.penalise_rows(rows.logits, self._state, seats, drafts)

    def count(self, seats: torch.Tensor, drawn: torch.Tensor) -> None:
        """Add sampled tokens [R] to the table rows ``seats`` [R]; negative ones are skipped."""
        tokens = drawn.clamp(min=0)[:, None]
        on_slots.count_tokens(self._state, seats, tokens, (drawn >= 0).int())

    def _grow(self) -> None:
        old = self._state
        num_seats = max(self._first_seats, 2 * len(old.counts))
        self._state = on_slots.new_penalties(num_seats, self._vocab_size, old.counts.device)
        for column, values in zip(self._state, old, strict=True):
            column[: len(values)] = values
        self._free += range(len(old.counts), num_seats)
