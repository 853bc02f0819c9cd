"""Edits of logits between the model and sampling, and log-probabilities read from them.

Requests' state lies on the device by slot, so that the host need not know what was sampled.
Logits are [R, V] float32, changed in place; `slots` [R] int32: the slot of each row, -1: padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

WORD = 32  # tokens in one word of packed bits


class Penalties(NamedTuple):
    """What the requests that ask for penalties have used so far; P slots."""

    prompt_bits: torch.Tensor  # [P, ceil(V / 32)] int32: which tokens the prompt holds
    counts: torch.Tensor  # [P, V] int32: how often each token was put out
    repetition: torch.Tensor  # [P] float64
    presence: torch.Tensor  # [P] float64
    frequency: torch.Tensor  # [P] float64


class Edits(NamedTuple):
    """Single tokens that requests raise, lower or forbid. Those of slot s: starts[s]:starts[s + 1].

    An id may stand there once with a finite value, and any number of times with -inf.
    """

    starts: torch.Tensor  # [slots + 1] int32
    ids: torch.Tensor  # [E] int32
    values: torch.Tensor  # [E] float32, added; -inf forbids
    until: torch.Tensor  # [E] int32: applies to tokens at positions before this one


class BadWords(NamedTuple):
    """Words of several tokens that outputs must not contain. Those of slot s, and their tokens."""

    starts: torch.Tensor  # [slots + 1] int32: words of slot s are starts[s]:starts[s + 1]
    token_starts: torch.Tensor  # [words + 1] int32
    token_ids: torch.Tensor  # [sum of lengths] int32


def new_penalties(num_slots: int, vocab_size: int, device: torch.device | str) -> Penalties:
    """Penalties of requests that have used nothing and want none."""
    bits = torch.zeros((num_slots, -(-vocab_size // WORD)), dtype=torch.int32, device=device)
    counts = torch.zeros((num_slots, vocab_size), dtype=torch.int32, device=device)
    ones = torch.ones(num_slots, dtype=torch.float64, device=device)
    return Penalties(bits, counts, ones, ones - 1, ones - 1)


def seat(state: Penalties, slot: int, token_ids: torch.Tensor, num_prompt: int) -> None:
    """Begin a slot anew: token_ids [n] int32 are its prompt and the output there is already."""
    prompt, output = token_ids[:num_prompt].long().unique(), token_ids[num_prompt:].long()
    state.prompt_bits[slot] = 0
    state.prompt_bits[slot].index_add_(0, prompt // WORD, bit_of(prompt))
    state.counts[slot] = torch.bincount(output, minlength=state.counts.shape[1])


def count_tokens(
    state: Penalties, slots: torch.Tensor, token_ids: torch.Tensor, num_tokens: torch.Tensor
) -> None:
    """Add the first num_tokens[r] of each row of token_ids [R, K] to its slot's output."""
    for slot, tokens, num in zip(slots.tolist(), token_ids, num_tokens.tolist(), strict=True):
        if slot >= 0:
            state.counts[slot].index_add_(0, tokens[:num].long(), torch.ones_like(tokens[:num]))


def penalise_rows(
    logits: torch.Tensor, state: Penalties, slots: torch.Tensor, drafts: torch.Tensor | None = None
) -> None:
    """Lower the logits of tokens that prompt and output hold; drafts [R, K] int32 count as output
    of their row (-1: none).

    Positive logits of tokens in prompt or output are divided by repetition, others multiplied;
    those of output tokens are then lowered by presence once and by frequency for every time
    they occur.
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
    """Whether the rows at these places [E] hold no NaN and no +inf, and are not all -inf [E]."""
    return torch.isfinite(logits[places].amax(dim=1))


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor) -> None:
    """Forbid what a mask [M, ceil(V / 32)] int32 does not allow: bit t % 32 of word t // 32 is set.

    mask_of_row [R] int32: -1 leaves a row as it is.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    for row, mask in enumerate(mask_of_row.tolist()):
        if mask >= 0:
            logits[row].masked_fill_((masks[mask][ids // WORD] & bit_of(ids)) == 0, -torch.inf)


def apply_edits(
    logits: torch.Tensor, edits: Edits, slots: torch.Tensor, positions: torch.Tensor
) -> None:
    """positions [R]: where the row's token will stand."""
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
    """Forbid the last token of words whose first ones end the output.

    history [slots, max_len] int32: tokens of each slot, known before positions[r]; num_prompt
    [slots] int32.
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
    """(log-probabilities of token_ids [R, M] int64, rank of each row's first one [R] int32).

    logits of any float; rank 1 is the most likely. Rows that are not finite give NaN.
    """
    x = logits.double()
    values = x.gather(1, token_ids)
    ranks = (x > values[:, :1]).sum(dim=1) + 1
    return (values - x.logsumexp(dim=1, keepdim=True)).float(), ranks.int()


def bit_of(ids: torch.Tensor) -> torch.Tensor:
    """The bit of each token within its word, int32."""
    bits = torch.ones_like(ids) << (ids % WORD)
    return torch.where(bits >= 2**31, bits - 2**32, bits).int()
