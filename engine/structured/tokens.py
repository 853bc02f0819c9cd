"""Helpers for tokens, which the matchers of both grammar libraries use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

Eos = tuple[int, ...]  # end-of-text ids


def before_end(tokens: Sequence[int], eos: Eos) -> list[int]:
    """Return the tokens before the first end-of-text token."""
    ends = [place for place, token in enumerate(tokens) if token in eos]
    return list(tokens[: ends[0]] if ends else tokens)


def tokenized(tokenizer: LLTokenizer, text: bytes, recent: Sequence[int], most: int) -> list[int]:
    """Tokenise a text that follows the tokens ``recent``, and return the first ``most`` tokens. If
    the end of the text could form a token with later text, it is left out."""
    tokens, _ = tokenizer.tokenize_partial(text, recent_tokens=list(recent)) if text else ([], b"")
    return list(tokens[:most])


def special_of(tokenizer: LLTokenizer, text: str) -> int | None:
    """Return the id of the special token with exactly this text, or ``None``."""
    tokens = tokenizer.tokenize_str(text)
    is_one = len(tokens) == 1 and tokenizer.is_special_token(tokens[0])
    return tokens[0] if is_one else None
