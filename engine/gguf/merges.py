"""The merges of a BPE tokenizer: read from a GGUF file, or rebuilt from the scores of its tokens.

SentencePiece merges the two pieces that give the token with the highest score. Tokenizers in
tokenizer.json have a list of pairs, the preferred ones first, each with a space between its parts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf.constants import TokenType

from engine.gguf.token_metadata import TokenMetadata

Vocabulary = dict[str, int]

MAX_PIECE = 1024  # characters of a token that is merged; SentencePiece makes at most 512
MAX_CHARACTERS = 1 << 22  # of all tokens that are merged; Gemma 3 has 1.8 million


def read_merges(metadata: TokenMetadata, vocabulary: Vocabulary) -> list[str]:
    """The merges in a file. Raises ``ModelError`` for one that names a token which is missing."""
    merges = metadata.strings("merges")
    for number, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right or " " in right:
            why = f"has {merge!r:.80} as merge {number}, must be two tokens with a space between"
            raise metadata.fault("merges", why)
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            token = next(each for each in (left, right, left + right) if each not in vocabulary)
            why = f"has {merge!r:.80} as merge {number}, but {token!r:.80} is no token"
            raise metadata.fault("merges", why)
    return merges


def rebuilt_merges(metadata: TokenMetadata, vocabulary: Vocabulary) -> list[str]:
    """The merges that follow from the scores of tokens. Merges with equal scores rank by the length
    of the left part, then of the right part, as in the tokenizers that transformers converts.

    Raises ``ModelError`` if the scores rank no token, or tokens are longer than in any model."""
    texts, scores = _by_score(metadata, vocabulary)
    known = {text for text in vocabulary if " " not in text}  # spaces are replaced before
    starts = np.flatnonzero(np.diff(scores, prepend=np.nan))
    lengths = np.diff(starts, append=len(scores))
    merges: list[str] = []
    done = 0
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        if length > 1:
            merges += _pairs(texts[done:start], known)
            tied = _pairs(texts[start : start + length], known)
            merges += sorted(tied, key=_lengths, reverse=True)
            done = start + length
    return merges + _pairs(texts[done:], known)


def _by_score(
    metadata: TokenMetadata, vocabulary: Vocabulary
) -> tuple[list[str], np.ndarray[Any, Any]]:
    """Texts and scores of the tokens, the best first, in ascending order of ids if equal."""
    texts = list(vocabulary)
    _check_size(metadata, texts)
    numbers = np.fromiter(vocabulary.values(), np.int64, len(vocabulary))
    types = np.asarray(metadata.types)[numbers]
    scores = metadata.scores
    scores = np.zeros(len(texts)) if scores is None else scores[numbers].astype(np.float64)
    normal = scores[types == TokenType.NORMAL]
    if not len(normal) or np.ptp(normal) == 0:
        raise metadata.fault(
            "scores",
            "rank no token above another and there are no merges, so how text becomes tokens is "
            "unknown; convert the model again from a directory that has tokenizer.model",
        )
    # The file does not have the scores of user-defined tokens, which SentencePiece prefers.
    preferred = types == TokenType.USER_DEFINED
    is_ranked = metadata.architecture in ("gemma", "gemma2")
    scores[preferred] = 1.0 / (1 + numbers[preferred]) if is_ranked else 0.0
    order = np.argsort(-scores, kind="stable")
    return [texts[place] for place in order.tolist()], scores[order]


def _check_size(metadata: TokenMetadata, texts: list[str]) -> None:
    longest = max(texts, key=len)
    if len(longest) > MAX_PIECE:
        why = f"has {longest!r:.40} with {len(longest)} characters, at most {MAX_PIECE} work"
        raise metadata.fault("tokens", why)
    total = sum(map(len, texts))
    if total > MAX_CHARACTERS:
        raise metadata.fault("tokens", f"has {total} characters, at most {MAX_CHARACTERS} work")


def _pairs(texts: list[str], known: set[str]) -> list[str]:
    """The pairs of tokens that each token consists of, those with the longest left part first."""
    return [
        f"{left} {right}"
        for text in texts
        for place in range(len(text) - 1, 0, -1)
        if (right := text[place:]) in known and (left := text[:place]) in known
    ]


def _lengths(merge: str) -> tuple[int, int]:
    left, _, right = merge.partition(" ")
    return len(left), len(right)
