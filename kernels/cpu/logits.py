"""Edits of logits on the CPU; see `kernels.reference.logits`. Logits are contiguous float32.

Skips rows without options. Penalties skip parts of the vocabulary of which no token occurred."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from kernels.cpu import masks
from kernels.cpu.disk_cache import kept
from kernels.cpu.masks import apply_bitmask, are_sound
from kernels.reference import logits as reference
from kernels.reference.logits import BadWords, Edits, Penalties

__all__ = [
    "apply_bitmask",
    "apply_edits",
    "are_sound",
    "count_tokens",
    "forbid_words",
    "penalise_rows",
    "prepare",
    "seat",
    "token_logprobs",
]

WORD = reference.WORD
MAX_CHUNK = 2**23  # logits processed together, which limits temporary memory
BLOCK = 64  # tokens that are skipped together if none occurred

NOTHING = np.float32(-np.inf)
ONE = np.int32(1)


def prepare() -> None:
    """Compile the loops of this module or load them from the cache, so that no request waits for
    it."""
    none, one = torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    # dtypes are explicit, because transformers changes torch's default while it builds a model.
    x, table = torch.zeros(1, 1, dtype=torch.float32), torch.zeros(1, 1, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.float32)
    starts = torch.zeros(2, dtype=torch.int32)
    penalties = Penalties(table, table.clone(), zero + 1, zero, zero.clone())
    masks.MASK.prepare()
    masks.SOUND.prepare()
    apply_edits(x, Edits(starts, none, zero[:0], none), one, one)
    forbid_words(x, BadWords(starts, starts, none), one, one, table, one)
    seat(penalties, 0, one, 1)
    count_tokens(penalties, one, table, one)
    penalise_rows(x, penalties, one)


def apply_edits(
    logits: torch.Tensor, edits: Edits, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    columns = [column.numpy() for column in edits]
    _edits(logits.numpy(), *columns, slots.numpy(), positions.numpy())


def forbid_words(
    logits: torch.Tensor,
    words: BadWords,
    slots: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    num_prompt: torch.Tensor,
) -> None:
    bad = tuple(column.numpy() for column in words)
    x, rows = logits.numpy(), zip(slots.tolist(), positions.tolist(), strict=True)
    for row, (slot, position) in enumerate(rows):
        if slot >= 0:
            _words(x[row], bad, slot, history[slot, int(num_prompt[slot]) : position].numpy())


def seat(state: Penalties, slot: int, token_ids: torch.Tensor, num_prompt: int) -> None:
    _seat(
        state.prompt_bits[slot].numpy(), state.counts[slot].numpy(), token_ids.numpy(), num_prompt
    )


def count_tokens(
    state: Penalties, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    _count(state.counts.numpy(), slots.numpy(), token_ids.numpy(), num_tokens.numpy())


def penalise_rows(
    logits: torch.Tensor, state: Penalties, slots: torch.Tensor, drafts: torch.Tensor | None = None
) -> None:
    bits, counts, *factors = (column.numpy() for column in state)
    x, known = logits.numpy(), None if drafts is None else drafts.numpy()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        seen = counts[slot]
        if known is not None:  # drafts count only in this row
            seen = seen.copy()
            np.add.at(seen, known[row][known[row] >= 0], 1)
        _penalise(x[row], bits[slot], seen, tuple(float(factor[slot]) for factor in factors))


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, max_chunk: int = MAX_CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [R, M] of token_ids [R, M], and the rank [R] of each row's first
    token (1: the most likely). Processes rows in chunks of at most ``max_chunk`` logits."""
    num_rows, vocab_size = logits.shape
    step = max(1, max_chunk // max(1, vocab_size))
    parts = [
        _logprobs(logits[start : start + step], token_ids[start : start + step])
        for start in range(0, max(1, num_rows), step)
    ]
    logprobs, ranks = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(ranks)


def _logprobs(x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.gather(1, token_ids)
    ranks = (x > values[:, :1]).sum(dim=1) + 1
    return values - x.logsumexp(dim=1, keepdim=True), ranks.int()


@kept
def _edits(x, starts, ids, values, until, slots, positions):
    for row in range(len(slots)):
        slot = slots[row]
        if slot < 0:
            continue
        for n in range(starts[slot], starts[slot + 1]):
            if positions[row] < until[n]:
                x[row, ids[n]] += values[n]


@kept
def _words(x, words, slot, output):
    """Forbid in a row of logits x [V] each token that would complete a bad word of the request in
    `slot`. output: the request's output tokens so far; words: arrays of all bad words."""
    starts, token_starts, token_ids = words
    for word in range(starts[slot], starts[slot + 1]):
        first, last = token_starts[word], token_starts[word + 1] - 1
        begin = len(output) - (last - first)  # where the word would begin
        is_match = begin >= 0
        for n in range(first, last if is_match else first):
            is_match = is_match and output[begin + n - first] == token_ids[n]
        if is_match:
            x[token_ids[last]] = NOTHING


@kept
def _seat(prompt_bits, counts, token_ids, num_prompt):
    prompt_bits[:] = 0
    counts[:] = 0
    for n in range(len(token_ids)):
        token = token_ids[n]
        if n < num_prompt:
            prompt_bits[token // WORD] |= ONE << np.int32(token % WORD)
        else:
            counts[token] += 1


@kept
def _count(counts, slots, token_ids, num_tokens):
    for row in range(len(slots)):
        for n in range(num_tokens[row] if slots[row] >= 0 else 0):
            counts[slots[row], token_ids[row, n]] += 1


@njit(inline="always")
def _is_silent(seen, bits):
    any_seen = np.int32(0)
    for n in range(len(seen)):
        any_seen |= seen[n]
    for n in range(len(bits)):
        any_seen |= bits[n]
    return any_seen == 0


@njit(inline="always")
def _lowered(logit, count, factors):
    repetition, presence, frequency = factors
    value = np.float64(logit)
    value = value / repetition if value > 0 else value * repetition
    if count > 0:
        value -= presence + frequency * count
    return np.float32(value)


@kept
def _penalise(x, prompt_bits, seen, factors):
    """Apply repetition, presence and frequency penalties to a row of logits x [V]. prompt_bits: bit
    mask of the prompt's tokens; seen [V]: how often each token occurred in the output."""
    for first in range(0, len(x), BLOCK):
        end = min(first + BLOCK, len(x))
        bits = prompt_bits[first // WORD : (end + WORD - 1) // WORD]
        if _is_silent(seen[first:end], bits):
            continue
        for token in range(first, end):
            in_prompt = (bits[(token - first) // WORD] >> (token % WORD)) & 1
            if in_prompt or seen[token]:
                x[token] = _lowered(x[token], seen[token], factors)
