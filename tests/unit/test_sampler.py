"""The sampler's edits, seeds and logprobs, each against a plain reading of what it promises."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.sampling import SLOTS, VOCAB, Bench, random_logits

from engine.messages.params import SamplingParams
from engine.messages.requests import TokenLogprobs
from engine.sample.logprobs import score
from kernels.cpu.logits import token_logprobs


class Tap:
    """A custom processor that records the logits reaching it: those after all other edits."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.outputs: list[list[int]] = []

    def __call__(self, params: SamplingParams, prompt: list[int]) -> Callable[..., torch.Tensor]:
        def process(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            self.seen.append(logits.clone())
            self.outputs.append(output_token_ids)
            return logits

        return process


def edited(
    params: SamplingParams,
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    **more: Any,
) -> torch.Tensor:
    """Logits [V] after the edits of a request that has this prompt and output."""
    tap = Tap()
    bench = Bench(len(logits), (tap,))
    bench.add(3, params, prompt, output, **more)
    bench.sample(logits[None], [3])
    return tap.seen[0]


# Greedy


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest() -> None:
    bench = Bench()
    for slot in range(3):
        bench.add(slot, SamplingParams(temperature=0.0), [1])
    logits = torch.zeros(3, VOCAB)
    logits[0, 7] = 1.0
    logits[1, [20, 30]] = 2.0
    assert bench.sample(logits, [0, 1, 2]).token_ids.tolist() == [7, 20, 0]


def test_greedy_ignores_truncation_and_noise(seed: int) -> None:
    bench = Bench()
    for slot in range(SLOTS):
        params = SamplingParams(temperature=0.0 if slot % 2 else 1e-4, top_k=3, top_p=0.5)
        bench.add(slot, params, [1])
    logits = random_logits(seed, SLOTS, VOCAB)
    out = bench.sample(logits, list(range(SLOTS)))
    assert out.token_ids.tolist() == logits.argmax(1).tolist()


def test_an_empty_batch_samples_nothing() -> None:
    out = Bench().sample(torch.empty(0, VOCAB), [])
    assert out.token_ids.tolist() == [] and out.errors == {} and out.logprobs == {}


# Edits


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.6, 0.0), (1.0, 0.0, -0.4), (1.2, -1.0, 0.5)],
)
def test_penalties(seed: int, repetition: float, presence: float, frequency: float) -> None:
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(0, VOCAB, 12).tolist(), rng.integers(0, VOCAB, 25).tolist()
    logits = random_logits(seed, VOCAB)
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    expected = logits.tolist()
    for token in range(VOCAB):
        if token in prompt + output:
            value = expected[token]
            expected[token] = value / repetition if value > 0 else value * repetition
        if token in output:
            expected[token] -= presence + frequency * output.count(token)
    torch.testing.assert_close(edited(params, logits, prompt, output), torch.tensor(expected))


def test_penalties_count_what_is_sampled_and_survive_preemption(seed: int) -> None:
    """Five steps in one go, and resumed after three of them: the same logits every time."""
    params = SamplingParams(frequency_penalty=1.5, repetition_penalty=1.1, seed=seed)
    logits = random_logits(seed, 5, VOCAB)
    straight, resumed = Tap(), Tap()
    bench = Bench(processors=(straight,))
    bench.add(0, params, [4, 5, 6], seed=seed)
    sampled = [int(bench.sample(logits[step : step + 1], [0]).token_ids[0]) for step in range(5)]
    bench = Bench(processors=(resumed,))
    bench.add(5, params, [4, 5, 6], sampled[:3], seed=seed)
    again = [int(bench.sample(logits[step : step + 1], [5]).token_ids[0]) for step in (3, 4)]
    assert again == sampled[3:]
    assert resumed.outputs == [sampled[:3], sampled[:4]]
    torch.testing.assert_close(resumed.seen, straight.seen[3:], rtol=0, atol=0)


def test_logit_bias(seed: int) -> None:
    logits = random_logits(seed, VOCAB)
    expected = logits.clone()
    expected[3] += 5
    expected[9] -= 100
    biased = edited(SamplingParams(logit_bias={3: 5.0, 9: -100.0}), logits, [1], [])
    torch.testing.assert_close(biased, expected)


def test_only_allowed_tokens_remain_and_bias_brings_none_back(seed: int) -> None:
    logits = random_logits(seed, VOCAB)
    params = SamplingParams(allowed_token_ids=[2, 40], logit_bias={2: 1.0, 7: 100.0})
    expected = torch.full((VOCAB,), -torch.inf)
    expected[2], expected[40] = logits[2] + 1, logits[40]
    torch.testing.assert_close(edited(params, logits, [1], []), expected)


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ([], {9}),
        ([5], {6, 9}),
        ([1, 5], {6, 9}),
        ([5, 6], {9}),
        ([1, 2], {3, 9}),
        ([2], {9}),  # the prompt ends with 1, but a word must lie in the output alone
    ],
)
def test_bad_words(seed: int, output: list[int], masked: set[int]) -> None:
    logits = random_logits(seed, VOCAB)
    bad = [[9], [5, 6], [1, 2, 3]]
    result = edited(SamplingParams(), logits, [8, 1], output, bad_words_ids=bad)
    expected = logits.clone()
    expected[list(masked)] = -torch.inf
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (2, True), (3, False)])
def test_min_tokens_hold_stop_tokens_back(seed: int, num_output: int, is_masked: bool) -> None:
    logits = random_logits(seed, VOCAB)
    params = SamplingParams(min_tokens=3)
    result = edited(params, logits, [1, 2], [7] * num_output, stop_token_ids=[0, 11])
    expected = logits.clone()
    if is_masked:
        expected[[0, 11]] = -torch.inf
    torch.testing.assert_close(result, expected)


