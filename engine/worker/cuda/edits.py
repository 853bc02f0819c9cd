"""What requests do to their logits, in tables by slot on the device.

Rows of requests that ask for nothing pass through none of this. Tables are made when they are first
needed; edits and words are packed anew when somebody who has some comes or goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column, NewSeq
from engine.worker.cuda.platform import Platform
from kernels import slots as on_slots
from kernels.slots import BadWords, Edits, Rows

ALWAYS = 2**31 - 1  # no token stands at this position


class Own(NamedTuple):
    """What one request edits beside its mask."""

    ids: list[int]
    values: list[float]  # added; -inf forbids
    until: list[int]  # for tokens at positions before this one
    words: list[list[int]]  # of two tokens and more

    @classmethod
    def of(cls, seq: NewSeq) -> Own:
        params, edits = seq.params, []
        edits += [(token, bias, ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        edits += [(word[0], -np.inf, ALWAYS) for word in seq.bad_words_ids if len(word) == 1]
        if params.min_tokens:
            free = seq.num_prompt + params.min_tokens
            edits += [(token, -np.inf, free) for token in seq.stop_token_ids]
        ids, values, until = map(list, zip(*edits, strict=True)) if edits else ([], [], [])
        return cls(ids, values, until, [word for word in seq.bad_words_ids if len(word) > 1])


class EditTables:
    """Masks, edits and bad words of all slots."""

    def __init__(self, platform: Platform, max_num_seqs: int, vocab_size: int) -> None:
        self._platform = platform
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._masks: torch.Tensor | None = None  # [slots, words of 32 tokens] int32
        self._masked: set[int] = set()
        self._own: dict[int, Own] = {}
        self._packed: tuple[Edits, BadWords] | None = None  # None: to be made anew

    def has(self, slot: int) -> bool:
        return slot in self._masked or slot in self._own

    def has_words(self, slot: int) -> bool:
        """Whether it matters what its last output tokens were."""
        return slot in self._own and bool(self._own[slot].words)

    def add(self, seq: NewSeq) -> None:
        if seq.params.allowed_token_ids is not None:
            self._mask(seq.slot, seq.params.allowed_token_ids)
        own = Own.of(seq)
        if own.ids or own.words:
            self._own[seq.slot] = own
            self._packed = None

    def remove(self, slot: int) -> None:
        self._masked.discard(slot)
        if self._own.pop(slot, None) is not None:
            self._packed = None

    def apply(
        self, rows: Rows, slots: Column, history: torch.Tensor, num_prompt: torch.Tensor
    ) -> None:
        """Edit rows in place. slots: the host's copy of theirs; history, num_prompt: by slot."""
        if self._masked and self._masks is not None:
            mine = [slot if slot in self._masked else -1 for slot in slots.tolist()]
            mask_of_row = self._platform.upload(np.array(mine, dtype=np.int32))
            on_slots.apply_bitmask(rows.logits, self._masks, mask_of_row)
        if self._own:
            edits, words = self._tables()
            on_slots.apply_edits(rows.logits, edits, rows.slots, rows.positions)
            if len(words.token_ids):
                on_slots.forbid_words(
                    rows.logits, words, rows.slots, rows.positions, history, num_prompt
                )

    def _mask(self, slot: int, allowed: Iterable[int]) -> None:
        if self._masks is None:
            shape = (self._max_num_seqs, -(-self._vocab_size // 32))
            self._masks = torch.zeros(shape, dtype=torch.int32, device=self._platform.device)
        bits = np.zeros(self._masks.shape[1] * 32, dtype=bool)
        bits[list(allowed)] = True
        packed = np.packbits(bits, bitorder="little").view(np.int32)
        self._masks[slot] = self._platform.upload(packed)
        self._masked.add(slot)

    def _tables(self) -> tuple[Edits, BadWords]:
        if self._packed is None:
            own = [self._own.get(slot, Own([], [], [], [])) for slot in range(self._max_num_seqs)]
            words = [word for one in own for word in one.words]
            self._packed = (
                Edits(
                    self._column(_starts([len(one.ids) for one in own])),
                    self._column([token for one in own for token in one.ids]),
                    self._column([value for one in own for value in one.values], np.float32),
                    self._column([until for one in own for until in one.until]),
                ),
                BadWords(
                    self._column(_starts([len(one.words) for one in own])),
                    self._column(_starts([len(word) for word in words])),
                    self._column([token for word in words for token in word]),
                ),
            )
        return self._packed

    def _column(
        self, values: list[int] | list[float] | NDArray[np.int32], dtype: type = np.int32
    ) -> torch.Tensor:
        return self._platform.upload(np.asarray(values, dtype=dtype))


def _starts(lengths: list[int]) -> NDArray[np.int32]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
