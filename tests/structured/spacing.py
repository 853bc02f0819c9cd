"""Whitespace between tokens of JSON: texts that have it as a pattern says, and who judges them."""

from __future__ import annotations

import re
from itertools import pairwise
from random import Random

from structured.judges import Judge
from structured.makers import RegexMaker, damaged_json

TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|[{}\[\]:,]')
WRONG = ("", " ", "  ", "   ", "\n", "\t", "\n\n", "\u00a0")


def tokens_of(text: str) -> tuple[list[str], list[str]]:
    """Tokens, and what stands between them."""
    found = list(TOKEN.finditer(text))
    spaces = [text[one.end() : two.start()] for one, two in pairwise(found)]
    return [each[0] for each in found], spaces


def spaced(text: str, pattern: str, rng: Random) -> str:
    """The same value with other whitespace."""
    tokens, _ = tokens_of(text)
    maker = RegexMaker(pattern, rng)
    return "".join([each + maker.text() for each in tokens[:-1]] + tokens[-1:])


def damaged(text: str, pattern: str, rng: Random) -> str:
    """Another value, or other whitespace at one place."""
    if rng.random() < 0.4:
        return spaced(damaged_json(text, rng), pattern, rng)
    tokens, spaces = tokens_of(text)
    if spaces:
        spaces[rng.randrange(len(spaces))] = rng.choice(WRONG)
    return "".join(token + space for token, space in zip(tokens, [*spaces, ""], strict=True))


def judge_of(judge: Judge, pattern: str) -> Judge:
    """A judge who looks at whitespace, too; the other looks at the value."""
    between = re.compile(pattern)

    def is_right(text: str) -> bool:
        if not judge(text) or text != text.strip():
            return False
        return all(between.fullmatch(space) for space in tokens_of(text)[1])

    return is_right
