"""Log-probabilities of prompt tokens, collected over the chunks of a prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from engine.messages.requests import TokenLogprobs
from engine.sample.logprobs import score
from engine.worker.batches import PlanRows
from engine.worker.slots import LiveSeqs

ROWS_AT_ONCE = 256  # rows of logits in memory: 256 x 150k x 4 bytes is 150 MB


class PromptScores:
    """Computes log-probabilities of prompt tokens from the hidden states of the prompt's chunks.

    The scores are complete after the last chunk. A chunk that is run again replaces its scores."""

    def __init__(self, logits: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        """logits: computes logits [n, V] from hidden states [n, H] of the sequence in a slot."""
        self._logits = logits
        self._parts: dict[int, list[TokenLogprobs]] = {}

    def collect(
        self, rows: PlanRows, hidden: torch.Tensor, live: LiveSeqs
    ) -> dict[int, list[TokenLogprobs]]:
        """Score the prompt chunks of a step; ``hidden`` [N, H]. Returns the scores of all prompts
        whose last chunk this was, by row."""
        complete: dict[int, list[TokenLogprobs]] = {}
        first = 0
        for row, (slot, start, count, samples) in enumerate(zip(*rows[:4], strict=True)):
            if int(slot) in live.prompt_scored:
                chunk = hidden[first : first + int(count)]
                self._score(int(slot), int(start), chunk, live)
                if samples:
                    complete[row] = self._parts[int(slot)]
            first += int(count)
        return complete

    def remove(self, slot: int) -> None:
        """Drop the scores of this slot."""
        self._parts.pop(slot, None)

    def _score(self, slot: int, start: int, hidden: torch.Tensor, live: LiveSeqs) -> None:
        """Score one chunk: row i of ``hidden`` predicts the token at position ``start + i + 1``."""
        seq = live.seqs[slot]
        base = max(seq.params.prompt_logprobs_start - 1, 0)
        begin = max(start, base)
        scores = self._parts.setdefault(slot, [])
        del scores[begin - base :]
        end = min(start + len(hidden), seq.num_prompt - 1)
        for at in range(begin, end, ROWS_AT_ONCE):
            upto = min(at + ROWS_AT_ONCE, end)
            logits = self._logits(hidden[at - start : upto - start], slot)
            targets = torch.from_numpy(live.tokens[slot, at + 1 : upto + 1].astype(np.int64))
            num = seq.params.prompt_logprobs or 0
            scores += score(logits, targets.to(logits.device), num).entries()
