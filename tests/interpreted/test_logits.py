"""Penalties, masks, edits, bad words and log-probabilities: every body against its reference."""

import numpy as np
import pytest
import torch

from kernels import triton
from kernels.cpu import logits as cpu
from kernels.reference import logits as reference
from kernels.reference.logits import BadWords, Edits, Penalties

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

bodies = pytest.mark.parametrize("body", [triton, cpu], ids=["triton", "cpu"])

VOCAB = 1500  # no whole number of words of bits, two blocks of the kernel
SLOTS = torch.tensor([2, -1, 0, 1], dtype=torch.int32)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def random_logits(rng: np.random.Generator, num: int = len(SLOTS)) -> torch.Tensor:
    logits = torch.from_numpy(rng.normal(0, 3, (num, VOCAB)).astype(np.float32))
    logits[0, ::7] = -torch.inf
    return logits


def tokens(rng: np.random.Generator, *size: int) -> torch.Tensor:
    """Ids from both ends, so that many occur more than once."""
    near = rng.integers(0, 20, size)
    return torch.from_numpy(np.where(near % 3 == 0, VOCAB - 1 - near, near).astype(np.int32))


def fresh_penalties() -> Penalties:
    state = reference.new_penalties(3, VOCAB, "cpu")
    for column, values in zip(state[2:], ((1.3, 1, 0.5), (0.5, 0, -1), (0.25, 2, 0)), strict=True):
        column.copy_(torch.tensor(values, dtype=torch.float64))
    state.prompt_bits.fill_(-1)  # what the last users of the slots left behind
    state.counts.fill_(5)
    return state


