"""Choosing tokens by parts of the vocabulary: every body gives the tokens of the reference over the
whole vocabulary."""

import numpy as np
import pytest
import torch

from kernels.cpu import sampling_parts as cpu
from kernels.reference import sampling as reference
from kernels.reference.sampling import Rows, SamplingColumns
from kernels.triton import sampling_parts as triton_parts
from kernels.triton.sampling import Sizes

# NumPy warns of infinities and of unsigned numbers that wrap around, devices do not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = Sizes(BLOCK=256, STRETCH=16, BINS=16, TILE=64, CAPACITY=128)
BODIES = {"reference": (reference, ()), "cpu": (cpu, ()), "triton": (triton_parts, (SMALL,))}
by_body = pytest.mark.parametrize("body", BODIES)


def choose(
    body: str,
    rows: Rows,
    columns: SamplingColumns,
    cuts: list[int],
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[list[int], int]:
    """The tokens chosen from parts that begin at ``cuts``, and whether keys differ."""
    module, more = BODIES[body]
    found = []
    for first, end in zip(cuts, [*cuts[1:], rows.logits.shape[1]], strict=True):
        mine = rows._replace(logits=rows.logits[:, first:end].contiguous())
        mask = (
            (None, None) if masks is None else (masks[0][:, first // 32 :].contiguous(), masks[1])
        )
        found.append(module.sample_part(mine, columns, first, *mask, *more))
    differs = torch.zeros(1, dtype=torch.int64)
    return module.best_of_parts(torch.stack(found), differs).tolist(), int(differs)


def a_case(seed: int, num: int, vocab: int) -> tuple[Rows, SamplingColumns]:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num, vocab)).astype(np.float32)
    logits[1::3] = np.round(logits[1::3])
    logits[2::3, rng.permutation(vocab)[: vocab * 9 // 10]] = -np.inf
    logits[5, rng.integers(vocab)], logits[6, rng.integers(vocab)] = np.nan, np.inf
    logits[7] = -np.inf
    slots = rng.permutation(num).astype(np.int32)
    slots[4] = -1
    ones = torch.ones(num, dtype=torch.float64)
    columns = SamplingColumns(
        torch.from_numpy(rng.choice([0.0, 0.3, 1.0, 4.0], num)),
        torch.zeros(num, dtype=torch.int32),
        ones,
        ones - 1,
        torch.from_numpy(rng.integers(-(2**63), 2**63, num)),
    )
    positions = torch.from_numpy(rng.integers(0, 10**6, num).astype(np.int32))
    return Rows(torch.from_numpy(logits), torch.from_numpy(slots), positions), columns


@by_body
@pytest.mark.parametrize(("vocab", "cuts"), [(700, [0, 352]), (1001, [0, 32, 608]), (40, [0])])
def test_tokens_are_those_of_the_whole_vocabulary(
    body: str, vocab: int, cuts: list[int], seed: int
) -> None:
    rows, columns = a_case(seed, 24, vocab)
    wanted = reference.sample(rows, columns).tolist()
    assert choose(body, rows, columns, cuts) == (wanted, 0)


@by_body
def test_masked_tokens_are_not_chosen(body: str, seed: int) -> None:
    rows, columns = a_case(seed, 24, 700)
    rng = np.random.default_rng(seed)
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, (3, 22)).astype(np.int32))
    words[2] = 0
    words[1, 11:] = 0  # nothing is allowed in the second part
    of_row = torch.from_numpy(rng.integers(-1, 3, 24).astype(np.int32))
    wanted = reference.sample_allowed(rows, columns, words, of_row).tolist()
    assert choose(body, rows, columns, [0, 352], (words, of_row)) == (wanted, 0)


@by_body
def test_another_seed_in_a_part_is_found(body: str, seed: int) -> None:
    rows, columns = a_case(seed, 24, 700)
    module, more = BODIES[body]
    parts = [rows._replace(logits=rows.logits[:, cut : cut + 350].contiguous()) for cut in (0, 350)]
    other = columns._replace(seeds=columns.seeds.clone())
    other.seeds[int(rows.slots[0])] += 1
    first = module.sample_part(parts[0], columns, 0, None, None, *more)
    second = module.sample_part(parts[1], other, 350, None, None, *more)
    differs = torch.zeros(1, dtype=torch.int64)
    module.best_of_parts(torch.stack([first, second]), differs)
    assert int(differs) == 1
