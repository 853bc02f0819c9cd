"""Checks that any two ranks of a policy can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from numbers import Real
from typing import Any

from engine.sched.plugins import answers

WITHOUT_NAN = {bool, int, str}


class Last:
    """A rank greater than any other, for requests that the policy could not rank."""

    def __lt__(self, other: object) -> bool:
        return False

    def __gt__(self, other: object) -> bool:
        return not isinstance(other, Last)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Last)

    def __hash__(self) -> int:
        return 0


class RankCheck:
    """Checks that ranks are tuples of numbers and strings, of the same kind at each position."""

    def __init__(self) -> None:
        self._kinds: list[type] = []  # for each position of a rank: numbers or strings
        self._good_types: set[tuple[type, ...]] = set()  # types of ranks that were checked
        self._num_places = 0  # number of arrays, if ranks were returned as arrays

    def wrong(self, rank: Any) -> str | None:
        """Error text for an invalid rank, ``None`` for a valid one."""
        if rank.__class__ is not tuple or tuple(map(type, rank)) not in self._good_types:
            return self._wrong_types(rank)
        for value in rank:
            if value != value:
                return f"returns {answers.shown(rank)}, which holds a NaN"
        return None

    def wrong_places(self, count: int) -> str | None:
        """Return error text if a policy's ranks, given as ``count`` arrays, cannot be compared with
        earlier ranks; else ``None``."""
        if count == self._num_places:
            return None
        if self._num_places or str in self._kinds[: count + 1]:
            return f"returns {count} arrays, which cannot be compared with earlier ranks"
        self._kinds += [Real] * (count + 1 - len(self._kinds))
        self._num_places = count
        return None

    def are_good(self, ranks: Sequence[Any]) -> bool:
        """True if all ranks are certainly valid. After False, ``wrong`` must check each one."""
        if set(map(type, ranks)) != {tuple} or len(set(map(len, ranks))) != 1:
            return False
        columns = list(zip(*ranks, strict=True))
        types = [set(map(type, column)) for column in columns]
        if not all(combined in self._good_types for combined in product(*types)):
            return False
        return all(map(_has_no_nan, columns, types))

    def _wrong_types(self, rank: Any) -> str | None:
        """Check a rank whose combination of types has not occurred yet. Returns an error text, or
        ``None``."""
        if not isinstance(rank, tuple):
            return f"returns {answers.shown(rank)}, must be a tuple"
        if not all(isinstance(value, str | Real) for value in rank):
            return f"returns {answers.shown(rank)}, must hold numbers and strings"
        kinds = [str if isinstance(value, str) else Real for value in rank]
        kinds.append(Real)  # the arrival number, appended to each rank
        if any(kind is not known for kind, known in zip(kinds, self._kinds, strict=False)):
            return f"returns {answers.shown(rank)}, which cannot be compared with earlier ranks"
        if any(value != value for value in rank):
            return f"returns {answers.shown(rank)}, which holds a NaN"
        self._kinds += kinds[len(self._kinds) :]
        self._good_types.add(tuple(map(type, rank)))
        return None


def _has_no_nan(values: Sequence[Any], types: set[type]) -> bool:
    """True if it is certain that no value is NaN. ``types``: the set of the values' types."""
    if types == {float}:
        total = sum(values)
        return bool(total == total)
    return types <= WITHOUT_NAN
