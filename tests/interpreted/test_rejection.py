"""Verification of drafts: what stands is distributed as the target says, whatever was proposed."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from kernels.reference import rejection as reference
from kernels.reference.rejection import Asked
from kernels.reference.sampling import Columns, Rows, choose_tokens, truncate
from kernels.triton import rejection
from kernels.triton.rejection import Drafts
from kernels.triton.sampling import Sizes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = Sizes(BLOCK=256, STRETCH=16, TILE=64, CAPACITY=128)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def by_reference(
    logits: torch.Tensor, asked: Asked, lengths: Sequence[int], *drafts: torch.Tensor | None
) -> list[list[int]]:
    starts = torch.tensor([0, *np.cumsum(lengths)])
    return reference.verify(logits, asked, starts, *drafts)


def by_triton(
    logits: torch.Tensor, asked: Asked, lengths: Sequence[int], *drafts: torch.Tensor | None
) -> list[list[int]]:
    """Every row has a slot of its own: what it asks for."""
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    rows = Rows(logits, torch.arange(len(logits)).int(), torch.from_numpy(asked.positions))
    numbers = (torch.from_numpy(column) for column in asked[:4])
    columns = Columns(*numbers, torch.from_numpy(asked.seeds.view(np.int64)))
    out = rejection.verify(rows, columns, Drafts(starts, *drafts, max(lengths) - 1), SMALL)
    pairs = zip(out.token_ids.tolist(), out.num_sampled.tolist(), strict=True)
    return [tokens[:num] for tokens, num in pairs]


def asked_of(num: int, rng: np.random.Generator) -> Asked:
    return Asked(
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7], num),
        top_k=rng.choice([0, 3, 40], num).astype(np.int32),
        top_p=rng.choice([1.0, 0.8], num),
        min_p=rng.choice([0.0, 0.05], num),
        seeds=rng.integers(0, 2**64, num, dtype=np.uint64),
        positions=rng.integers(0, 1000, num).astype(np.int32),
    )


def random_case(rng: np.random.Generator) -> tuple:
    """Sequences of 0 to 4 drafts, proposed by a model that is nearly right."""
    lengths = [*rng.integers(1, 6, 4).tolist(), 1, 5]
    num, vocab_size = sum(lengths), 400
    logits = torch.from_numpy(rng.normal(0, 2, (num, vocab_size)).astype(np.float32))
    near = logits + torch.from_numpy(rng.normal(0, 0.5, logits.shape).astype(np.float32))
    probs = near.softmax(dim=1)
    drafts = torch.multinomial(probs, 1)[:, 0].int()
    asked = asked_of(num, rng)
    chosen = torch.from_numpy(choose_tokens(logits, *asked))
    drafts = torch.where(torch.rand(num) < 0.5, chosen, drafts)
    last = np.cumsum(lengths) - 1
    drafts[last] = 2**30  # means nothing, must not be read
    probs[last] = torch.nan
    return logits, asked, lengths, drafts, probs


@pytest.mark.parametrize("with_probs", [True, False])
def test_tokens_are_those_of_the_reference(with_probs: bool, rng: np.random.Generator) -> None:
    torch.manual_seed(int(rng.integers(2**31)))
    logits, asked, lengths, drafts, probs = random_case(rng)
    given = (drafts, probs if with_probs else None)
    got = by_triton(logits, asked, lengths, *given)
    wanted = by_reference(logits, asked, lengths, *given)
    assert got == wanted
    assert len({len(tokens) for tokens in wanted}) > 1


@pytest.mark.parametrize("verify", [by_reference, by_triton])
def test_drafts_without_probabilities_change_no_token(verify, rng: np.random.Generator) -> None:
    """What comes out is what would have been sampled without them, only sooner."""
    logits, asked, lengths, _, _ = random_case(rng)
    chosen = choose_tokens(logits, *asked)
    drafts = torch.from_numpy(chosen.copy())
    drafts[::3] += 1
    got = verify(logits, asked, lengths, drafts, None)
    for first, tokens in zip(np.cumsum([0, *lengths]), got, strict=False):
        assert tokens == chosen[first : first + len(tokens)].tolist()
    assert any(len(tokens) > 1 for tokens in got)


@pytest.mark.parametrize("verify", [by_reference, by_triton])
def test_a_row_that_cannot_be_sampled_ends_its_sequence(verify, rng: np.random.Generator) -> None:
    logits = torch.zeros(6, 300)
    logits[:, 7] = 50.0
    asked = asked_of(6, rng)
    for temperature in (0.0, 1.0):
        asked.temperature[:] = temperature
        damaged = logits.clone()
        damaged[1, 200] = torch.nan
        drafts = torch.full((6,), 7, dtype=torch.int32)
        probs = torch.full((6, 300), 1 / 300)
        got = verify(damaged, asked, [3, 3], drafts, probs)
        assert got == [[7, -1], [7, 7, 7]]


@pytest.mark.parametrize(
    ("verify", "num", "top_k"),
    [
        (by_reference, 1500, 0),
        (by_reference, 1500, 3),
        (by_triton, 120, 0),
        pytest.param(by_reference, 10_000, 0, marks=pytest.mark.slow),
        pytest.param(by_reference, 10_000, 3, marks=pytest.mark.slow),
    ],
)
def test_the_distribution_is_the_target_s(
    verify, num: int, top_k: int, rng: np.random.Generator
) -> None:
    """One draft, then the token behind: first from p, and from the other p if the draft stood."""
    x = torch.tensor([[1.5, 0.2, 0.9, -0.5, 0.4], [0.0, 1.0, -1.0, 0.3, 0.8]])
    q = torch.tensor([0.1, 0.4, 0.3, 0.15, 0.05])
    heat = 0.8
    limits = (torch.tensor([[value]]) for value in (top_k, 1.0, 0.0))
    p = truncate(x.double() / heat, *limits).softmax(dim=1).numpy()
    asked = Asked(
        np.full(2 * num, heat),
        np.full(2 * num, top_k, dtype=np.int32),
        np.ones(2 * num),
        np.zeros(2 * num),
        np.repeat(rng.integers(0, 2**64, num, dtype=np.uint64), 2),
        np.tile(np.array([8, 9], dtype=np.int32), num),
    )
    drafts = torch.zeros(2 * num, dtype=torch.int32)
    drafts[::2] = torch.from_numpy(
        rng.choice(5, num, p=q.double().numpy() / float(q.double().sum()))
    )
    got = verify(x.repeat(num, 1), asked, [2] * num, drafts, q.repeat(2 * num, 1))
    stood = [tokens for tokens in got if len(tokens) == 2]
    for place, tokens in enumerate((got, stood)):
        counts = np.bincount([each[place] for each in tokens], minlength=5)
        possible = p[place] > 0
        assert not counts[~possible].any()
        fit = chisquare(counts[possible], p[place][possible] * len(tokens))
        assert fit.pvalue > 1e-4, (counts, p[place] * len(tokens))
    overlap = np.minimum(p[0], q.numpy()).sum()  # as many stand as can
    spread = np.sqrt(overlap * (1 - overlap) / num)
    assert abs(len(stood) / num - overlap) < 4.5 * spread