@pytest.mark.parametrize("body", [reference, triton, cpu])
@pytest.mark.parametrize("asked", [(1.2, 0.0, 0.0), (1.0, 0.7, 0.3), (0.6, -0.5, 0.2)])
def test_penalties_of_one_row(body: object, asked: tuple, rng: np.random.Generator) -> None:
    """Written out: each token once, with what it was counted; drafts behind it count, too."""
    repetition, presence, frequency = asked
    history, num_prompt = tokens(rng, 60), 25
    logits = random_logits(rng)[2:3]
    wanted = logits[0].double()
    for token in set(history.tolist()):
        count = history[num_prompt:].tolist().count(token)
        wanted[token] *= 1 / repetition if wanted[token] > 0 else repetition
        wanted[token] -= presence * (count > 0) + frequency * count
    state = reference.new_penalties(1, VOCAB, "cpu")
    for column, value in zip(state[2:], asked, strict=True):
        column.fill_(value)
    slot = torch.zeros(1, dtype=torch.int32)
    body.seat(state, 0, history[:50], num_prompt)
    body.count_tokens(state, slot, history[None, 50:58], torch.tensor([8], dtype=torch.int32))
    counts = state.counts.clone()
    body.penalise_rows(logits, state, slot, history[None, 58:])
    torch.testing.assert_close(logits[0], wanted.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(state.counts, counts)


@bodies
@pytest.mark.parametrize("with_drafts", [False, True])
def test_penalties_by_slot(body: object, with_drafts: bool, rng: np.random.Generator) -> None:
    mine, wanted = fresh_penalties(), fresh_penalties()
    for slot in range(3):
        history = tokens(rng, 40)
        body.seat(mine, slot, history, 15 * slot)
        reference.seat(wanted, slot, history, 15 * slot)
    sampled, num = tokens(rng, 4, 3), torch.tensor([3, 3, 0, 1], dtype=torch.int32)
    sampled[3, 1:] = -1  # not read
    body.count_tokens(mine, SLOTS, sampled, num)
    reference.count_tokens(wanted, SLOTS, sampled, num)
    used = (VOCAB + 31) // 32
    assert torch.equal(mine.prompt_bits[:, :used], wanted.prompt_bits[:, :used])
    assert torch.equal(mine.counts, wanted.counts)
    drafts = tokens(rng, 4, 2) if with_drafts else None
    if with_drafts:
        drafts[2, 1] = -1
    got, expected = random_logits(rng), None
    got[1] = torch.nan  # nobody's row
    expected = got.clone()
    body.penalise_rows(got, mine, SLOTS, drafts)
    reference.penalise_rows(expected, wanted, SLOTS, drafts)
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


@bodies
def test_bitmasks(body: object, rng: np.random.Generator) -> None:
    masks = torch.from_numpy(
        rng.integers(-(2**31), 2**31, (2, (VOCAB + 31) // 32)).astype(np.int32)
    )
    got = random_logits(rng)
    wanted, mask_of_row = got.clone(), torch.tensor([1, -1, 0, 1], dtype=torch.int32)
    body.apply_bitmask(got, masks, mask_of_row)
    reference.apply_bitmask(wanted, masks, mask_of_row)
    assert torch.equal(got, wanted)
    assert wanted[2].isneginf().sum() > VOCAB // 4


@bodies
@pytest.mark.parametrize("positions", [torch.int32, torch.int64])
def test_edits(body: object, positions: torch.dtype, rng: np.random.Generator) -> None:
    """Bias, stop tokens of requests that are too short, words of one token."""
    ids = torch.from_numpy(rng.permutation(VOCAB)[:300].astype(np.int32))
    ids[200] = ids[199]  # raised and forbidden
    values = torch.randn(300)
    values[200:] = -torch.inf
    until = torch.full((300,), 2**31 - 1, dtype=torch.int32)
    until[250:] = torch.from_numpy(rng.integers(0, 100, 50).astype(np.int32))
    edits = Edits(torch.tensor([0, 300, 300, 300], dtype=torch.int32), ids, values, until)
    slots = torch.tensor([0, -1, 1, 0], dtype=torch.int32)
    got = random_logits(rng)
    wanted, at = got.clone(), torch.tensor([3, 50, 50, 60], dtype=positions)
    body.apply_edits(got, edits, slots, at)
    reference.apply_edits(wanted, edits, slots, at)
    assert torch.equal(got, wanted)
    assert not torch.equal(got[0].isneginf(), got[3].isneginf())


@bodies
def test_bad_words(body: object, rng: np.random.Generator) -> None:
    """Only behind their first tokens, which must all be output."""
    words = [[5], [7, 8], [7, 8, 9], [1, 2, 3, 4], list(range(100, 140)), [3, 11]]
    bounds = torch.tensor([0, *np.cumsum([len(word) for word in words])], dtype=torch.int32)
    flat = torch.tensor([token for word in words for token in word], dtype=torch.int32)
    bad = BadWords(torch.tensor([0, 4, 4, 6], dtype=torch.int32), bounds, flat)
    history = torch.full((3, 64), 7, dtype=torch.int32)
    history[0, :6] = torch.tensor([1, 2, 3, 6, 7, 8])
    history[2, 10:49] = torch.arange(100, 139)
    num_prompt = torch.tensor([1, 0, 10], dtype=torch.int32)
    slots = torch.tensor([0, 0, 0, 1, 2, 2, -1], dtype=torch.int32)
    positions = torch.tensor([3, 5, 6, 6, 49, 48, 6])
    got = torch.zeros(len(slots), 200)
    wanted = got.clone()
    rows = (slots, positions, history, num_prompt)
    body.forbid_words(got, bad, *rows)
    reference.forbid_words(wanted, bad, *rows)
    assert torch.equal(got, wanted)
    banned = [row.isneginf().nonzero().flatten().tolist() for row in got]
    assert banned == [[5], [5, 8], [5, 9], [], [139], [], []]


@pytest.mark.parametrize(
    ("body", "dtype"), [(triton, torch.float32), (triton, torch.bfloat16), (cpu, torch.float32)]
)
@pytest.mark.parametrize("vocab_size", [700, 9000])
def test_logprobs_and_ranks(
    body: object, dtype: torch.dtype, vocab_size: int, rng: np.random.Generator
) -> None:
    logits = torch.from_numpy(rng.normal(0, 4, (4, vocab_size))).to(dtype)
    logits[1, : vocab_size // 2] = -torch.inf
    logits[2, 3] = torch.nan
    ids = torch.from_numpy(rng.integers(0, vocab_size, (4, 40)))
    got, ranks = body.token_logprobs(logits, ids)
    wanted, wanted_ranks = reference.token_logprobs(logits, ids)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    sound = [0, 1, 3]
    assert torch.equal(ranks[sound], wanted_ranks[sound])
    assert got[2].isnan().all() and got[1].isneginf().any()
