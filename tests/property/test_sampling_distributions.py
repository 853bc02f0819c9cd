"""Tokens are drawn with the probabilities asked for, and independently: chi-squared, fixed seeds.

A right sampler fails a test once in ten thousand choices of seeds; the seeds are fixed.
"""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from support.sampling import Bench

from engine.messages.params import SamplingParams
from engine.messages.step import NewSeq
from kernels.cpu import sampling as compiled
from kernels.reference import sampling as reference
from kernels.slots import Rows

NUM_DRAWS = 20_000
ALPHA = 1e-4

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.4},
    {"temperature": 1.9},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.3},
    {"top_p": 0.85, "temperature": 1.5},
    {"min_p": 0.2},
    {"min_p": 0.05, "temperature": 0.7},
    {"min_p": 0.02, "top_k": 6, "top_p": 0.8, "temperature": 1.3},
]
LOGITS = np.array([2.0, -1.0, 0.5, 1.9, 0.5, -30.0, 1.0, 0.0, -0.5, -np.inf, 1.4, 0.9], np.float32)


def expected(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities [V], from a list of (probability, token) cut in the documented order."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params.temperature)
    ranked = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    ranked = [token for token in ranked if weights[token] >= params.min_p * weights.max()]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    total, reached, kept = sum(weights[ranked]), 0.0, []
    for token in ranked:
        if reached < params.top_p * total:
            kept.append(token)
        reached += weights[token]
    probabilities = np.zeros(len(weights))
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def draws(params: SamplingParams, seeds: list[int], positions: list[int]) -> NDArray[np.int32]:
    """One token of LOGITS for each pair of a seed and a position."""
    bench = Bench(len(LOGITS), num_slots=len(seeds))
    settings = {"stop_token_ids": [], "bad_words_ids": []}
    bench.add_all(
        [NewSeq(f"r{i}", i, [1], 1, params, seed=seed, **settings) for i, seed in enumerate(seeds)]
    )
    slots = np.repeat(np.arange(len(seeds), dtype=np.int32), len(positions))
    logits = torch.from_numpy(LOGITS).repeat(len(slots), 1)
    at = np.tile(np.array(positions, dtype=np.int32), len(seeds))
    rows = Rows(logits, torch.from_numpy(slots), torch.from_numpy(at))
    return bench.sampler.draw(rows).numpy()


def assert_drawn_from(tokens: NDArray[np.int32], probabilities: NDArray[np.float64]) -> None:
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), counts
    usual = probabilities * len(tokens) >= 5  # the chi-squared test wants so many of each
    rare = probabilities[~usual].sum()
    assert counts[~usual].sum() <= stats.poisson.isf(ALPHA, rare * len(tokens))
    if usual.sum() > 1:
        share = probabilities[usual] / probabilities[usual].sum()
        found = stats.chisquare(counts[usual], share * counts[usual].sum())
        assert found.pvalue > ALPHA, (counts, probabilities * len(tokens))


@pytest.mark.parametrize("kwargs", PARAMS, ids=str)
def test_many_seeds_at_one_position(kwargs: dict[str, Any]) -> None:
    params = SamplingParams(**kwargs)
    tokens = draws(params, list(range(NUM_DRAWS)), [7])
    assert_drawn_from(tokens, expected(LOGITS, params))


@pytest.mark.parametrize("kwargs", PARAMS, ids=str)
def test_one_seed_at_many_positions(kwargs: dict[str, Any]) -> None:
    params = SamplingParams(**kwargs)
    tokens = draws(params, [-12345], list(range(NUM_DRAWS)))
    assert_drawn_from(tokens, expected(LOGITS, params))


@pytest.mark.parametrize("neighbours", ["positions", "seeds"])
def test_neighbours_are_independent(neighbours: str) -> None:
    """The pair of tokens at neighbouring positions, and of neighbouring seeds."""
    many, two = list(range(0, 2 * NUM_DRAWS, 2)), [0, 1]
    if neighbours == "positions":
        pairs = draws(SamplingParams(top_k=4), many, two).reshape(-1, 2)
    else:
        seeds = [seed + i for seed in many for i in two]
        pairs = draws(SamplingParams(top_k=4), seeds, [3]).reshape(-1, 2)
    table = np.zeros((len(LOGITS), len(LOGITS)))
    np.add.at(table, (pairs[:, 0], pairs[:, 1]), 1)
    table = table[table.any(axis=1)][:, table.any(axis=0)]
    assert table.shape == (4, 4)
    assert stats.chi2_contingency(table).pvalue > ALPHA, table


