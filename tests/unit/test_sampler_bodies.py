"""The sampler on compiled loops against the same on plain torch, padded as a graph pads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.sampling import Bench, random_logits

import kernels.slots
from engine.messages.params import SamplingParams
from engine.messages.step import StepResult
from engine.sample.sampler import RowMasks
from engine.worker.platform.host import HostPlatform
from kernels.reference import index, logits, sampling

VOCAB, SLOTS = 70, 8


@contextmanager
def reference_bodies() -> Iterator[None]:
    """Operations on slots are plain torch's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in (("index", index), ("logits", logits), ("sampling", sampling)):
            patch.setattr(kernels.slots, name, module)
        yield


def only_even(params: SamplingParams, prompt: list[int]):
    """A custom processor: masks odd tokens, and the token that was put out last."""
    if not (params.extra_args or {}).get("only_even"):
        return None

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        if params.extra_args["only_even"] == "raise" and len(output) == 2:
            raise RuntimeError("third token")
        logits[1::2] = -torch.inf
        logits[output[-1:]] = -torch.inf
        return logits

    return process


class Both:
    """The two samplers; they must say the same."""

    def __init__(self) -> None:
        self.compiled = Bench(VOCAB, (only_even,))
        with reference_bodies():
            self.plain = Bench(VOCAB, (only_even,), HostPlatform(), padded=True)

    def add(self, slot: int, params: SamplingParams, tokens: list[int], num: int, **more) -> None:
        asked = (slot, params, tokens[:num], tokens[num:])
        self.compiled.add(*asked, seed=1000 + slot, **more)
        with reference_bodies():
            self.plain.add(*asked, seed=1000 + slot, **more)

    def step(
        self, scores: torch.Tensor, slots: list[int], masks: RowMasks | None = None
    ) -> StepResult:
        """Sample a row for each slot."""
        got = self.compiled.step(scores.clone(), slots, masks)
        if masks is not None:  # a row of padding behind each
            of_row = np.full(2 * len(slots), -1, dtype=np.int32)
            of_row[::2] = masks.of_row
            masks = RowMasks(masks.words, of_row)
        with reference_bodies():
            wanted = self.plain.step(scores.clone(), slots, masks)
        assert got.errors == wanted.errors
        assert got.counts.tolist() == wanted.counts.tolist()
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        assert set(got.logprobs) == set(wanted.logprobs)
        for row, (entry,) in got.logprobs.items():
            (other,) = wanted.logprobs[row]
            assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        return got


def asks(dice: np.random.Generator) -> tuple[SamplingParams, dict]:
    """Any mixture of what a request may ask for."""
    ids = dice.permutation(VOCAB).tolist()
    options = {
        "temperature": float(dice.choice([0.0, 0.7, 1.3])),
        "top_k": int(dice.choice([0, 5])),
        "top_p": float(dice.choice([1.0, 0.8])),
        "min_p": float(dice.choice([0.0, 0.05])),
        "repetition_penalty": float(dice.choice([1.0, 1.4])),
        "presence_penalty": float(dice.choice([0.0, 0.7])),
        "frequency_penalty": float(dice.choice([0.0, -0.4])),
        "logit_bias": {ids[0]: 4.0, ids[1]: -3.0} if dice.random() < 0.3 else None,
        "allowed_token_ids": ids[:20] if dice.random() < 0.3 else None,
        "min_tokens": int(dice.choice([0, 3])),
        "logprobs": [None, 0, 3, -1][dice.integers(4)],
        "extra_args": {"only_even": True} if dice.random() < 0.3 else None,
    }
    more = {}
    if dice.random() < 0.5:
        more["bad_words_ids"] = [[i] for i in ids[:5]] + [[i, j] for i in ids[:9] for j in ids[:40]]
    if options["min_tokens"]:
        more["stop_token_ids"] = ids[5:30]
    return SamplingParams(**options), more


@pytest.mark.parametrize("round_", range(6))
def test_both_samplers_say_the_same(round_: int, seed: int) -> None:
    """New requests, resumed ones with output of their own, departures, padding."""
    dice = np.random.default_rng((seed, round_))
    both = Both()
    for turn in range(5):
        slots = dice.permutation(SLOTS)[: 2 + turn].tolist()
        for slot in slots:
            params, more = asks(dice)
            tokens = dice.integers(0, VOCAB, 9).tolist()
            both.add(slot, params, tokens, int(dice.integers(4, 10)), **more)
        for _ in range(4):
            rows = dice.permutation(slots).tolist()
            scores = random_logits(int(dice.integers(2**31)), len(rows), VOCAB)
            both.step(scores, rows, some_masks(dice, len(rows)))


def some_masks(dice: np.random.Generator, num_rows: int) -> RowMasks | None:
    if dice.random() < 0.5:
        return None
    words = torch.from_numpy(dice.integers(-(2**31), 2**31, (2, 3)).astype(np.int32))
    return RowMasks(words, dice.integers(-1, 2, num_rows).astype(np.int32))


