"""Choosing tokens: every body gives the tokens of the reference, which sorts in float64."""

import itertools

import numpy as np
import pytest
import torch

from kernels.cpu import sampling as cpu
from kernels.reference import sampling as reference
from kernels.reference.sampling import Columns, Rows
from kernels.triton import sampling
from kernels.triton.sampling import Sizes

# NumPy warns of infinities and of unsigned numbers that wrap around, devices do not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BODIES = {"cpu": cpu, "triton": sampling}
by_body = pytest.mark.parametrize("body", BODIES)
SMALL = Sizes(BLOCK=256, STRETCH=16, TILE=64, CAPACITY=128)

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


def on_device(asked: dict[str, np.ndarray]) -> Columns:
    names = ("temperature", "top_k", "top_p", "min_p")
    seeds = torch.from_numpy(asked["seeds"].view(np.int64))
    return Columns(*(torch.from_numpy(asked[name]) for name in names), seeds)


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
@pytest.mark.parametrize(("num", "vocab_size"), [(48, 300), (24, 5000), (2, 1)])
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
    num = 24
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


def test_cuts_keep_exactly_the_tokens_of_the_reference(rng: np.random.Generator) -> None:
    """Sampling would show a token too many only if it won."""
    num, vocab_size = 32, 700
    logits, asked = logits_of(num, vocab_size, rng), asked_of(num, rng)
    asked["temperature"] = np.maximum(asked["temperature"], 0.5)
    slots = torch.arange(num).int()
    cuts = sampling.cut(Rows(logits, slots, slots), on_device(asked), SMALL)
    value, last = cuts.value[:, None], cuts.last_tie[:, None]
    ids = torch.arange(vocab_size)
    stays = (logits > value) | ((logits == value) & (ids <= last) & logits.isfinite())
    column = {name: torch.from_numpy(asked[name])[:, None] for name in asked if name != "seeds"}
    wanted = reference.truncate(
        logits.double() / column["temperature"], column["top_k"], column["top_p"], column["min_p"]
    ).isfinite()
    assert torch.equal(stays, wanted)
