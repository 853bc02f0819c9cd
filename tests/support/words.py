"""A tokenizer with a word for each token of the digest worker, so that its answers are texts."""

from __future__ import annotations

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers

from engine.text.tokenizer import RustBackend, Tokenizer

NUM_WORDS = 1000  # as many tokens as the digest worker has


def word(token_id: int) -> str:
    """The text of a token: no other contains it."""
    return f"w{token_id:03}"


def words() -> Tokenizer:
    rust = RustTokenizer(models.WordLevel({word(i): i for i in range(NUM_WORDS)}, word(0)))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(RustBackend(rust), {}, {})
