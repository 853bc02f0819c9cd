"""Choosing tokens: temperature, min-p, top-k, top-p, then Gumbel noise.

The noise of a token is a function of (seed, position, token id) alone. Seed and position are mixed
into a key, the key and the token id into 64 bits (the finaliser of splitmix64 on its Weyl
sequence; Steele, Lea, Flood 2014), of which the upper 52 make a uniform number v strictly inside
(0, 1). Then -log(-log1p(-v)) is Gumbel distributed and grows as v falls to 0, where the steps
of v are as fine as they come: large values, which decide, are never cut off short of 36.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.reference.logits import apply_bitmask

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
UNIFORM_BITS = 52  # as many as leave (k + 1/2) / 2**bits exact in float64


class Columns(NamedTuple):
    """What requests ask for, by slot, on the device. See `choose_tokens`."""

    temperature: torch.Tensor  # float64
    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float64
    seeds: torch.Tensor  # int64: the bits of the unsigned seed


class Rows(NamedTuple):
    """Logits and their slots. Slot -1: padding, the row's token is -1 and nothing is read."""

    logits: torch.Tensor  # [R, V] of any float, rows contiguous
    slots: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int32 or int64: where the token will stand


def sample(rows: Rows, columns: Columns) -> torch.Tensor:
    """The token of each row [R] int32, -1 where there is none."""
    chosen = torch.full_like(rows.slots, -1)
    real = (rows.slots >= 0).nonzero()[:, 0]
    if len(real):
        slots = rows.slots[real].long()
        temperature, top_k, top_p, min_p, seeds = (c[slots].cpu().numpy() for c in columns)
        positions = rows.positions[real].int().cpu().numpy()
        seeds = seeds.view(np.uint64)
        ids = choose_tokens(rows.logits[real], temperature, top_k, top_p, min_p, seeds, positions)
        chosen[real] = torch.from_numpy(ids).to(chosen.device)
    return chosen


def sample_allowed(
    rows: Rows, columns: Columns, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> torch.Tensor:
    """The token of each row [R] int32 among those that its mask allows, -1 where there is none.

    Masks: those of `kernels.reference.logits.apply_bitmask`; the logits stay as they are.
    """
    logits = rows.logits.clone()
    apply_bitmask(logits, masks, mask_of_row)
    return sample(rows._replace(logits=logits), columns)


def choose_tokens(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
) -> NDArray[np.int32]:
    """One token id for each row of logits [R, V]; all other arguments are columns [R].

    temperature 0 takes the largest logit. Otherwise the logits are divided by it, then the tokens
    left are those with at least min_p times the largest probability (0: off), of these the top_k
    largest (< 1: off), of these the fewest largest whose probabilities, renormalised, add up to
    top_p (1: off); of equal logits the lower id comes first. One of them is drawn with noise that
    depends on (seed, position, token id) alone, whatever the batch. Tokens at -inf are never
    chosen. A row with NaN, +inf or nothing but -inf yields -1 and disturbs no other.
    """
    device = logits.device
    x = logits.double()
    sound = torch.isfinite(x.amax(dim=1))
    greedy = x.argmax(dim=1)
    column = {
        name: torch.from_numpy(np.ascontiguousarray(values)).to(device)[:, None]
        for name, values in (("t", temperature), ("k", top_k), ("p", top_p), ("m", min_p))
    }
    x = truncate(x / column["t"].where(column["t"] > 0, 1.0), *(column[name] for name in "kpm"))
    noise = gumbel_noise(seeds, positions, logits.shape[1], device)
    chosen = torch.where(column["t"][:, 0] > 0, (x + noise).argmax(dim=1), greedy)
    return torch.where(sound, chosen, -1).int().cpu().numpy()


def truncate(
    x: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """x [R, V] float64 with -inf where min-p, top-k or top-p, columns [R, 1], leave a token out."""
    x = x.masked_fill(x - x.amax(dim=1, keepdim=True) < min_p.log(), -torch.inf)
    values, ids = x.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(x.shape[1], device=x.device)
    values = values.masked_fill((top_k > 0) & (ranks >= top_k), -torch.inf)
    weights = (values - values[:, :1]).exp()
    before = weights.cumsum(dim=1) - weights
    values = values.masked_fill(
        (top_p < 1) & (before >= top_p * weights.sum(dim=1, keepdim=True)), -torch.inf
    )
    return torch.empty_like(x).scatter_(1, ids, values)


def gumbel_noise(
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
    vocab_size: int,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The noise of every token: [R, V] float64, Gumbel distributed."""
    keys = row_keys(seeds, positions, device)
    ids = torch.arange(1, vocab_size + 1, device=device)
    steps = shifted(mix(keys[:, None] + ids * signed(GOLDEN)), 64 - UNIFORM_BITS)
    uniform = (steps.double() + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log1p(-uniform))


def row_keys(
    seeds: NDArray[np.uint64], positions: NDArray[np.int32], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Seed and position of each row in 64 bits; neighbouring ones have nothing in common."""
    seed = torch.from_numpy(seeds.view(np.int64)).to(device)
    position = torch.from_numpy(positions.astype(np.int64)).to(device)
    return mix(mix(seed + signed(GOLDEN)) + (position + 1) * signed(GOLDEN))


def mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64: every bit of z moves about half of the result's."""
    z = (z ^ shifted(z, 30)) * signed(MIX_1)
    z = (z ^ shifted(z, 27)) * signed(MIX_2)
    return z ^ shifted(z, 31)


def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z >> bits, with zeros coming in: torch's shift copies the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def signed(word: int) -> int:
    """64 bits as torch holds them; its arithmetic wraps around like that of unsigned numbers."""
    return word - 2**64 if word >= 2**63 else word
