"""Validity checks and token masks of logits; see `kernels.reference.logits`. Each row is one work
item of a thread. Logits are contiguous float32."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu import sweeps
from kernels.cpu.native import INLINE, Kernel, f32, i32, i64, next_item, u8
from kernels.cpu.threads import num_threads
from kernels.reference.logits import WORD

_ENOUGH = 65536  # with fewer logits, one thread is faster
_NOTHING = np.float32(-np.inf)
_ONE, _ALL = np.int32(1), np.int32(-1)


def are_sound(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    num, vocab_size = len(places), logits.shape[1]
    sound = torch.empty(num, dtype=torch.bool)
    threads = num_threads() if num * vocab_size > _ENOUGH else 1
    rows = places.int()
    SOUND.run(threads, logits.data_ptr(), rows.data_ptr(), sound.data_ptr(), num, vocab_size)
    return sound


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> None:
    num, vocab_size = logits.shape
    MASK.run(
        num_threads() if num * vocab_size > _ENOUGH else 1,
        logits.data_ptr(),
        masks.data_ptr(),
        mask_of_row.data_ptr(),
        num,
        vocab_size,
        masks.shape[1],
    )


def _sound_body(row):
    p = i64(row, (6,))
    places, sound = i32(p[2], (p[4],)), u8(p[3], (p[4],))
    while True:
        item = next_item(row)
        if item >= p[4]:
            break
        logits = f32(p[1] + np.int64(places[item]) * p[5] * 4, (p[5],))
        sound[item] = sweeps.argmax(logits) >= 0


def _mask_body(row):
    p = i64(row, (7,))
    of_row, vocab_size, num_words = i32(p[3], (p[4],)), p[5], p[6]
    whole = vocab_size // WORD
    while True:
        item = next_item(row)
        if item >= p[4]:
            break
        if of_row[item] < 0:
            continue
        words = i32(p[2] + np.int64(of_row[item]) * num_words * 4, (num_words,))
        logits = f32(p[1] + item * vocab_size * 4, (vocab_size,))
        for word in range(whole):
            allowed = words[word]
            if allowed == _ALL:
                continue
            some = logits[word * WORD : word * WORD + WORD]
            if allowed == 0:
                for bit in range(WORD):
                    some[bit] = _NOTHING
            else:
                _mask(some, allowed, WORD)
        if whole * WORD < vocab_size:
            _mask(logits[whole * WORD :], words[whole], vocab_size - whole * WORD)


@njit(**INLINE)
def _mask(logits, allowed, num):
    for bit in range(num):
        if (np.int32(allowed >> np.int32(bit)) & _ONE) == 0:
            logits[bit] = _NOTHING


SOUND = Kernel(_sound_body, heavy=True)
MASK = Kernel(_mask_body, heavy=True)
