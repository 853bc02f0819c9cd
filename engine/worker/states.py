"""The worker's table of live sequences, addressed by slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.messages.step import NewSeq, StepPlan


class States:
    """Tokens and block tables of every seat.

    ``tokens[slot, p]`` is the token at position p, prompt and sampled alike: a sampled token is
    written here at once, so the next step needs nothing from the host. ``blocks[slot, i]`` is the
    block of positions [i * block_size, (i + 1) * block_size). Both are zero pages until touched.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens: NDArray[np.int32] = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        num_blocks = -(-max_model_len // block_size)
        self.blocks: NDArray[np.int32] = np.zeros((max_num_seqs, num_blocks), dtype=np.int32)
        self.seqs: dict[int, NewSeq] = {}
        self.prompt_scored: set[int] = set()  # slots whose prompt log-probabilities are wanted

    def apply(self, plan: StepPlan) -> None:
        """Freed slots, then new sequences, then grown block tables."""
        for slot in plan.freed_slots:
            del self.seqs[slot]
            self.prompt_scored.discard(slot)
        for seq in plan.new:
            self.seqs[seq.slot] = seq
            self.tokens[seq.slot, : len(seq.token_ids)] = seq.token_ids
            # A resumed request has delivered them already.
            if seq.params.prompt_logprobs is not None and len(seq.token_ids) == seq.num_prompt:
                self.prompt_scored.add(seq.slot)
        self.blocks[plan.block_slots, plan.block_indices] = plan.block_ids
