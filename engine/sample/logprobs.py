"""Log-probabilities of chosen and most likely tokens, for the rows that ask for them alone."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.messages.requests import TokenLogprobs
from kernels import slots as on_slots

WHOLE_VOCABULARY = -1


class Scored(NamedTuple):
    """The token of each row, then the most likely ones: [r, 1 + num] each; ranks [r]."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor  # of the first, 1: the most likely

    def entries(self) -> list[TokenLogprobs]:
        """One for each row; waits for the device."""
        columns = (column.tolist() for column in self)
        return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]


def score(logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> Scored:
    """Score the model's own logits [r, V] and a token of each row, token_ids [r] int64.

    After it come the `num` most likely ones (-1: all V, 0: none), which may hold it again. Rows
    that are not finite yield NaN.
    """
    vocab_size = logits.shape[1]
    num_likely = vocab_size if num == WHOLE_VOCABULARY else min(num, vocab_size)
    ids = token_ids[:, None]
    if num_likely:
        ids = torch.cat((ids, logits.topk(num_likely, dim=1).indices), dim=1)
    return Scored(ids, *on_slots.token_logprobs(logits, ids))
