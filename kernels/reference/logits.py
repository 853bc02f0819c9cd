"""Edits of logits before sampling, and log-probabilities.

Logits are [R, V] float32, changed in place; `slots` [R] int32: the slot of each row's request, -1:
padding. The state of requests is on the device, so the host need not know the sampled tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

WORD = 32  # tokens per word of a bit mask


class Penalties(NamedTuple):
    """Token counts and penalties in tables with P rows, one for each request with penalties."""

    prompt_bits: torch.Tensor  # [P, ceil(V / 32)] int32, bit mask of tokens in the prompt
    counts: torch.Tensor  # [P, V] int32, occurrences of each token in the output
    repetition: torch.Tensor  # [P] float64
    presence: torch.Tensor  # [P] float64
    frequency: torch.Tensor  # [P] float64


class Edits(NamedTuple):
    """Values added to logits of single tokens; slot s has the edits starts[s]:starts[s + 1].

    Within a slot, a token id may occur once with a finite value, and any number of times with -inf.
    """

    starts: torch.Tensor  # [slots + 1] int32
    ids: torch.Tensor  # [E] int32
    values: torch.Tensor  # [E] float32, added; -inf forbids
    until: torch.Tensor  # [E] int32, the edit applies at positions before this one


class BadWords(NamedTuple):
    """Sequences of several tokens ("words") that outputs must not contain."""

    starts: torch.Tensor  # [slots + 1] int32, words of slot s are starts[s]:starts[s + 1]
    token_starts: torch.Tensor  # [words + 1] int32, tokens of each word, likewise
    token_ids: torch.Tensor  # [sum of lengths] int32


def new_penalties(num_slots: int, vocab_size: int, device: torch.device | str) -> Penalties:
    """Returns empty token counts and penalties that change nothing, for ``num_slots`` requests."""
    bits = torch.zeros((num_slots, -(-vocab_size // WORD)), dtype=torch.int32, device=device)
    counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
    ones = torch.ones(num_slots, dtype=torch.float64, device=device)
    return Penalties(bits, counts, ones, ones - 1, ones - 1)


def seat(state: Penalties, slot: int, token_ids: torch.Tensor, num_prompt: int) -> None:
    """Set the token counts of a slot for a request. token_ids [n] int32: ``num_prompt`` prompt
    tokens, followed by the output so far."""
    prompt, output = token_ids[:num_prompt].long().unique(), token_ids[num_prompt:].long()
    state.prompt_bits[slot] = 0
    state.prompt_bits[slot].index_add_(0, prompt // WORD, bit_of(prompt))
    state.counts[slot] = torch.bincount(output, minlength=state.counts.shape[1])


def count_tokens(
    state: Penalties, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Add the first num_tokens[r] tokens of row r of token_ids [R, K] to the output counts of
    slots[r]."""
    for slot, tokens, num in zip(slots.tolist(), token_ids, num_tokens.tolist(), strict=True):
        if slot >= 0:
            state.counts[slot].index_add_(0, tokens[:num].long(), torch.ones_like(tokens[:num]))


def penalise_rows(
    logits: torch.Tensor, state: Penalties, slots: torch.Tensor, drafts: torch.Tensor | None = None
) -> None:
    """Apply penalties to logits in place. drafts [R, K] int32: draft tokens that count as output of
    the row, too; -1: none.

    Logits of tokens in the prompt or output are divided by the repetition penalty if they are
    positive, otherwise multiplied by it. From logits of output tokens, the presence penalty and the
    frequency penalty times the token's count are then subtracted.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        counts = state.counts[slot].clone()
        if drafts is not None:
            known = drafts[row][drafts[row] >= 0].long()
            counts.index_add_(0, known, torch.ones_like(known, dtype=torch.int32))
        in_prompt = (state.prompt_bits[slot][ids // WORD] & bit_of(ids)) != 0
        x = logits[row].double()
        repeated = torch.where(x > 0, x / state.repetition[slot], x * state.repetition[slot])
        x = torch.where(in_prompt | (counts > 0), repeated, x)
        lowered = x - (state.presence[slot] + state.frequency[slot] * counts)
        logits[row] = torch.where(counts > 0, lowered, x).float()


def are_sound(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Returns [E] bool: True for each row index in ``places`` [E] whose logits have no NaN or +inf
    and are not all -inf."""
    return torch.isfinite(logits[places].amax(dim=1))


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> None:
    """Forbid tokens by bit masks [M, ceil(V / 32)] int32: token t is allowed if bit t % 32 of word
    t // 32 is set. mask_of_row [R] int32: mask index of each row; -1: the row is unchanged."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    for row, mask in enumerate(mask_of_row.tolist()):
        if mask >= 0:
            logits[row].masked_fill_((masks[mask][ids // WORD] & bit_of(ids)) == 0, -torch.inf)


def apply_edits(
    logits: torch.Tensor, edits: Edits, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    """Add the edits of each row's slot to its logits. positions [R]: position of the token that the
    row will sample; an edit applies only at positions before its ``until``."""
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        of_slot = slice(int(edits.starts[slot]), int(edits.starts[slot + 1]))
        applies = position < edits.until[of_slot]
        ids, values = edits.ids[of_slot][applies].long(), edits.values[of_slot][applies]
        logits[row].index_add_(0, ids, values)


def forbid_words(
    logits: torch.Tensor,
    words: BadWords,
    slots: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    num_prompt: torch.Tensor,
) -> None:
    """Forbid the last token of a word if the output so far ends with the word's other tokens.

    history [slots, max_len] int32: tokens by position, valid before positions[r]; num_prompt
    [slots] int32: number of prompt tokens.
    """
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot < 0:
            continue
        output = history[slot, int(num_prompt[slot]) : position].tolist()
        for word in range(int(words.starts[slot]), int(words.starts[slot + 1])):
            tokens = words.token_ids[words.token_starts[word] : words.token_starts[word + 1]]
            *first, last = tokens.tolist()
            if len(first) <= len(output) and output[len(output) - len(first) :] == first:
                logits[row, last] = -torch.inf


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probabilities [R, M] of token_ids [R, M] int64, and the rank [R] int32 of
    each row's first token (1: the most likely). logits: any float type; a row with NaN or +inf
    yields NaN."""
    x = logits.double()
    values = x.gather(1, token_ids)
    ranks = (x > values[:, :1]).sum(dim=1) + 1
    return (values - x.logsumexp(dim=1, keepdim=True)).float(), ranks.int()


def bit_of(ids: torch.Tensor) -> torch.Tensor:
    """Returns, for each token id, an int32 in which only the token's bit of a mask word is set."""
    bits = torch.ones_like(ids) << (ids % WORD)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int()
