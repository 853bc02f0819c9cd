"""Sampling options of one request, read once from its parameters, for every device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.messages.step import NewSeq

SEED_BITS = 2**64 - 1
ALWAYS = 2**31 - 1  # no token stands at this position
NO_PENALTIES = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Options in the order in which they are applied to a row of logits; then those of the draw.

    A sampling parameter is a field here, filled in ``of``, and is read by its table in ``edits``,
    ``penalties`` or ``sampler``.
    """

    # Before the draw.
    allowed: list[int] | None  # only these tokens remain; None: all
    edit_ids: list[int]
    edit_values: list[float]  # added to the logit of each; -inf forbids it
    edit_until: list[int]  # for tokens at positions before this one
    words: list[list[int]]  # of two tokens and more: the last is forbidden behind the others
    penalties: tuple[float, float, float] | None  # repetition, presence, frequency
    # The draw.
    temperature: float  # 0: greedy
    top_k: int  # < 1: off
    top_p: float
    min_p: float
    seed: int
    # Reported with the token: the num_logprobs most likely ones. None: nothing; -1: all.
    num_logprobs: int | None

    @classmethod
    def of(cls, seq: NewSeq, vocab_size: int) -> SamplingSpec:
        params, edits = seq.params, []
        edits += [(token, bias, ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        edits += [(word[0], -np.inf, ALWAYS) for word in seq.bad_words_ids if len(word) == 1]
        if params.min_tokens:
            free = seq.num_prompt + params.min_tokens
            edits += [(token, -np.inf, free) for token in seq.stop_token_ids]
        ids, values, until = map(list, zip(*edits, strict=True)) if edits else ([], [], [])
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return cls(
            allowed=params.allowed_token_ids,
            edit_ids=ids,
            edit_values=values,
            edit_until=until,
            words=[word for word in seq.bad_words_ids if len(word) > 1],
            penalties=None if penalties == NO_PENALTIES else penalties,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_k=min(params.top_k, vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seq.seed & SEED_BITS,
            num_logprobs=params.logprobs,
        )
