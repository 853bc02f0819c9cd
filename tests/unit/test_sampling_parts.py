"""Ranks with a part of the vocabulary each draw the tokens that one rank with all of it draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support.rank_threads import run_all, run_ranks, shared_ranks
from support.sampling import MAX_LEN, Bench, random_logits

from engine.errors import RankError
from engine.layers.linear import make_linear
from engine.layers.parallel import PartOfOutput
from engine.layers.sublayers import OutputLayer
from engine.messages.params import SamplingParams
from engine.models.sharding import Shard
from engine.parallel.collectives import Collectives
from engine.sample.parts import PartOfVocabulary, Vocabulary
from engine.sample.processors import LogitsProcessorFactory
from engine.sample.sampler import DraftRows, RowMasks
from kernels.cpu.recording import Launches
from kernels.slots import Rows

SLOTS = 6
STEPS = 4
SIZES = (2, 3, 5)


class Request:
    """A random request. ``plain``: its parameters neither truncate nor want all logits."""

    def __init__(self, rng: random.Random, vocab: int, *, plain: bool) -> None:
        self.prompt = rng.choices(range(vocab), k=rng.randint(1, 8))
        self.output = rng.choices(range(vocab), k=rng.choice((0, 0, 3)))
        some = rng.sample(range(vocab), k=min(vocab, 9))
        choices: dict[str, Any] = {
            "temperature": rng.choice((0.0, 0.3, 1.0, 2.0)),
            "repetition_penalty": rng.choice((1.0, 1.0, 1.3)),
            "presence_penalty": rng.choice((0.0, 0.0, 0.7)),
            "frequency_penalty": rng.choice((0.0, 0.0, -0.4)),
            "logit_bias": rng.choice((None, None, {some[0]: 5.0, some[1]: -100.0})),
            "allowed_token_ids": rng.choice((None, None, None, some[2:])),
            "min_tokens": rng.choice((0, 0, 20)),
        }
        if not plain:
            choices |= {
                "top_k": rng.choice((0, 0, 5)),
                "top_p": rng.choice((1.0, 1.0, 0.8)),
                "min_p": rng.choice((0.0, 0.0, 0.1)),
                "logprobs": rng.choice((None, None, 3)),
            }
        self.params = SamplingParams(max_tokens=MAX_LEN, **choices)
        words = [[some[0]], some[1:3], [self.prompt[-1], some[4]]]
        self.more = {
            "seed": rng.randrange(2**63),
            "stop_token_ids": some[:2],
            "bad_words_ids": rng.choice(([], words)),
        }


class Case:
    """Requests in slots, and logits and masks of some steps."""

    def __init__(self, seed: int, vocab: int, *, plain: bool) -> None:
        self.vocab = vocab
        rng = random.Random(seed)
        self.requests = [Request(rng, vocab, plain=plain) for _ in range(SLOTS)]
        self.logits = [random_logits(seed + step, SLOTS, vocab) for step in range(STEPS)]
        for logits in self.logits:
            logits.mul_(4).round_().div_(4)  # equal logits
            row = rng.randrange(SLOTS)
            logits[row, rng.randrange(vocab)] = rng.choice((0.0, np.nan, np.inf, -np.inf))
            logits[rng.randrange(SLOTS)] = rng.choice((0.0, 0.0, -np.inf))
        numbers = np.random.default_rng(seed)
        words = numbers.integers(-(2**31), 2**31, (2, -(-vocab // 32)), dtype=np.int32)
        words[1] &= numbers.integers(-(2**31), 2**31, words.shape[1], dtype=np.int32)
        of_row = np.array([rng.choice((-1, -1, 0, 1)) for _ in range(SLOTS)], np.int32)
        self.masks = rng.choice((None, RowMasks(torch.from_numpy(words), of_row)))
        self.may_leave_masks = rng.random() < 0.5
        before = numbers.integers(-1, vocab, (SLOTS, 3)).astype(np.int32)
        self.drafts = DraftRows(np.full(SLOTS, -1, np.int32), before)

    def run(
        self,
        ranks: Collectives | None = None,
        processors: tuple[LogitsProcessorFactory, ...] = (),
    ) -> list[Any]:
        """Tokens, errors and log-probabilities of the steps."""
        parts = [] if ranks is None else parts_of(self.vocab, ranks.size)
        whole = None if ranks is None else PartOfVocabulary(parts, ranks)
        bench = Bench(self.vocab, processors, num_slots=SLOTS, vocabulary=whole)
        for slot, request in enumerate(self.requests):
            bench.add(slot, request.params, request.prompt, request.output, **request.more)
        found: list[Any] = []
        for logits in self.logits:
            mine = logits if whole is None else logits[:, whole.mine.start : whole.mine.stop]
            result = bench.step(
                mine.clone(),
                list(range(SLOTS)),
                self.masks,
                may_leave_masks=self.may_leave_masks,
                drafts=self.drafts,
            )
            bench.sampler.vocabulary.check()
            counts = result.counts.tolist()
            found.append((counts, result.token_ids.tolist(), result.errors, result.logprobs))
        return found


def parts_of(vocab: int, size: int) -> list[range]:
    return [Shard(rank, size).part(vocab) for rank in range(size)]


@pytest.mark.parametrize("plain", (True, False))
@pytest.mark.parametrize("vocab", (37, 64, 101, 1024, 5003))
@pytest.mark.parametrize("num", (2, pytest.param(40, marks=pytest.mark.slow)))
def test_tokens_equal_those_of_the_whole_vocabulary(
    vocab: int, plain: bool, num: int, seed: int
) -> None:
    for more in range(num):
        case = Case(seed + more, vocab, plain=plain)
        expected = case.run()
        for size in SIZES:
            names: list[list[str]] = []

            def work(ranks: Collectives, case=case, names=names):
                found = case.run(ranks)
                names.append(ranks.names)
                return found

            for found in run_ranks(size, work):
                assert found == expected, (more, size)
            assert all(one == names[0] for one in names)


def boost(params: SamplingParams, prompt: list[int]):
    """Prefers a token that depends on the output, and on where the largest logit is."""

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[(int(logits.nan_to_num().argmax()) + len(output)) % len(logits)] += 3
        return logits

    return process


def test_logits_processors_see_all_logits(seed: int) -> None:
    case = Case(seed, 101, plain=True)
    expected = case.run(processors=(boost,))
    plain = case.run()
    assert [one[0] for one in expected] == [one[0] for one in plain]  # as many fail
    assert [one[1] for one in expected] != [one[1] for one in plain]
    for found in run_ranks(3, lambda ranks: case.run(ranks, (boost,))):
        assert found == expected


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_ranks_with_other_noise_are_found(temperature: float, seed: int) -> None:
    def work(ranks: Collectives, other: int):
        whole = PartOfVocabulary(parts_of(64, 2), ranks)
        bench = Bench(64, num_slots=2, vocabulary=whole)
        for slot in range(2):
            more = other if slot == ranks.rank == 1 else 0
            params = SamplingParams(max_tokens=5, temperature=temperature)
            bench.add(slot, params, [1, 2], seed=seed + more)
        tokens = bench.sample(random_logits(seed, 2, 32), [0, 1]).token_ids.tolist()
        whole.check()
        return tokens

    first, second = run_ranks(2, lambda ranks: work(ranks, 0))
    assert first == second
    with pytest.raises(
        RankError, match=r"rank \d has drawn a token with the noise of another seed"
    ):
        run_ranks(2, lambda ranks: work(ranks, 1))


def test_logits_are_gathered_only_where_they_are_needed(seed: int) -> None:
    def gathered(**params: Any) -> int:
        """Bytes that a rank of two gathers in a step of three rows."""
        sizes: list[int] = []

        def work(ranks: Collectives):
            whole = PartOfVocabulary(parts_of(1000, 2), Counting(ranks, sizes))
            bench = Bench(1000, num_slots=3, vocabulary=whole)
            for slot in range(3):
                bench.add(slot, SamplingParams(max_tokens=5, **params), [1, 2])
            bench.step(random_logits(seed, 3, 500), [0, 1, 2])

        run_ranks(2, work)
        return sum(sizes) // 2

    assert gathered(temperature=1.0) == 3 * 24
    assert gathered(temperature=0.0) == 3 * 24
    assert gathered(temperature=1.0, presence_penalty=1.0) == 3 * 24 + 3 * 4
    assert gathered(temperature=1.0, top_p=0.9) == 3 * 500 * 4


@pytest.mark.parametrize("truncates", (False, True))
def test_recorded_draws_can_be_repeated(truncates: bool, seed: int) -> None:
    vocab, num, more = 1003, 4, {"top_k": 50} if truncates else {}
    steps = [random_logits(seed + step, num, vocab) for step in range(6)]
    group = [Shard(rank, 3).part(vocab) for rank in range(3)]

    def draws(ranks: Collectives | None) -> list[list[int]]:
        whole = Vocabulary(vocab) if ranks is None else PartOfVocabulary(group, ranks)
        mine = range(vocab) if ranks is None else group[ranks.rank]
        columns = slice(mine.start, mine.stop)
        bench = Bench(vocab, num_slots=num, vocabulary=whole)
        for slot in range(num):
            bench.add(slot, SamplingParams(temperature=slot / 2, max_tokens=9, **more), [1])
        place = torch.empty_like(steps[0][:, columns].contiguous())
        positions = torch.zeros(num, dtype=torch.int32)
        rows = Rows(place, torch.arange(num, dtype=torch.int32), positions)
        tokens, launches = Launches.of(lambda: bench.sampler.draw(rows))
        found = []
        for step, logits in enumerate(steps):
            place.copy_(logits[:, columns])
            positions.fill_(step)
            launches.repeat()
            found.append(tokens.tolist())
        whole.check()
        return found

    expected = draws(None)
    assert len({tuple(tokens) for tokens in expected}) > 1
    for found in run_all(shared_ranks(3), draws):
        assert found == expected


@pytest.mark.parametrize("quantization", (None, "int8"))
def test_the_largest_logit_of_all_parts_is_found(quantization: str | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    vocab, parts = 1003, parts_of(1003, 3)
    weight = torch.randn(vocab, 64, generator=generator).bfloat16()
    weight[700:] = weight[:303]  # equal logits in several parts
    hidden = torch.randn(9, 64, generator=generator).bfloat16()
    hidden[3, 5], hidden[4] = torch.nan, 0

    def layer(tokens: range):
        mine = weight[tokens.start : tokens.stop].clone()
        return make_linear(mine, quantization=quantization, keeps_float32=True)

    expected = OutputLayer(layer(range(vocab))).largest(hidden)

    def work(ranks: Collectives):
        output = PartOfOutput(layer(parts[ranks.rank]), 1.0, 0.0, parts=parts, ranks=ranks)
        assert output.has_largest
        return output.largest(hidden)

    assert expected is not None and expected[3] == -1 and (expected < 700).all()
    for found in run_ranks(3, work):
        assert torch.equal(found, expected)


class Counting:
    """Notes the bytes that are gathered."""

    def __init__(self, ranks: Collectives, sizes: list[int]) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._sizes = ranks, sizes

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._sizes.append(x.nbytes)
        return self._ranks.all_gather(x)


def test_a_processor_that_fails_on_one_rank_fails_its_request_alone(seed: int) -> None:
    class Broken:
        """A factory of processors of which that of rank 1 fails."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def __call__(self, params: SamplingParams, prompt: list[int]):
            return self.process if params.temperature == 0 else None

        def process(self, output: list[int], logits: torch.Tensor) -> torch.Tensor:
            if self.rank == 1:
                raise ValueError("broken")
            return logits

    def work(ranks: Collectives):
        whole = PartOfVocabulary(parts_of(64, 2), ranks)
        bench = Bench(64, (Broken(ranks.rank),), num_slots=2, vocabulary=whole)
        for slot, temperature in enumerate((0.0, 1.0)):
            params = SamplingParams(max_tokens=5, temperature=temperature)
            bench.add(slot, params, [1, 2], seed=seed)
        result = bench.sample(random_logits(seed, 2, 32), [0, 1])
        return result.token_ids.tolist(), list(result.errors)

    first, second = run_ranks(2, work)
    assert first == second
    assert first[0][0] == -1 and first[0][1] >= 0 and first[1] == [0]
