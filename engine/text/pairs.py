"""Tokenises pairs of texts for cross-encoders, as the tokenizer's template joins them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.config.pooling.spec import PoolingSpec
from engine.errors import RequestError
from engine.text.pair_layout import PairLayout
from engine.text.tokenizer import Tokenizer


class EncodedPair(NamedTuple):
    """Two texts as one sequence."""

    token_ids: list[int]
    second: int | None
    """Index of the first token of type 1; ``None``: all tokens have type 0."""


def encode_pairs(
    tokenizer: Tokenizer,
    spec: PoolingSpec,
    pairs: Sequence[tuple[str, str]],
    most: int | None,
) -> list[EncodedPair]:
    """Tokenise pairs. The model's default prompt goes in front of the first text of each.

    most: tokens of a sequence; above it the longer text is cut, then both; ``None``: no limit.
    Raises ``RequestError`` for a text that cannot be tokenised, a limit that leaves no room for
    texts, and a tokenizer that cannot join texts."""
    layout = tokenizer.pair_layout
    if layout is None:
        raise RequestError(
            "pairs of texts cannot be tokenised: the model has a tokenizer in Python; convert "
            "it to tokenizer.json"
        )
    if most is not None and most <= layout.num_special:
        raise RequestError(
            f"truncate_prompt_tokens is {most}, must be above {layout.num_special}, the number of "
            "special tokens of a pair of texts",
            param="truncate_prompt_tokens",
        )
    room = None if most is None else most - layout.num_special
    prompt = spec.prompts.get(spec.default_prompt_name or "", "")
    firsts = _encode_each(tokenizer, [prompt + first for first, _ in pairs])
    seconds = _encode_each(tokenizer, [second for _, second in pairs])
    return [
        _join(layout, *_cut(tokenizer, first, second, room))
        for first, second in zip(firsts, seconds, strict=True)
    ]


def _encode_each(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of texts without special tokens. A text that is there several times, as a query is,
    is tokenised once."""
    distinct = list(dict.fromkeys(texts))
    encoded = dict(zip(distinct, tokenizer.encode_texts(distinct), strict=True))
    return [encoded[text] for text in texts]


def _cut(
    tokenizer: Tokenizer, first: list[int], second: list[int], room: int | None
) -> tuple[list[int], list[int]]:
    """Cut both texts to ``room`` tokens together: the longer one to the length of the other, then
    both alike."""
    if room is None or len(first) + len(second) <= room:
        return first, second
    short, long = sorted((len(first), len(second)))
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    kept = (short, long) if len(first) <= len(second) else (long, short)
    return tokenizer.cut(first, kept[0]), tokenizer.cut(second, kept[1])


def _join(layout: PairLayout, first: list[int], second: list[int]) -> EncodedPair:
    ids = [*layout.before, *first, *layout.between, *second, *layout.after]
    start = layout.second
    return EncodedPair(ids, None if start is None else len(first) + start)
