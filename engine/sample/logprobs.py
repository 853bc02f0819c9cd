"""Log-probabilities of sampled and most likely tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.messages.requests import TokenLogprobs
from kernels import slots as on_slots

WHOLE_VOCABULARY = -1


class Scored(NamedTuple):
    """Token ids and log-probabilities [r, 1 + num] for r rows: first the given token, then the most
    likely ones; and the rank [r] of the given token."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor  # 1: the most likely

    def entries(self) -> list[TokenLogprobs]:
        """Return one ``TokenLogprobs`` per row. Waits for the device."""
        columns = (column.tolist() for column in self)
        return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]


def score(logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> Scored:
    """Log-probabilities of one token per row, token_ids [r] int64, and of the `num` most likely
    tokens (-1: all V). logits: [r, V]. A row with invalid logits yields NaN."""
    vocab_size = logits.shape[1]
    num_likely = vocab_size if num == WHOLE_VOCABULARY else min(num, vocab_size)
    ids = token_ids[:, None]
    if num_likely:
        ids = torch.cat((ids, logits.topk(num_likely, dim=1).indices), dim=1)
    return Scored(ids, *on_slots.token_logprobs(logits, ids))
