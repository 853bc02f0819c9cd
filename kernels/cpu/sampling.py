"""Samples tokens on the CPU without sorting, and without noise for every token.

The largest logit of each block of 64 tokens shows which blocks can be skipped:

* min-p, top-k and top-p gather the few possible candidates and find the exact cut by bisection on
  the bits of a float;
* sampling with Gumbel noise skips a block if even the largest possible noise could not beat the
  best score so far; in other blocks it computes the noise only of tokens that may win.

Results and noise equal those of `kernels.reference.sampling`."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray

from kernels.cpu import sweeps
from kernels.cpu.native import INNER, Kernel, f32, f64, i32, i64, next_item, u64
from kernels.cpu.threads import num_threads
from kernels.reference import sampling as reference
from kernels.reference.logits import WORD
from kernels.reference.sampling import Rows, SamplingColumns

SERIAL_SIZE = 2**18  # up to this many logits, one thread is faster than waking others
GOLDEN = np.uint64(reference.GOLDEN)
MIX_1 = np.uint64(reference.MIX_1)
MIX_2 = np.uint64(reference.MIX_2)
SHIFT_1, SHIFT_2, SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
ONE = np.uint64(1)
ONE_BIT = np.int32(1)
UNUSED_BITS = np.uint64(64 - reference.UNIFORM_BITS)
UNIFORM_STEPS = 2.0**reference.UNIFORM_BITS
MAX_GUMBEL = -math.log(-math.log1p(-0.5 / UNIFORM_STEPS)) + 1e-6

ZERO = np.float32(0)


def sample(rows: Rows, columns: SamplingColumns) -> torch.Tensor:
    """Sample a token per row of contiguous float32; see `kernels.reference.sampling.sample`."""
    return _sample(rows, columns, None)


def sample_allowed(
    rows: Rows, columns: SamplingColumns, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> torch.Tensor:
    """Sample among allowed tokens, reading only these; see `kernels.reference.sampling`."""
    return _sample(rows, columns, (masks, mask_of_row))


def _sample(
    rows: Rows, columns: SamplingColumns, masks: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    logits, slots, positions = rows
    num, vocab_size = logits.shape
    if positions.dtype is not torch.int32:
        positions = positions.int()
    chosen = torch.empty(num, dtype=torch.int32)
    CHOOSE.run(
        num_threads() if num * vocab_size > SERIAL_SIZE else 1,
        logits.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        columns.temperature.data_ptr(),
        columns.top_k.data_ptr(),
        columns.top_p.data_ptr(),
        columns.min_p.data_ptr(),
        columns.seeds.data_ptr(),
        _every_id(vocab_size).data_ptr(),
        chosen.data_ptr(),
        num,
        vocab_size,
        *((0, 0, 0) if masks is None else _addresses(*masks)),
    )
    return chosen


def _addresses(masks: torch.Tensor, mask_of_row: torch.Tensor) -> tuple[int, int, int]:
    return masks.data_ptr(), mask_of_row.data_ptr(), masks.shape[1]


def choose_tokens(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Sample a token per row of logits [R, V], contiguous float32; see `kernels.reference`."""
    columns = SamplingColumns(
        torch.tensor(temperature, dtype=torch.float64),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
        torch.from_numpy(seeds.view(np.int64)),
    )
    slots = torch.arange(len(logits), dtype=torch.int32)
    found: NDArray[np.int32]
    found = sample(Rows(logits, slots, torch.from_numpy(positions).int()), columns).numpy()
    return found


@cache
def _every_id(vocab_size: int) -> torch.Tensor:
    return torch.arange(vocab_size, dtype=torch.int32)


def _choose_body(row):
    p = i64(row, (16,))
    num, vocab_size, num_words = p[11], p[12], p[15]
    slots, positions = i32(p[2], (num,)), i32(p[3], (num,))
    every_id, chosen = i32(p[9], (vocab_size,)), i32(p[10], (num,))
    while True:
        n = next_item(row)
        if n >= num:
            break
        slot = slots[n]
        if slot < 0:
            chosen[n] = -1
            continue
        x, ids = f32(p[1] + n * vocab_size * 4, (vocab_size,)), every_id
        if num_words > 0 and i32(p[14], (num,))[n] >= 0:
            words = i32(p[13] + np.int64(i32(p[14], (num,))[n]) * num_words * 4, (num_words,))
            x, ids = allowed(x, words, every_id)
        if len(x) == 0:
            chosen[n] = -1
            continue
        temperature = f64(p[4] + 8 * slot, (1,))[0]
        if temperature == 0:
            place = sweeps.argmax(x)
            chosen[n] = ids[place] if place >= 0 else -1
            continue
        top_k = i32(p[5] + 4 * slot, (1,))[0]
        top_p, min_p = f64(p[6] + 8 * slot, (1,))[0], f64(p[7] + 8 * slot, (1,))[0]
        key = row_key(u64(p[8] + 8 * slot, (1,))[0], np.uint64(positions[n]))
        chosen[n] = _choose(x, ids, temperature, (top_k, top_p, min_p), key)


