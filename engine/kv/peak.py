"""How many blocks requests will hold at most, if nobody comes and all run as long as predicted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def peak_blocks(num_tokens: Sequence[int], remaining: Sequence[int], block_size: int) -> int:
    """The future peak of Past-Future (Gong et al. 2025), in blocks instead of tokens.

    Memory grows until somebody ends, so the peak is at one of the ends. With requests sorted by
    ``remaining`` output tokens, longest first, those up to i are there when i takes its last step,
    and each has its known tokens and ``remaining[i] - 1`` more in the cache. Blocks that are shared
    count for each holder.

    ceil((known + more) / size) depends on ``known`` only through quotient and residue, so it is
    enough to count residues: O(n * block_size) instead of O(n * n).
    """
    if not num_tokens:
        return 0
    known = np.asarray(num_tokens, dtype=np.int64)
    left = np.maximum(np.asarray(remaining, dtype=np.int64), 1)
    order = np.argsort(-left, kind="stable")
    known, more = known[order], left[order] - 1
    residues = np.arange(block_size)
    there = np.cumsum(known[:, None] % block_size == residues, axis=0)  # [n, block_size]
    ends = (residues + more[:, None] + block_size - 1) // block_size  # [n, block_size]
    return int((np.cumsum(known // block_size) + (there * ends).sum(axis=1)).max())
