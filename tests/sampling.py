"""A sampler and the token table of the worker that would call it, for tests."""

from typing import Any

import numpy as np
import torch

from engine.messages.params import SamplingParams
from engine.messages.step import NewSeq
from engine.sample.sampler import SampleOutput, Sampler

VOCAB = 50
SLOTS = 8
MAX_LEN = 64


class Bench:
    """A sampler and the token table of the worker that would call it."""

    def __init__(self, vocab_size: int = VOCAB, processors: tuple[Any, ...] = ()) -> None:
        self.sampler = Sampler(
            vocab_size=vocab_size, max_num_seqs=SLOTS, device="cpu", logits_processors=processors
        )
        self.tokens = np.zeros((SLOTS, MAX_LEN), dtype=np.int32)
        self.lengths = np.zeros(SLOTS, dtype=np.int32)

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int],
        output: list[int] | None = None,
        **more: Any,
    ) -> None:
        known = prompt + (output or [])
        settings = {"seed": slot, "stop_token_ids": [], "bad_words_ids": [], **more}
        self.tokens[slot, : len(known)] = known
        self.lengths[slot] = len(known)
        self.sampler.add(
            NewSeq(
                request_id=f"r{slot}",
                slot=slot,
                token_ids=known,
                num_prompt=len(prompt),
                params=params,
                **settings,
            )
        )

    def sample(self, logits: torch.Tensor, slots: list[int]) -> SampleOutput:
        """One step: what is sampled becomes known."""
        rows = np.array(slots, dtype=np.int32)
        out = self.sampler.sample(logits.clone(), rows, self.lengths[rows], self.tokens)
        self.tokens[rows, self.lengths[rows]] = out.token_ids
        self.lengths[rows] += 1
        return out


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, size=shape).astype(np.float32))
