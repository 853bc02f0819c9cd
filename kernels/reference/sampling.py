"""Samples tokens: temperature, min-p, top-k, top-p, then Gumbel noise.

The noise of a token depends only on (seed, position, token id), which are hashed to 64 bits by the
finaliser of splitmix64 (Steele, Lea, Flood 2014): seed and position to a key, key and token id to
the noise. The upper 52 bits give a uniform number v strictly inside (0, 1), and -log(-log1p(-v)) is
Gumbel distributed. Large noise comes from small v, where floats are densest, so the values that
decide the choice are exact, up to 36.
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
UNIFORM_BITS = 52  # the most for which (k + 1/2) / 2**bits is exact in float64


class SamplingColumns(NamedTuple):
    """Sampling options of each slot, on the device. See `choose_tokens` for their meaning."""

    temperature: torch.Tensor  # float64
    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # float64
    min_p: torch.Tensor  # float64
    seeds: torch.Tensor  # int64, the bits of the unsigned seed


class Rows(NamedTuple):
    """Rows of logits, with the slot and the position of each row. Slot -1 is padding and yields
    token -1."""

    logits: torch.Tensor  # [R, V], any float type, contiguous rows
    slots: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [R] int32 or int64, position of the token to sample


def sample(rows: Rows, columns: SamplingColumns) -> torch.Tensor:
    """Sample one token per row. Returns token ids [R] int32; -1 for padding and for rows with
    invalid logits."""
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
    rows: Rows, columns: SamplingColumns, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> torch.Tensor:
    """Samples a token for each row among those that its mask allows; returns ids [R] as `sample`
    does. masks, mask_of_row: as in `kernels.reference.logits.apply_bitmask`."""
    logits = rows.logits.clone()
    apply_bitmask(logits, masks, mask_of_row)
    return sample(rows._replace(logits=logits), columns)


def sample_part(
    rows: Rows,
    columns: SamplingColumns,
    first: int,
    masks: torch.Tensor | None = None,
    mask_of_row: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw over a part of the vocabulary: each row's largest score, which is logit / temperature +
    noise (for greedy rows the logit), and its token id. Rows must not truncate.

    rows: logits [R, W] of the tokens from ``first`` on; masks, mask_of_row: of these tokens, as in
    `kernels.reference.logits.apply_bitmask`. Returns [R, 3] float64: score, id, and the bits of the
    key of the row's noise. The score is NaN if a logit is NaN or +inf; -inf, with id -1, if all are
    -inf, and for padding."""
    logits = rows.logits.clone()
    if masks is not None and mask_of_row is not None:
        apply_bitmask(logits, masks, mask_of_row)
    slots = rows.slots.clamp(min=0).long()
    temperature, seeds = (c[slots].cpu().numpy() for c in (columns.temperature, columns.seeds))
    x, heat = logits.double(), torch.from_numpy(temperature).to(logits.device)[:, None]
    positions = rows.positions.int().cpu().numpy()
    keys = row_keys(seeds.view(np.uint64), positions, x.device)
    noise = gumbel_noise(seeds.view(np.uint64), positions, x.shape[1], x.device, first)
    scores = torch.where(heat > 0, x / heat.where(heat > 0, 1.0) + noise, x)
    scores[x.isnan() | x.isposinf()] = torch.nan
    best, place = scores.max(dim=1)
    best[rows.slots < 0] = -torch.inf
    ids = torch.where(best.isneginf(), -1, place + first)
    keys = torch.where(rows.slots >= 0, keys, 0)
    return torch.stack([best, ids.double(), keys.view(torch.float64)], dim=1)


def best_of_parts(found: torch.Tensor, differs: torch.Tensor) -> torch.Tensor:
    """Choose among the results [P, R, 3] of ``sample_part`` for all parts, in order of their
    tokens. Returns token ids [R] int32: of equal scores the lowest; -1 where `sample` yields -1.
    ``differs`` [1] int64 becomes 1 if the noise of a row has not the same key in all parts."""
    keys = found[:, :, 2].contiguous().view(torch.int64)
    differs |= (keys != keys[0]).any()
    best, part = found[:, :, 0].max(dim=0)
    ids = found[:, :, 1].gather(0, part[None])[0]
    return torch.where(best.isfinite(), ids, -1).int()


def choose_tokens(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Sample one token id for each row of logits [R, V]; all other arguments are columns [R].

    Temperature 0 takes the largest logit. Otherwise logits are divided by the temperature and
    truncated in this order: min_p keeps tokens with at least min_p times the largest probability
    (0: off); top_k keeps the k largest (< 1: off); top_p keeps the smallest set of largest tokens
    whose renormalised probabilities reach top_p (1: off). Of equal logits the lower id comes first.
    The noise of the final choice depends only on (seed, position, token id), not on the batch. A
    row with NaN, +inf or only -inf yields -1.
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
    """Returns x [R, V] float64 with -inf for the logits that min-p, top-k or top-p exclude. The
    other arguments are columns [R, 1]."""
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
    first: int = 0,
) -> torch.Tensor:
    """Gumbel noise of ``vocab_size`` tokens from ``first`` on for each row, [R, V] float64."""
    keys = row_keys(seeds, positions, device)
    ids = torch.arange(first + 1, first + vocab_size + 1, device=device)
    steps = shifted(mix(keys[:, None] + ids * signed(GOLDEN)), 64 - UNIFORM_BITS)
    uniform = (steps.double() + 0.5) * 2.0**-UNIFORM_BITS
    return -torch.log(-torch.log1p(-uniform))


def row_keys(
    seeds: NDArray[np.uint64], positions: NDArray[np.int32], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Returns a 64-bit hash of each row's seed and position."""
    seed = torch.from_numpy(seeds.view(np.int64)).to(device)
    position = torch.from_numpy(positions.astype(np.int64)).to(device)
    return mix(mix(seed + signed(GOLDEN)) + (position + 1) * signed(GOLDEN))


def mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64: every bit of z affects about half of the result's bits."""
    z = (z ^ shifted(z, 30)) * signed(MIX_1)
    z = (z ^ shifted(z, 27)) * signed(MIX_2)
    return z ^ shifted(z, 31)


def shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """z shifted right by ``bits``, with zeros from the left (torch's own shift copies the sign)."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def signed(word: int) -> int:
    """Returns the signed integer with the same bits as a 64-bit word, for torch, which has no
    unsigned arithmetic."""
    return word - 2**64 if word >= 2**63 else word
