"""What a rank may be. Ranks must be comparable with each other, one by one and all together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from numbers import Real
from typing import Any

WITHOUT_NAN = {bool, int, str}


class Last:
    """Compares as greater than any value: rank of a request that its policy could not rank."""

    def __lt__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return not isinstance(other, Last)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Last)

    def __hash__(self) -> int:
        return 0


class RankCheck:
    """Tuples of numbers and strings, of the same kind in the same places."""

    def __init__(self) -> None:
        self._kinds: list[type] = []  # of the places of a rank: numbers or strings
        self._good_types: set[tuple[type, ...]] = set()  # of ranks that fit these

    def wrong(self, rank: Any) -> str | None:
        """What is wrong with a rank, ``None`` if nothing is."""
        if rank.__class__ is not tuple or tuple(map(type, rank)) not in self._good_types:
            return self._wrong_types(rank)
        for value in rank:
            if value != value:
                return f"returns {rank!r}, which holds a NaN"
        return None

    def are_good(self, ranks: Sequence[Any]) -> bool:
        """Is nothing wrong with any of them? ``False`` if that takes a closer look."""
        if set(map(type, ranks)) != {tuple} or len(set(map(len, ranks))) != 1:
            return False
        columns = list(zip(*ranks, strict=True))
        types = [set(map(type, column)) for column in columns]
        if not all(combined in self._good_types for combined in product(*types)):
            return False
        return all(map(_has_no_nan, columns, types))

    def _wrong_types(self, rank: Any) -> str | None:
        """The first look at a rank of these types."""
        if not isinstance(rank, tuple):
            return f"returns {rank!r}, must be a tuple"
        if not all(isinstance(value, str | Real) for value in rank):
            return f"returns {rank!r}, must hold numbers and strings"
        kinds = [str if isinstance(value, str) else Real for value in rank]
        kinds.append(Real)  # the number of arrival behind it
        if any(kind is not known for kind, known in zip(kinds, self._kinds, strict=False)):
            return f"returns {rank!r}, which cannot be compared with earlier ranks"
        if any(value != value for value in rank):
            return f"returns {rank!r}, which holds a NaN"
        self._kinds += kinds[len(self._kinds) :]
        self._good_types.add(tuple(map(type, rank)))
        return None


def _has_no_nan(values: Sequence[Any], types: set[type]) -> bool:
    """Said of numbers of one type, or of strings; ``False`` if it takes a closer look."""
    if types == {float}:
        total = sum(values)
        return bool(total == total)
    return types <= WITHOUT_NAN
