"""Suggests names that a user probably meant: at most a few, as wrong suggestions mislead."""

from __future__ import annotations

import re
from collections.abc import Iterable
from heapq import nsmallest

MOST = 2  # suggested names
MOST_ENDING = 3  # suggested options that end in what was typed
MOST_SLIPS = 3  # typing errors
MOST_COMPARED = 32  # of many names
MOST_CHARS = 100  # of a name from anyone
LEAST_PREFIX = 4  # characters of a prefix that stands for the rest of a name


def near_names(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names that ``name`` may misspell, or else the only one that starts with it.

    Case and separators are ignored. Words that differ in half of their letters are not alike:
    ``data_parallel_size`` is no misspelling of ``tensor_parallel_size``."""
    typed = _words(name)
    if not typed:
        return []
    found = []
    for other in dict.fromkeys(known):
        meant = _words(other)
        num = _num_slips("".join(typed), "".join(meant))
        if _singulars(typed) == _singulars(meant):  # "policies" for "policy" is three slips
            num = min(num, 1)
        if num <= _most_slips("".join(meant)) and _are_same_words(typed, meant):
            found.append((num, other))
    if not found and len(name) >= LEAST_PREFIX:
        longer = [each for each in dict.fromkeys(known) if each.lower().startswith(name.lower())]
        return longer if len(longer) == 1 else []
    fewest = min((num for num, _ in found), default=0)
    return [other for num, other in found if num == fewest][:MOST]


def near_options(name: str, known: Iterable[str]) -> list[str]:
    """Return the options that ``name`` may mean: those that it misspells, else the few that end in
    it (``policy`` for ``scheduling_policy``), else the few that start with it."""
    known, typed = list(dict.fromkeys(known)), _words(name)
    if not typed:
        return []
    ends = [each for each in known if _words(each)[-len(typed) :] == typed]
    begins = [each for each in known if _words(each)[: len(typed)] == typed]
    near = near_names(name, known)
    if near and not near[0].lower().startswith(name.lower()):
        return near
    if 0 < len(ends) <= MOST_ENDING:
        return ends
    return near or (begins if len(begins) <= MOST else [])


def suggestion(near: list[str]) -> str:
    """Return the end of a message that suggests the names in ``near``; "" if there are none."""
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name, such as "; did you mean 'top_p'?"."""
    return suggestion(near_names(name, known))


def did_you_mean_of_many(name: str, known: Iterable[str]) -> str:
    """Like ``did_you_mean``, for thousands of known names and a name from anyone: only names with
    about the same letters are compared, which takes milliseconds."""
    if len(name) > MOST_CHARS:
        return ""
    letters = set(name)

    def distance(other: str) -> int:
        return abs(len(name) - len(other)) + len(letters.symmetric_difference(other))

    return did_you_mean(name, nsmallest(MOST_COMPARED, known, key=distance))


def near_value(value: object, known: Iterable[str]) -> str:
    """Return the end of an error message that suggests similar known values; "" if there are none
    or ``value`` is not a string."""
    return did_you_mean(value, known) if isinstance(value, str) else ""


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[\W_]+", name.lower()) if word]


def _singulars(words: list[str]) -> list[str]:
    return [re.sub(r"ies$", "y", word).removesuffix("s") for word in words]


def _most_slips(meant: str) -> int:
    if len(meant) < 4:
        return 0
    return 1 if len(meant) < 6 else 2 if len(meant) < 14 else MOST_SLIPS


def _are_same_words(typed: list[str], meant: list[str]) -> bool:
    if len(typed) != len(meant):  # a separator is missing or repeated
        return True
    return all(_is_same_word(a, b) for a, b in zip(typed, meant, strict=True))


def _is_same_word(typed: str, meant: str) -> bool:
    """Whether one word may be a misspelling of the other: less than half of the letters differ, or
    one of them has a single additional letter (k and kv)."""
    num = _num_slips(typed, meant)
    return (
        num == 0
        or 2 * num < max(len(typed), len(meant))
        or num == abs(len(typed) - len(meant)) == 1
    )


def _num_slips(typed: str, meant: str) -> int:
    """Return the number of typing slips: letters missing, added, wrong or swapped with the next
    one."""
    if abs(len(typed) - len(meant)) > MOST_SLIPS:
        return MOST_SLIPS + 1
    rows: list[list[int]] = [[*range(len(meant) + 1)]]
    for i, letter in enumerate(typed, 1):
        row = [i]
        for j, other in enumerate(meant, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != other)))
            is_swapped = i > 1 and j > 1 and (letter, typed[i - 2]) == (meant[j - 2], other)
            if is_swapped:
                row[j] = min(row[j], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]
