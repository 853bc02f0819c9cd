"""Masks, edits and bad words of requests, in tables by slot on the device.

Rows of requests that ask for none of these are skipped. Tables are made when they are first
needed; edits and words are packed anew when a request that has some starts or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column
from engine.sample.spec import SamplingSpec
from kernels import slots as on_slots
from kernels.slots import BadWords, Edits, Rows

WORD = 32  # tokens in one word of a mask

Upload = Callable[[NDArray[np.generic]], torch.Tensor]
"""A copy on the device, for the work that is asked for next; the values may change."""


class EditTables:
    """What all slots allow, edit and forbid. The sampler adds and removes requests."""

    def __init__(self, upload: Upload, max_num_seqs: int, vocab_size: int) -> None:
        self._upload = upload
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._masks: torch.Tensor | None = None  # [slots, words of 32 tokens] int32
        self._masked: set[int] = set()
        self._edited: dict[int, SamplingSpec] = {}  # with single tokens to raise or forbid
        self._worded: dict[int, SamplingSpec] = {}
        self._packed: tuple[Edits, BadWords] | None = None  # None: to be made anew

    def has(self, slot: int) -> bool:
        return slot in self._masked or slot in self._edited or slot in self._worded

    def has_words(self, slot: int) -> bool:
        """Whether it matters what its last output tokens were."""
        return slot in self._worded

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
        """Edit rows in place. slots: the host's copy of theirs; history, num_prompt: by slot."""
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