def test_what_fails_fails_alone_and_says_why() -> None:
    both = Both()
    plain = SamplingParams(temperature=0)
    masked = SamplingParams(temperature=0, allowed_token_ids=[3], logit_bias={5: 1.0})
    raising = SamplingParams(temperature=0, extra_args={"only_even": "raise"})
    both.add(0, plain, [1, 2], 2)
    both.add(1, masked, [1, 2], 2, bad_words_ids=[[3]])
    both.add(2, raising, [1, 2, 8, 9], 2)
    both.add(3, masked, [1, 2], 2)
    both.add(4, plain, [1, 2], 2)
    scores = random_logits(1, 5, VOCAB)
    scores[3, 7] = torch.nan
    scores[4, 8] = torch.inf
    result = both.step(scores, [0, 1, 2, 3, 4])
    assert "no token is left for position 2: allowed_token_ids" in result.errors[1]
    assert "only_even raised RuntimeError: third token" in result.errors[2]
    assert "the model's logits for position 2 hold NaN" in result.errors[3]
    assert "the model's logits for position 2 hold +inf" in result.errors[4]
    assert result.counts.tolist() == [1, 0, 0, 0, 0]


def test_a_mask_that_allows_one_token_leaves_no_choice() -> None:
    both = Both()
    for slot in range(3):
        both.add(slot, SamplingParams(temperature=1.0), [1, 2], 2)
    words = torch.zeros((1, 3), dtype=torch.int32)
    words[0, 1] = 1 << 9
    masks = RowMasks(words, np.array([-1, 0, 0], dtype=np.int32))
    result = both.step(random_logits(3, 3, VOCAB), [0, 1, 2], masks)
    assert result.token_ids.tolist()[1:] == [41, 41]


@pytest.mark.parametrize("seed", range(6))
def test_a_draw_that_lays_masks_is_one_from_masked_logits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num, vocab_size = 40, 3000 + seed
    scores = random_logits(seed, num, vocab_size)
    scores[3, ::2], scores[4, 1::2], scores[5, 7] = torch.nan, torch.inf, -torch.inf
    share = rng.choice([0.0, 0.0003, 0.01, 0.5, 1.0], num)
    bits = rng.random((num, -(-vocab_size // 32) * 32)) < share[:, None]
    words = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    of_row = torch.from_numpy(np.where(rng.random(num) < 0.8, np.arange(num), -1).astype(np.int32))
    asked = sampling.SamplingColumns(
        torch.from_numpy(rng.choice([0.0, 0.7, 1.0], num)),
        torch.from_numpy(rng.choice([0, 1, 20, vocab_size], num).astype(np.int32)),
        torch.from_numpy(rng.choice([0.5, 1.0], num)),
        torch.from_numpy(rng.choice([0.0, 0.1], num)),
        torch.from_numpy(rng.integers(0, 2**62, num)),
    )
    slots = torch.from_numpy(np.where(rng.random(num) < 0.9, np.arange(num), -1).astype(np.int32))
    rows = sampling.Rows(scores, slots, torch.from_numpy(rng.integers(1, 99, num)))
    found = kernels.slots.sample_allowed(rows, asked, words, of_row)
    masked = scores.clone()
    kernels.slots.apply_bitmask(masked, words, of_row)
    assert found.tolist() == kernels.slots.sample(rows._replace(logits=masked), asked).tolist()
    with reference_bodies():
        assert found.tolist() == sampling.sample_allowed(rows, asked, words, of_row).tolist()


def test_a_row_whose_mask_allows_nothing_and_one_that_is_not_sound_say_so() -> None:
    bench = Bench(VOCAB)
    for slot in range(4):
        bench.add(slot, SamplingParams(temperature=1.0), [1, 2])
    scores = random_logits(1, 4, VOCAB)
    scores[1], scores[2, 5] = torch.nan, torch.nan
    words = torch.zeros((2, 3), dtype=torch.int32)
    words[1, 1] = 1 << 9
    masks = RowMasks(words, np.array([0, 1, 1, -1], dtype=np.int32))
    result = bench.step(scores, [0, 1, 2, 3], masks, may_leave_masks=True)
    assert "no token is left for position 2" in result.errors[0]
    assert "the model's logits for position 2 hold NaN" in result.errors[1]
    assert result.counts.tolist() == [0, 0, 1, 1] and int(result.token_ids[0]) == 41


def test_log_probabilities_of_a_row_with_a_mask_are_not_those_of_unsound_logits() -> None:
    bench = Bench(VOCAB)
    for slot in range(2):
        bench.add(slot, SamplingParams(temperature=1.0, logprobs=2), [1, 2])
    bench.add(2, SamplingParams(temperature=1.0), [1, 2])
    bench.add(3, SamplingParams(temperature=1.0, logit_bias={3: 1.0}), [1, 2])
    scores = random_logits(1, 4, VOCAB)
    scores[1, 5], scores[2] = torch.nan, -torch.inf
    words = torch.zeros((2, 3), dtype=torch.int32)
    words[0, 1] = 1 << 9
    masks = RowMasks(words, np.array([0, 0, 0, 1], dtype=np.int32))
    result = bench.step(scores, [0, 1, 2, 3], masks, may_leave_masks=True)
    assert result.counts.tolist() == [1, 0, 0, 0]
    assert "no token is left for position 2" in result.errors[3]
    assert "the model's logits for position 2 hold NaN" in result.errors[1]
    assert "the model's logits for position 2 are all -inf" in result.errors[2]
