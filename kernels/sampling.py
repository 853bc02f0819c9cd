"""Choosing tokens: one signature an operation; the body is chosen by where the logits lie."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.bodies import triton_for
from kernels.cpu import sampling as cpu


def choose_tokens(
    logits: torch.Tensor,
    temperature: NDArray[np.float64],
    top_k: NDArray[np.int32],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
) -> NDArray[np.int32]:
    """One token id for each row of logits [R, V] float32; all other arguments are columns [R].

    temperature 0 takes the largest logit. Otherwise the logits are divided by it, then the tokens
    left are those with at least min_p times the largest probability (0: off), of these the top_k
    largest (< 1: off), of these the fewest largest whose probabilities, renormalised, add up to
    top_p (1: off); of equal logits the lower id comes first. One of them is drawn with noise that
    depends on (seed, position, token id) alone, whatever the batch. Tokens at -inf are never
    chosen. A row with NaN, +inf or nothing but -inf yields -1 and disturbs no other.
    """
    body = triton_for(logits) or cpu
    return body.choose_tokens(logits, temperature, top_k, top_p, min_p, seeds, positions)


def penalise(
    logits: torch.Tensor,
    history: NDArray[np.int32],
    num_prompt: int,
    penalties: tuple[float, float, float],
) -> None:
    """Lower, in place, the logits [V] float32 of tokens in history, prompt and output so far.

    penalties: (repetition, presence, frequency). Positive logits of any token of the history are
    divided by repetition, others multiplied; those of output tokens are then lowered by presence
    once and by frequency for every time they occur. Token ids must lie in [0, V).
    """
    body = triton_for(logits) or cpu
    body.penalise(logits, history, num_prompt, penalties)