def test_unlikely_tokens_come_as_often_as_they_should() -> None:
    """One token in 4,096: noise with a coarse tail would never or always let it win."""
    logits = torch.tensor([[0.0, -np.log(4095.0)]], dtype=torch.float32).repeat(400_000, 1)
    seeds = np.arange(len(logits), dtype=np.uint64)
    tokens = choose(compiled, logits, seeds=seeds)
    low, high = stats.binom.interval(1 - ALPHA, len(logits), 1 / 4096)
    assert low <= tokens.sum() <= high


def test_noise_is_gumbel_distributed() -> None:
    seeds = np.arange(50, dtype=np.uint64)
    noise = reference.gumbel_noise(seeds, seeds.astype(np.int32), 4000)
    assert noise.isfinite().all()
    assert stats.kstest(noise.flatten().numpy(), "gumbel_r").pvalue > ALPHA


def choose(body: Any, logits: torch.Tensor, **columns: Any) -> NDArray[np.int32]:
    """choose_tokens of one body, with every column that is not given left off."""
    size = len(logits)
    usual = {
        "temperature": np.ones(size),
        "top_k": np.zeros(size, dtype=np.int32),
        "top_p": np.ones(size),
        "min_p": np.zeros(size),
        "seeds": np.zeros(size, dtype=np.uint64),
        "positions": np.zeros(size, dtype=np.int32),
    }
    found: NDArray[np.int32] = body.choose_tokens(logits.clone(), **{**usual, **columns})
    return found


def random_batch(rng: np.random.Generator) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits with ties, masked tokens, flat and peaked rows; every mixture of parameters."""
    size, vocab = int(rng.integers(1, 9)), int(rng.choice([1, 2, 5, 63, 64, 65, 128, 700, 9000]))
    logits = rng.normal(0, rng.choice([0.1, 1.0, 8.0]), (size, vocab)).astype(np.float32)
    if rng.random() < 0.3:
        logits = logits.round()  # ties, and zeros of both signs
    if rng.random() < 0.3:
        logits[rng.random((size, vocab)) < 0.6] = -np.inf
    if rng.random() < 0.1:
        logits[rng.integers(size), rng.integers(vocab)] = rng.choice([np.nan, -np.nan, np.inf])
    return torch.from_numpy(logits), {
        "temperature": rng.choice([0.0, 1e-4, 0.3, 1.0, 2.0], size),
        "top_k": rng.choice([-1, 0, 1, 3, 40, 5000], size).astype(np.int32),
        "top_p": rng.choice([1.0, 1.0, 0.9999, 0.9, 0.5, 1e-6], size),
        "min_p": rng.choice([0.0, 0.0, 0.01, 0.5, 1.0], size),
        "seeds": rng.integers(0, 2**64, size, dtype=np.uint64),
        "positions": rng.integers(0, 2**31 - 1, size).astype(np.int32),
    }


def test_the_compiled_body_chooses_what_the_reference_chooses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(250):
        logits, columns = random_batch(rng)
        found = choose(compiled, logits, **columns)
        assert found.tolist() == choose(reference, logits, **columns).tolist(), columns


def test_large_batches_run_in_parallel_and_choose_the_same(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (3, 152_064)).astype(np.float32))
    assert logits.numel() > compiled.SERIAL_SIZE
    columns = {"top_p": np.array([1.0, 0.9, 1.0]), "top_k": np.array([0, 0, 20], np.int32)}
    whole = choose(compiled, logits, **columns)
    assert whole.tolist() == choose(reference, logits, **columns).tolist()
    for row in range(3):
        one = {name: column[row : row + 1] for name, column in columns.items()}
        assert choose(compiled, logits[row : row + 1], **one)[0] == whole[row]
