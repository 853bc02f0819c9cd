"""The worker's table of live sequences, addressed by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import NewSeq, StepPlan


class LiveSeqs:
    """Who sits in which seat, and the tokens the scheduler sent.

    ``tokens[slot, p]`` is the token at position p; zero pages until touched.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
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


class States(LiveSeqs):
    """Live sequences with all their tokens and block tables, where the host computes.

    A sampled token is written into ``tokens`` at once, so the next step needs nothing from the
    host. ``blocks[slot, i]`` is the block of positions [i * block_size, (i + 1) * block_size).
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        super().__init__(max_num_seqs, max_model_len, block_size)
        num_blocks = -(-max_model_len // block_size)
        self.blocks: NDArray[np.int32] = np.zeros((max_num_seqs, num_blocks), dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, then new sequences, then grown block tables."""
        super().apply(plan)
        self.blocks[plan.block_slots, plan.block_indices] = plan.block_ids
