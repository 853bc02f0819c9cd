"""The GPU's sampler against the CPU's: the same requests, logits and tokens, step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling import random_logits

from engine.messages.params import SamplingParams
from engine.messages.step import NewSeq, StepPlan, StepResult
from engine.sample.sampler import Sampler
from engine.worker.cuda import penalties
from engine.worker.cuda.platform import HostPlatform
from engine.worker.cuda.results import Pending, bring_home, collect
from engine.worker.cuda.sampler import DeviceSampler, Draws
from engine.worker.cuda.slots import Slots, stage_changes
from engine.worker.cuda.staging import Staging
from engine.worker.states import LiveSeqs
from kernels.slots import Rows

VOCAB, SLOTS, LONGEST = 70, 8, 40


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
    """The two samplers, and the tokens that the CPU's has chosen."""

    def __init__(self) -> None:
        self.cpu = Sampler(
            vocab_size=VOCAB, max_num_seqs=SLOTS, device="cpu", logits_processors=(only_even,)
        )
        self.platform = HostPlatform()
        self.live = LiveSeqs(SLOTS, LONGEST, 4)
        self.slots = Slots(self.platform.device, SLOTS, LONGEST, 4)
        self.device = DeviceSampler(self.platform, self.slots, self.live, VOCAB, (only_even,))
        self.staging = Staging(self.platform, SLOTS, SLOTS, 1)
        self.tokens = np.zeros((SLOTS, LONGEST + 1), dtype=np.int32)
        self.lengths = np.zeros(SLOTS, dtype=np.int32)

    def seat(self, seqs: list[NewSeq]) -> None:
        none = np.empty(0, dtype=np.int32)
        slots = np.array([seq.slot for seq in seqs], dtype=np.int32)
        zeros = slots * 0
        plan = StepPlan(0, zeros, slots, zeros, zeros, zeros, zeros, seqs, none, none, none, [], 0)
        self.live.apply(plan)
        for seq in seqs:
            self.cpu.add(seq)
            self.device.add(seq)
            self.tokens[seq.slot, : len(seq.token_ids)] = seq.token_ids
            self.lengths[seq.slot] = len(seq.token_ids)
        self.staging.open(0)
        changes = stage_changes(plan, self.staging, VOCAB)
        self.staging.send()
        self.slots.apply(changes)

    def step(self, logits: torch.Tensor, slots: list[int]) -> StepResult:
        """Sample a row for each slot; both samplers must say the same."""
        column = np.array(slots, dtype=np.int32)
        positions = self.lengths[column]
        wanted = self.cpu.sample(logits.clone(), column, positions, self.tokens)
        got = self._device_step(logits.clone(), column, positions)
        errors = set(wanted.errors)
        assert set(got.errors) == errors
        kept = [row for row in range(len(slots)) if row not in errors]
        assert got.token_ids.tolist() == wanted.token_ids[kept].tolist()
        assert set(got.logprobs) == set(wanted.logprobs)
        for row, (entry,) in got.logprobs.items():
            other = wanted.logprobs[row]
            assert (entry.token_ids, entry.rank) == (other.token_ids, other.rank)
            assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        self.tokens[column, positions] = wanted.token_ids
        self.lengths[column] += 1
        return got

    def _device_step(self, logits, column, positions) -> StepResult:
        """With a row of nobody behind each."""
        num = len(column)
        places = np.arange(0, 2 * num, 2)
        padded = torch.full((2 * num, VOCAB), torch.nan)
        padded[places] = logits
        slots, there = np.full(2 * num, -1, np.int32), np.zeros(2 * num, np.int32)
        slots[places], there[places] = column, positions
        rows = Rows(padded, torch.from_numpy(slots), torch.from_numpy(there))
        draws = Draws(np.arange(2 * num, dtype=np.int32) // 2, slots, there)
        drawing = self.device.prepare(rows, draws)
        chosen = self.device.draw(rows)
        scores = self.device.finish(drawing, chosen)
        tokens = chosen.clamp(min=0)
        self.slots.history[rows.slots.long(), rows.positions.long()] = tokens
        home = bring_home(self.platform, draws, drawing, chosen, scores)
        ones = np.ones(num, dtype=np.int32)
        none = np.empty(0, dtype=np.int32)
        plan = StepPlan(0, ones, column, ones, ones, ones, ones, [], none, none, none, [], num)
        return collect(Pending(plan, self.platform.mark(), self.platform.mark(), [home]))


def seq(slot: int, params: SamplingParams, tokens: list[int], num_prompt: int, **more) -> NewSeq:
    more = {"stop_token_ids": [], "bad_words_ids": [], **more}
    return NewSeq(str(slot), slot, tokens, num_prompt, params, 1000 + slot, **more)


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
def test_both_samplers_say_the_same(
    round_: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests, resumed ones with output of their own, departures, padding."""
    monkeypatch.setattr(penalties, "FIRST_SEATS", 2)
    dice = np.random.default_rng((seed, round_))
    both = Both()
    for turn in range(5):
        slots = dice.permutation(SLOTS)[: 2 + turn].tolist()
        newcomers = []
        for slot in slots:
            params, more = asks(dice)
            tokens = dice.integers(0, VOCAB, 9).tolist()
            newcomers.append(seq(slot, params, tokens, int(dice.integers(4, 10)), **more))
        both.seat(newcomers)
        for _ in range(4):
            rows = dice.permutation(slots).tolist()
            both.step(random_logits(int(dice.integers(2**31)), len(rows), VOCAB), rows)


def test_what_fails_fails_alone_and_says_why() -> None:
    both = Both()
    plain = SamplingParams(temperature=0)
    masked = SamplingParams(temperature=0, allowed_token_ids=[3], logit_bias={5: 1.0})
    raising = SamplingParams(temperature=0, extra_args={"only_even": "raise"})
    both.seat(
        [
            seq(0, plain, [1, 2], 2),
            seq(1, masked, [1, 2], 2, bad_words_ids=[[3]]),
            seq(2, raising, [1, 2, 8, 9], 2),
            seq(3, masked, [1, 2], 2),
            seq(4, plain, [1, 2], 2),
        ]
    )
    logits = random_logits(1, 5, VOCAB)
    logits[3, 7] = torch.nan
    logits[4, 8] = torch.inf
    result = both.step(logits, [0, 1, 2, 3, 4])
    assert "no token is left for position 2: allowed_token_ids" in result.errors[1]
    assert "only_even raised RuntimeError: third token" in result.errors[2]
    for row in (3, 4):
        assert "the model's logits for position 2 hold NaN or +inf" in result.errors[row]
    assert result.counts.tolist() == [1, 0, 0, 0, 0]
