"""The host's table of live sequences as the scheduler sent them, by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import NewSeq, StepPlan


class LiveSeqs:
    """The sequence in each slot. ``tokens[slot, p]`` is the token at position p, as far as it came
    with the sequence; zero pages until touched. What was sampled since, the device knows."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self.num_sent: NDArray[np.int32] = np.zeros(max_num_seqs, dtype=np.int32)
        self.seqs: dict[int, NewSeq] = {}
        self.prompt_scored: set[int] = set()  # slots whose prompt log-probabilities are wanted

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, then new sequences."""
        for slot in plan.freed_slots:
            del self.seqs[slot]
            self.prompt_scored.discard(slot)
        for seq in plan.new:
            self.seqs[seq.slot] = seq
            self.tokens[seq.slot, : len(seq.token_ids)] = seq.token_ids
            self.num_sent[seq.slot] = len(seq.token_ids)
            # A resumed request has delivered them already.
            if seq.params.prompt_logprobs is not None and len(seq.token_ids) == seq.num_prompt:
                self.prompt_scored.add(seq.slot)