def test_penalties_come_after_the_bias() -> None:
    params = SamplingParams(logit_bias={1: 4.0}, repetition_penalty=2.0)
    assert edited(params, torch.ones(VOCAB), [1], [])[1].item() == pytest.approx(2.5)


def test_a_slot_keeps_nothing_of_its_last_user(seed: int) -> None:
    bench = Bench()
    asking = SamplingParams(allowed_token_ids=[3], logprobs=2, repetition_penalty=1.5, top_k=1)
    bench.add(0, asking, [1], seed=9)
    logits = random_logits(seed, 1, VOCAB)
    bench.sample(logits, [0])
    bench.sampler.remove(0)
    bench.add(0, SamplingParams(temperature=0.0), [1])
    out = bench.sample(logits, [0])
    assert out.token_ids.tolist() == logits.argmax(1).tolist()
    assert out.logprobs == {}


# Seeds


def test_a_seeded_request_gives_the_same_tokens_in_any_batch(seed: int) -> None:
    """Whatever its slot and row, and whoever else is sampled beside it."""
    rng = np.random.default_rng(seed)
    logits = random_logits(seed, 10, VOCAB)
    params = SamplingParams(top_p=0.95, temperature=1.4)

    def run(slot: int, others: list[int]) -> list[int]:
        bench = Bench()
        bench.add(slot, params, [1, 2, 3], seed=seed)
        for other in others:
            bench.add(other, SamplingParams(top_k=int(rng.integers(0, 9))), [1], seed=other)
        found = []
        for step in range(10):
            slots = rng.permutation([slot, *others]).tolist()
            batch = random_logits(seed + step + 1, len(slots), VOCAB)
            batch[slots.index(slot)] = logits[step]
            found.append(int(bench.sample(batch, slots).token_ids[slots.index(slot)]))
        return found

    alone = run(0, [])
    assert run(5, [1, 2]) == alone
    assert run(2, [0, 3, 4, 6, 7]) == alone
    assert len(set(alone)) > 1


def test_the_samples_of_one_prompt_differ(seed: int) -> None:
    """n > 1 gives its samples the seeds seed, seed + 1, ...: they go their own ways, repeatably."""

    def run() -> list[tuple[int, ...]]:
        bench = Bench()
        for i in range(SLOTS):
            bench.add(i, SamplingParams(n=SLOTS, seed=seed), [1, 2], seed=seed + i)
        logits = torch.zeros(SLOTS, VOCAB)
        steps = [bench.sample(logits, list(range(SLOTS))).token_ids.tolist() for _ in range(8)]
        return list(zip(*steps, strict=True))

    samples = run()
    assert len(set(samples)) == SLOTS
    assert run() == samples


# Log-probabilities


@pytest.mark.parametrize("num", [0, 1, 5, -1])
def test_logprobs_are_the_models_own(seed: int, num: int) -> None:
    """They are those of log_softmax, before edits, temperature and truncation."""
    bench = Bench()
    asking = SamplingParams(
        logprobs=num, temperature=0.5, top_k=4, logit_bias={7: 50.0}, presence_penalty=1.0
    )
    bench.add(2, asking, [1], [3, 4])
    bench.add(4, SamplingParams(), [1])
    logits = random_logits(seed, 2, VOCAB)
    out = bench.sample(logits, [4, 2])
    assert set(out.logprobs) == {1}
    check_entry(out.logprobs[1], logits[1], int(out.token_ids[1]), num)


def check_entry(entry: TokenLogprobs, logits: torch.Tensor, chosen: int, num: int) -> None:
    expected = logits.double().log_softmax(0)
    num_likely = len(logits) if num == -1 else num
    assert entry.token_ids[0] == chosen
    assert entry.token_ids[1:] == expected.argsort(descending=True)[:num_likely].tolist()
    assert entry.logprobs == pytest.approx(expected[entry.token_ids].tolist(), abs=1e-5)
    assert entry.rank == 1 + int((expected > expected[chosen]).sum())


def test_requests_may_want_different_numbers_of_logprobs(seed: int) -> None:
    bench = Bench()
    wanted = [3, None, 0, -1, 3]
    for slot, num in enumerate(wanted):
        bench.add(slot, SamplingParams(logprobs=num), [1])
    logits = random_logits(seed, 5, VOCAB)
    out = bench.sample(logits, [0, 1, 2, 3, 4])
    assert set(out.logprobs) == {0, 2, 3, 4}
    for row, entry in out.logprobs.items():
        num = wanted[row]
        assert num is not None
        check_entry(entry, logits[row], int(out.token_ids[row]), num)


@pytest.mark.parametrize("num", [0, 4, -1])
def test_prompt_logprobs(seed: int, num: int) -> None:
    logits = random_logits(seed, 11, VOCAB)
    targets = np.random.default_rng(seed).integers(0, VOCAB, 11)
    entries = score(logits, torch.from_numpy(targets), num).entries()
    assert len(entries) == 11
    for row, entry in enumerate(entries):
        check_entry(entry, logits[row], int(targets[row]), num)


@pytest.mark.parametrize("num_rows", [0, 1, 6, 11])
def test_rows_scored_in_chunks_are_those_scored_at_once(seed: int, num_rows: int) -> None:
    logits = random_logits(seed, num_rows, VOCAB)
    ids = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (num_rows, 4)))
    whole, in_chunks = token_logprobs(logits, ids), token_logprobs(logits, ids, max_chunk=3 * VOCAB)
    assert torch.equal(whole[0], in_chunks[0]) and torch.equal(whole[1], in_chunks[1])
    assert len(whole[1]) == num_rows