@njit(**INNER)
def allowed(x, words, ids_of_x):
    """Returns (logits, ids) of the tokens whose bits are set in the mask ``words``. x: all logits;
    ids_of_x: token id of each."""
    num_words = 0
    for word in words:
        num_words += word != 0
    values = np.empty(num_words * WORD, dtype=np.float32)
    ids = np.empty(num_words * WORD, dtype=np.int32)
    size = 0
    for place in range(len(words)):
        word = words[place]
        if word == 0:
            continue
        first = place * WORD
        for bit in range(min(WORD, len(x) - first)):
            values[size], ids[size] = x[first + bit], ids_of_x[first + bit]
            size += (word >> np.int32(bit)) & ONE_BIT
    return values[:size], ids[:size]


@njit(**INNER)
def _choose(x, ids_of_x, temperature, truncation, key):
    """Sample a token id from the logits x; -1 if they have NaN or +inf or are all -inf. ids_of_x:
    token id of each logit; truncation: (top_k, top_p, min_p); key: hash of the row's seed and
    position."""
    block_max = sweeps.block_maxima(x)
    peak = sweeps.largest(block_max)
    if sweeps.has_nan(x) or not sweeps.LOWEST_FINITE <= peak < sweeps.INFINITY:
        return -1
    top_k, top_p, min_p = truncation
    if top_k < 1 or top_k > len(x):
        top_k = len(x)
    if top_k == len(x) and top_p == 1 and min_p == 0:
        return race(x, ids_of_x, block_max, temperature, key)[0]
    floor = sweeps.LOWEST_FINITE
    if min_p > 0:
        floor = sweeps.at_least(peak + temperature * math.log(min_p))
    if top_k < len(x):
        values, ids = _gather(x, ids_of_x, block_max, max(floor, _kth_largest(block_max, top_k)))
        values, ids = _keep_top_k(values, ids, top_k)
        total = sweeps.weight(values, floor, peak, temperature)
    else:
        # All tokens below this together have a probability of less than 1 - top_p.
        reach = math.log(len(x) / (1 - top_p)) if top_p < 1 else np.inf
        lowest = max(floor, sweeps.at_least(peak - temperature * reach))
        values, ids = _gather(x, ids_of_x, block_max, lowest)
        total = sweeps.weight(x, floor, peak, temperature) if top_p < 1 else 0.0
    if top_p < 1:
        weights = sweeps.weights(values, peak, temperature)
        values, ids = _keep_top_p(values, ids, weights, top_p * total)
    return race(values, ids, sweeps.block_maxima(values), temperature, key)[0]


# Truncation. `values` are logits in the order of their ascending `ids`.


@njit(**INNER)
def _keep_top_k(values, ids, top_k):
    """Returns the top_k largest values and their ids. Of equal values, those with lower ids are
    preferred."""
    if len(values) <= top_k:
        return values, ids
    cut = _kth_largest(values, top_k)
    return _keep(values, ids, cut, top_k - sweeps.count_from(values, sweeps.above(cut)))


@njit(**INNER)
def _keep_top_p(values, ids, weights, target):
    """Returns the smallest set of largest values whose weights add up to at least `target`, and
    their ids. Of equal values, those with lower ids are preferred."""
    low, high = sweeps.to_key(sweeps.LOWEST_FINITE), sweeps.to_key(sweeps.INFINITY)
    while low < high:
        middle = (low + high + 1) >> 1
        if sweeps.weight_from(values, weights, sweeps.from_key(middle)) >= target:
            low = middle
        else:
            high = middle - 1
    cut = sweeps.from_key(low)
    reached = sweeps.weight_from(values, weights, sweeps.above(cut))
    num_ties = 0
    for i in range(len(values)):
        if values[i] == cut and reached < target:
            reached += weights[i]
            num_ties += 1
    return _keep(values, ids, cut, num_ties)


