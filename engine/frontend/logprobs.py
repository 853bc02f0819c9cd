"""Builds the log-probabilities of an output, with the text of each token."""

from __future__ import annotations

from engine.messages.requests import Logprob, TokenLogprobs
from engine.text.tokenizer import Tokenizer

Position = dict[int, Logprob]


def position_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> Position:
    """The log-probabilities at one position by token id: the sampled token first, then the most
    likely ones in descending order."""
    ids, values = entry.token_ids, entry.logprobs
    texts = [None if tokenizer is None else tokenizer.token_text(i) for i in ids]
    position = {ids[0]: Logprob(values[0], entry.rank, texts[0])}
    for rank in range(1, len(ids)):
        position.setdefault(ids[rank], Logprob(values[rank], rank, texts[rank]))
    return position


def prompt_positions(
    entries: list[TokenLogprobs], num_prompt: int, tokenizer: Tokenizer | None
) -> list[Position | None]:
    """The log-probabilities of each prompt token. ``None`` for the first token, which has no
    prediction, and for tokens before ``prompt_logprobs_start``."""
    unknown: list[Position | None] = [None] * (num_prompt - len(entries))
    return unknown + [position_logprobs(entry, tokenizer) for entry in entries]
