"""Which drafts stand, and the token behind the last of them: the target's distribution exactly.

A draft was drawn from a distribution q, the target gives p (after temperature, min-p, top-k and
top-p). It stands with probability min(1, p / q); in place of the first that falls, a token is drawn
from what p has more than q, max(p - q, 0); behind drafts that all stand one is drawn from p
(Leviathan, Kalman, Matias 2023; Chen et al. 2023). Greedy requests compare with the largest logit.

Drafts that no distribution comes with, as those found in the text, are compared with the very token
that would have been sampled without them. That accepts with probability p, too, and keeps a seeded
request's tokens the same, drafts or not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.reference.sampling import (
    GOLDEN,
    UNIFORM_BITS,
    choose_tokens,
    gumbel_noise,
    mix,
    row_keys,
    shifted,
    signed,
    truncate,
)

ACCEPT_ID = 2**32  # no token: the noise that decides whether a draft stands


class Asked(NamedTuple):
    """The columns [R] of kernels.reference.sampling.choose_tokens."""

    temperature: NDArray[np.float64]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int32]


def verify(
    logits: torch.Tensor,
    asked: Asked,
    starts: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
) -> list[list[int]]:
    """The tokens of each sequence: drafts that stand, then one more, -1 where there is none.

    logits [R, V]: rows starts[s]:starts[s + 1] (starts [S + 1] int32) are the sequence's drafts and
    the row behind them. drafts [R] int32 and draft_probs [R, V] float32 belong to the row that
    judges them; those of a sequence's last row mean nothing. Drafts must be drawn with other noise
    than that of the request's seed.
    """
    chosen = choose_tokens(logits, *asked).tolist()
    bounds = starts.tolist()
    results = []
    for first, end in pairwise(bounds):
        tokens: list[int] = []
        for row in range(first, end):
            is_last = row == end - 1
            if draft_probs is None or is_last or asked.temperature[row] == 0 or chosen[row] < 0:
                token = chosen[row]
            else:
                token = judge(logits[row], _row(asked, row), int(drafts[row]), draft_probs[row])
            tokens.append(token)
            if is_last or token != int(drafts[row]):
                break
        results.append(tokens)
    return results


def judge(logits: torch.Tensor, asked: Asked, draft: int, draft_probs: torch.Tensor) -> int:
    """The draft, if it stands, or a token of what the target has more. asked: columns [1]."""
    device = logits.device
    x = logits[None].double() / float(asked.temperature[0])
    limits = (torch.tensor([[float(column[0])]], device=device) for column in asked[1:4])
    p = truncate(x, *limits)[0].softmax(dim=0)
    q = draft_probs.double()
    key = row_keys(asked.seeds, asked.positions, device)
    steps = shifted(mix(key + signed((ACCEPT_ID + 1) * GOLDEN % 2**64)), 64 - UNIFORM_BITS)
    if (steps.double() + 0.5) * 2.0**-UNIFORM_BITS * q[draft] < p[draft]:
        return draft
    noise = gumbel_noise(asked.seeds, asked.positions, len(logits), device)[0]
    return int(((p - q).clamp(min=0).log() + noise).argmax())


def _row(asked: Asked, row: int) -> Asked:
    return Asked._make(column[row : row + 1] for column in asked)
