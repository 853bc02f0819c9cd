"""Choosing tokens: every body gives the tokens of the reference, which sorts in float64."""

import itertools

import numpy as np
import pytest
import torch

from kernels.cpu import sampling as cpu
from kernels.reference import sampling as reference
from kernels.reference.sampling import Rows, SamplingColumns
from kernels.triton import sampling
from kernels.triton.sampling import Sizes

# NumPy warns of infinities and of unsigned numbers that wrap around, devices do not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BODIES = {"cpu": cpu, "triton": sampling}
by_body = pytest.mark.parametrize("body", BODIES)
SMALL = Sizes(BLOCK=256, STRETCH=16, BINS=16, TILE=64, CAPACITY=128)

TEMPERATURES = (0.0, 0.3, 1.0, 4.0)
TOP_KS = (0, 1, 7, 60, 10**6)
TOP_PS = (1.0, 0.9, 0.3, 1e-6)
MIN_PS = (0.0, 0.02, 0.5)


def asked_of(num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What `num` rows ask for: the combinations in turn, seeds with all bits in use."""
    every = list(itertools.product(TEMPERATURES, TOP_KS, TOP_PS, MIN_PS))
    rng.shuffle(every)
    columns = [np.array(column) for column in zip(*every[:num], strict=True)]
    return {
        "temperature": columns[0].astype(np.float64),
        "top_k": columns[1].astype(np.int32),
        "top_p": columns[2].astype(np.float64),
        "min_p": columns[3].astype(np.float64),
        "seeds": rng.integers(0, 2**64, num, dtype=np.uint64),
        "positions": rng.integers(0, 10**6, num).astype(np.int32),
    }


def on_device(asked: dict[str, np.ndarray]) -> SamplingColumns:
    names = ("temperature", "top_k", "top_p", "min_p")
    seeds = torch.from_numpy(asked["seeds"].view(np.int64))
    return SamplingColumns(*(torch.from_numpy(asked[name]) for name in names), seeds)


def logits_of(num: int, vocab_size: int, rng: np.random.Generator) -> torch.Tensor:
    """Peaked and flat rows, some with many equal logits, some with most tokens masked."""
    logits = rng.normal(0, 1, (num, vocab_size)) * rng.choice([0.1, 2, 6], (num, 1))
    logits[1::4] = np.round(logits[1::4] * 2) / 2
    logits[2::4, rng.permutation(vocab_size)[: vocab_size * 9 // 10]] = -np.inf
    return torch.from_numpy(logits.astype(np.float32))


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@by_body
@pytest.mark.parametrize(("num", "vocab_size"), [(48, 300), (12, 5000), (2, 1)])
def test_tokens_are_those_of_the_reference(
    body: str, num: int, vocab_size: int, rng: np.random.Generator
) -> None:
    logits, asked = logits_of(num, vocab_size, rng), asked_of(num, rng)
    got = BODIES[body].choose_tokens(logits.clone(), **asked)
    assert got.tolist() == reference.choose_tokens(logits, **asked).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_candidates_and_blocks_in_half_precision(
    dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """More candidates than there is room for; logits come as the model's head gives them."""
    num = 12
    logits, asked = logits_of(num, 1000, rng).to(dtype), asked_of(num, rng)
    rows = Rows(logits, torch.arange(num).int(), torch.from_numpy(asked["positions"]))
    got = sampling.sample(rows, on_device(asked), SMALL)
    assert got.tolist() == reference.choose_tokens(logits.float(), **asked).tolist()


def test_rows_find_their_slots_and_padding_is_not_read(rng: np.random.Generator) -> None:
    logits, asked = logits_of(6, 300, rng), asked_of(6, rng)
    wanted = reference.choose_tokens(logits, **asked)
    slots = torch.tensor([4, -1, 0, 5], dtype=torch.int32)
    wide = torch.full((4, 320), torch.nan)
    wide[:, :300] = logits[slots.long()]
    wide[1] = torch.nan
    positions = torch.from_numpy(asked["positions"])[slots.long()].long()
    got = sampling.sample(Rows(wide[:, :300], slots, positions), on_device(asked), SMALL)
    assert got.tolist() == [wanted[4], -1, wanted[0], wanted[5]]


@by_body
def test_rows_that_cannot_be_sampled_disturb_no_other(body: str, rng: np.random.Generator) -> None:
    logits, asked = logits_of(8, 300, rng), asked_of(8, rng)
    asked["temperature"][:8] = [0, 1, 0, 1, 0, 1, 0, 1]
    logits[0, 17] = torch.nan
    logits[1, 299] = torch.nan
    logits[2, 5] = torch.inf
    logits[3, 5] = torch.inf
    logits[4] = -torch.inf
    logits[5] = -torch.inf
    got = BODIES[body].choose_tokens(logits.clone(), **asked)
    assert got[:6].tolist() == [-1] * 6
    assert got[6:].tolist() == reference.choose_tokens(logits, **asked)[6:].tolist()


@by_body
def test_of_equal_logits_the_lower_id_comes_first(body: str) -> None:
    logits = torch.zeros(3, 600)
    logits[:, 300:] = -0.0
    asked = asked_of(3, np.random.default_rng(0))
    asked["temperature"][:] = [0, 1, 1]
    asked["top_k"][:] = [0, 2, 0]
    asked["top_p"][:] = [1, 1, 2 / 600]
    asked["min_p"][:] = 0
    for seed in range(6):
        asked["seeds"][:] = seed
        got = BODIES[body].choose_tokens(logits.clone(), **asked)
        assert got[0] == 0 and (got < 2).all()
        assert got.tolist() == reference.choose_tokens(logits, **asked).tolist()


def kept_by(
    sizes: Sizes, logits: torch.Tensor, asked: dict[str, np.ndarray]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tokens remain, by our cuts and by the reference."""
    slots = torch.arange(len(logits)).int()
    cuts = sampling.cut(Rows(logits, slots, slots), on_device(asked), sizes)
    value, last = cuts.value[:, None], cuts.last_tie[:, None]
    ids = torch.arange(logits.shape[1])
    stays = (logits > value) | ((logits == value) & (ids <= last) & logits.isfinite())
    column = {name: torch.from_numpy(asked[name])[:, None] for name in asked if name != "seeds"}
    wanted = reference.truncate(
        logits.double() / column["temperature"], column["top_k"], column["top_p"], column["min_p"]
    )
    return stays, wanted.isfinite()


def test_cuts_keep_exactly_the_tokens_of_the_reference(rng: np.random.Generator) -> None:
    """Sampling would show a token too many only if it won."""
    num, vocab_size = 16, 700
    logits, asked = logits_of(num, vocab_size, rng), asked_of(num, rng)
    asked["temperature"] = np.maximum(asked["temperature"], 0.5)
    stays, wanted = kept_by(SMALL, logits, asked)
    assert torch.equal(stays, wanted)


SHAPES = {
    "normal": lambda x: 3 * x,
    "flat": lambda x: 0.01 * x,
    "equal": lambda x: 0 * x + 2.5,
    "ties": lambda x: np.round(x),
    "peaked": lambda x: np.where(x > x.max(1, keepdims=True) - 0.2, 30 + x, x),
    "bulk far below": lambda x: np.where(x == x.max(1, keepdims=True), 9.0, 0.01 * x),
    "masked": lambda x: np.where(x < 1, -np.inf, x),
    "finite mask": lambda x: np.where(x < 0.5, -1e30, 4 * x),
    "large": lambda x: 1e4 + 50 * x,
}
CUTS = [(0, 0.9, 0), (0, 0.999, 0), (0, 0.5, 0.01), (50, 1, 0), (50, 0.8, 0.05), (400, 0.7, 0)]
TIGHT = Sizes(BLOCK=512, STRETCH=32, BINS=32, TILE=128, CAPACITY=200)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [pytest.param(127, marks=pytest.mark.slow), 1100])
def test_rows_of_every_shape_are_cut_where_the_reference_cuts(
    shape: str, vocab_size: int, rng: np.random.Generator
) -> None:
    """From what was gathered or, where there is no room, from the row itself.

    Where a nucleus ends is a matter of the last digits of a sum, but of nothing that weighs much.
    """
    num = len(CUTS)
    x = rng.normal(0, 1, (num, vocab_size))
    logits = torch.from_numpy(SHAPES[shape](x).astype(np.float32))
    asked = asked_of(num, rng)
    asked["top_k"], asked["top_p"], asked["min_p"] = np.array(CUTS).T.copy()
    asked["top_k"] = asked["top_k"].astype(np.int32)
    asked["temperature"] = rng.choice([0.1, 0.7, 1.0, 2.0, 5.0], num)
    stays, wanted = kept_by(TIGHT, logits, asked)
    weights = (logits.double() / torch.from_numpy(asked["temperature"])[:, None]).softmax(1)
    assert (weights * (stays != wanted)).sum(1).max() < 1e-5
    assert (stays.sum(1) - wanted.sum(1)).abs().max() <= 1
    assert torch.equal(stays[3], wanted[3])


@pytest.mark.parametrize("vocab_size", [1, 127, 4096, 4097, 50_000])
def test_tokens_of_vocabularies_of_every_size(vocab_size: int, rng: np.random.Generator) -> None:
    num = 4 if vocab_size > 10_000 else 8
    logits, asked = logits_of(num, vocab_size, rng), asked_of(num, rng)
    asked["temperature"] = rng.uniform(0.1, 5, num)
    asked["top_p"][::2], asked["top_k"][::4] = 0.9, 0
    logits[-1, vocab_size // 2] = torch.nan
    got = sampling.choose_tokens(logits, **asked)
    assert got[-1] == -1
    assert got[:-1].tolist() == reference.choose_tokens(logits, **asked)[:-1].tolist()


def test_a_row_is_cut_alike_whatever_rows_stand_beside_it(rng: np.random.Generator) -> None:
    num = 6
    logits, asked = logits_of(num, 2000, rng), asked_of(num, rng)
    slots = torch.arange(num).int()
    together = sampling.cut(Rows(logits, slots, slots), on_device(asked), TIGHT)
    for n in range(num):
        row = Rows(logits[n : n + 1], slots[n : n + 1], slots[n : n + 1])
        alone = sampling.cut(row, on_device(asked), TIGHT)
        assert alone.value[0] == together.value[n]
        assert alone.greedy[0] == together.greedy[n]
        if alone.value[0] < torch.inf:
            assert alone.last_tie[0] == together.last_tie[n]
