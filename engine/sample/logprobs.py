"""Log-probabilities of chosen and most likely tokens, for the rows that ask for them alone."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.outputs import TokenLogprobs

Ids = NDArray[np.int32] | NDArray[np.int64]

WHOLE_VOCABULARY = -1
MAX_CHUNK = 2**23  # logits looked at together: bounds the memory of what is worked out from them


def token_logprobs(logits: torch.Tensor, token_ids: Ids, num: int) -> list[TokenLogprobs]:
    """One entry for each row of the model's own logits [M, V] and its token of token_ids [M].

    An entry holds the token, then the `num` most likely ones (-1: all V, 0: none), which may hold
    it again. Rows that are not finite yield NaN.
    """
    vocab_size = logits.shape[1]
    num_likely = vocab_size if num == WHOLE_VOCABULARY else min(num, vocab_size)
    chosen = torch.from_numpy(token_ids).long().to(logits.device)
    step = max(1, MAX_CHUNK // vocab_size)
    entries: list[TokenLogprobs] = []
    for start in range(0, len(chosen), step):
        rows = slice(start, start + step)
        entries += _entries(logits[rows], chosen[rows, None], num_likely)
    return entries


def _entries(logits: torch.Tensor, chosen: torch.Tensor, num_likely: int) -> list[TokenLogprobs]:
    """logits: [m, V]; chosen: [m, 1]. Only the logits returned are normalised."""
    values = logits.gather(1, chosen)
    ranks = (logits > values).sum(dim=1) + 1
    ids = chosen
    if num_likely:
        likely = logits.topk(num_likely, dim=1)
        values = torch.cat((values, likely.values), dim=1)
        ids = torch.cat((ids, likely.indices), dim=1)
    logprobs = values - logits.logsumexp(dim=1, keepdim=True)
    columns = (ids.tolist(), logprobs.tolist(), ranks.tolist())
    return [TokenLogprobs(*entry) for entry in zip(*columns, strict=True)]
