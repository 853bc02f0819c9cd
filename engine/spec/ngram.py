"""N-gram drafts: the tokens that followed an earlier occurrence of the request's last tokens.

Source: prompt lookup decoding (Saxena 2023). The longest match is used, the latest one if several
are equally long. A draft that reaches the end of the text continues with its own tokens, like a
copy in LZ77 (Ziv and Lempel 1977), so a loop of any length is continued.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from engine.sched.request import Request

BASE = 0x9E3779B97F4A7C15  # base of the polynomial hash of an n-gram, modulo 2**64
MASK = (1 << 64) - 1
BULK = 64  # from this many tokens on numpy is faster than a loop


class NgramProposer:
    """Proposes the tokens that followed an earlier occurrence of the text's last tokens.

    At least ``min_size`` and at most ``max_size`` tokens must match. A step's cost depends on the
    number of new tokens, not on the length of the text. Needs about 100 bytes per token.
    """

    def __init__(self, min_size: int, max_size: int, *, base: int = BASE) -> None:
        self.min_size = min_size
        self.max_size = max_size
        self._base = base
        self._places: dict[int, NgramPlaces] = {}  # by arrival number of the request

    def propose(self, req: Request, num_tokens: int) -> Sequence[int]:
        """Tokens that followed an earlier occurrence of the last tokens; empty if there is none."""
        places = self._places.get(req.arrival)
        if places is None:
            places = self._places[req.arrival] = NgramPlaces(
                self.min_size, self.max_size, self._base
            )
        tokens = req.tokens
        places.enter(tokens)
        at = places.find(tokens)
        return [] if at is None else copy(tokens, at, num_tokens)

    def release(self, req: Request) -> None:
        """Drop the tables of a request that has ended."""
        self._places.pop(req.arrival, None)


class NgramPlaces:
    """Maps each n-gram of one text to the index of the token after its last occurrence."""

    def __init__(self, min_size: int, max_size: int, base: int) -> None:
        self._base = base
        self._min_size = min_size
        self._max_size = max_size
        self._tables: list[dict[int, int]] = [{} for _ in range(min_size, max_size + 1)]
        self._num_entered = 0  # n-grams that end before this index are in the tables
        self._last: tuple[int, list[int]] = (0, [])  # end and hashes of the last lookup

    def enter(self, tokens: array[int]) -> None:
        """Add all new n-grams of a growing text, except those that end where the text ends."""
        first, end = self._num_entered + 1, len(tokens)
        if end - first > BULK:
            self._enter_many(tokens, first, end)
        else:
            for position in range(first, end):
                codes = (
                    self._last[1] if position == self._last[0] else self._codes(tokens, position)
                )
                for table, code in zip(self._tables, codes, strict=False):
                    table[code] = position
        self._num_entered = max(self._num_entered, end - 1)

    def find(self, tokens: array[int]) -> int | None:
        """Find the longest n-gram at the end of the text that also occurs earlier. Returns the
        index after its last earlier occurrence; ``None`` if there is none."""
        end = len(tokens)
        codes = self._codes(tokens, end)
        self._last = end, codes
        for index in range(len(codes) - 1, -1, -1):
            position, size = self._tables[index].get(codes[index]), self._min_size + index
            # Two n-grams may have the same hash.
            if position is not None and tokens[position - size : position] == tokens[end - size :]:
                return position
        return None

    def _codes(self, tokens: array[int], end: int) -> list[int]:
        """Hashes of the n-grams of all sizes that end before index ``end``, the shortest first."""
        code, weight, codes = 0, 1, []
        for size in range(1, min(self._max_size, end) + 1):
            code = (code + (tokens[end - size] + 1) * weight) & MASK
            weight = weight * self._base & MASK
            if size >= self._min_size:
                codes.append(code)
        return codes

    def _enter_many(self, tokens: array[int], first: int, end: int) -> None:
        """Add the n-grams that end before each of the tokens [first, end), by numpy operations."""
        start = max(0, first - self._max_size)
        values = np.array(tokens[start : end - 1], dtype=np.uint64) + np.uint64(1)
        codes, weight = np.zeros(len(values), dtype=np.uint64), 1
        for size in range(1, min(self._max_size, len(values)) + 1):
            # codes[i]: hash of the n-gram that ends with token start + i
            codes[size - 1 :] += values[: len(values) - size + 1] * np.uint64(weight)
            weight = weight * self._base & MASK
            if size >= self._min_size:
                position = max(first, start + size)
                ending = codes[position - start - 1 :].tolist()
                table = self._tables[size - self._min_size]
                table.update(zip(ending, range(position, end), strict=True))


def copy(tokens: array[int], at: int, num_tokens: int) -> list[int]:
    """Copy ``num_tokens`` tokens from index ``at`` on; at the text's end, start again at ``at``."""
    drafts = tokens[at : at + num_tokens].tolist()
    period = len(tokens) - at
    while len(drafts) < num_tokens:
        drafts.append(drafts[-period])
    return drafts