@njit(**INNER)
def _keep(values, ids, cut, num_ties):
    """Returns the values above `cut` and the first `num_ties` values equal to `cut`, with their
    ids."""
    kept_values = np.empty(len(values), dtype=np.float32)
    kept_ids = np.empty(len(values), dtype=np.int32)
    size = 0
    for i in range(len(values)):
        kept_values[size], kept_ids[size] = values[i], ids[i]
        is_tie = values[i] == cut
        size += (values[i] > cut) | (is_tie & (num_ties > 0))
        num_ties -= is_tie
    return kept_values[:size], kept_ids[:size]


@njit(**INNER)
def _kth_largest(values, k):
    """The k-th largest of values, or the lowest finite number if fewer than k are finite."""
    low, high = sweeps.to_key(sweeps.LOWEST_FINITE), sweeps.to_key(sweeps.INFINITY)
    while low < high:
        middle = (low + high + 1) >> 1
        if sweeps.count_from(values, sweeps.from_key(middle)) >= k:
            low = middle
        else:
            high = middle - 1
    return sweeps.from_key(low)


@njit(**INNER)
def _gather(x, ids_of_x, block_max, floor):
    """Returns the logits in x of at least `floor`, and their ids. block_max: maxima of blocks."""
    size = sweeps.count_from(x, floor)
    values = np.empty(size, dtype=np.float32)
    ids = np.empty(size, dtype=np.int32)
    size = 0
    for block in range(len(block_max)):
        if block_max[block] < floor:
            continue
        for i in range(block * sweeps.BLOCK, min((block + 1) * sweeps.BLOCK, len(x))):
            if x[i] >= floor:
                values[size] = x[i] + ZERO  # -0 would have another key than 0
                ids[size] = ids_of_x[i]
                size += 1
    return values, ids


# The choice: the largest of logit + temperature * noise.


@njit(**INNER)
def race(values, ids, block_max, temperature, key):
    """Sample by noise: returns the token id with the largest score, and the score, which is logit +
    temperature * noise."""
    # The token with the largest logit is scored first, which excludes most others.
    first = sweeps.first_at(values, block_max, sweeps.largest(block_max))
    winner = ids[first]
    best = values[first] + temperature * _gumbel(_steps(key, winner))
    for block in range(len(block_max)):
        gap = (best - block_max[block]) / temperature
        if gap > MAX_GUMBEL:
            continue
        start, end = block * sweeps.BLOCK, min((block + 1) * sweeps.BLOCK, len(values))
        # Noise exceeds the gap only if the uniform number is below this; + 1 for rounding.
        limit = -math.expm1(-math.exp(-gap)) * UNIFORM_STEPS * (1 + 1e-9) + 1
        if _lowest_steps(ids[start:end], key) > limit:
            continue
        for i in range(start, end):
            steps = _steps(key, ids[i])
            if steps > limit:
                continue
            score = values[i] + temperature * _gumbel(steps)
            if score > best or (score == best and ids[i] < winner):
                best, winner = score, ids[i]
    return winner, best


@njit(**INNER)
def _gumbel(steps):
    return -math.log(-math.log1p(-(steps + 0.5) / UNIFORM_STEPS))


@njit(**INNER)
def _steps(key, token):
    """Returns a token's uniform random number: a whole number below UNIFORM_STEPS, as a float64."""
    return np.float64(_hash(key, token) >> UNUSED_BITS)


@njit(**INNER)
def _lowest_steps(ids, key):
    lowest = _hash(key, ids[0])
    for i in range(1, len(ids)):
        lowest = min(lowest, _hash(key, ids[i]))
    return np.float64(lowest >> UNUSED_BITS)


@njit(**INNER)
def row_key(seed, position):
    return _mix(_mix(seed + GOLDEN) + (position + ONE) * GOLDEN)


@njit(**INNER)
def _hash(key, token):
    return _mix(key + (np.uint64(token) + ONE) * GOLDEN)


@njit(**INNER)
def _mix(z):
    z = (z ^ (z >> SHIFT_1)) * MIX_1
    z = (z ^ (z >> SHIFT_2)) * MIX_2
    return z ^ (z >> SHIFT_3)


CHOOSE = Kernel(_choose_body, heavy=True)
