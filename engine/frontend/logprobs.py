"""Log-probabilities with the texts of their tokens."""

from __future__ import annotations

from engine.messages.requests import Logprob, TokenLogprobs
from engine.text.tokenizer import Tokenizer

Position = dict[int, Logprob]


def position_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> Position:
    """The chosen token first, then the most likely ones, best first; the chosen one only once."""
    ids, values = entry.token_ids, entry.logprobs
    texts = [None if tokenizer is None else tokenizer.token_text(i) for i in ids]
    position = {ids[0]: Logprob(values[0], entry.rank, texts[0])}
    for rank in range(1, len(ids)):
        position.setdefault(ids[rank], Logprob(values[rank], rank, texts[rank]))
    return position


def prompt_positions(
    entries: list[TokenLogprobs], num_prompt: int, tokenizer: Tokenizer | None
) -> list[Position | None]:
    """One entry per prompt token; ``None`` for the first, which nothing predicts, and unasked."""
    unknown: list[Position | None] = [None] * (num_prompt - len(entries))
    return unknown + [position_logprobs(entry, tokenizer) for entry in entries]
