"""Looks ahead in JSON: can the text still become valid, and which names or values may follow?

A negative answer is exact, a positive one may be wrong. A result that depends only on the rules of
one value is cached for all texts. Names and values are tried out only where other rules depend on
them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from engine.structured.checked.demands import UNKNOWN, Verdict
from engine.structured.checked.exact import Exact, Number, number_of
from engine.structured.checked.frames import MOST_NESTED, UNSEEN, ValueFrame, verdicts_on, with_news
from engine.structured.checked.places import KINDS, Place, PlaceTable, Vector

Found = TypeVar("Found")
Options = tuple[bytes, ...] | None  # all allowed spellings, ``None`` if any is
MOST_NAMES = 256  # names that are tried one by one
MOST_MISSING = 64  # ways to add members that are tried
MOST_LOOKS = 200  # values that are tried per query
MOST_KEPT = 4_000  # cached results
MOST_DIGITS = 8  # of a number whose result is cached
_GROWING = re.compile(rb"-?[0-9.]+[eE]\+?[0-9]+")  # further digits only increase the magnitude
MAX_DEPTH, MAX_COMPARED_DEPTH = 2, 6  # values tried in succession
OTHER_NAME = "\uffff another"


class Ahead:
    """Answers whether a JSON text can still become valid under its schema; caches the answers."""

    def __init__(self) -> None:
        self._depth = 0
        self._num_looks = 0  # values tried for the current query
        self._num_out = 0  # enclosing values that are tried, too
        self._kept: dict[tuple[str, int, int, Any], tuple[Any, str]] = {}  # results with ``why``
        # By place and digits: whether they start a valid number, with ``why``.
        self._numbers: dict[tuple[Place, bytes], tuple[bool, str]] = {}
        self.why = ""  # the keyword that made the last result negative

    def is_alive(self, frame: ValueFrame) -> bool:
        """Whether the object or array, one of whose values just ended, can still be completed."""
        if frame.parent is None or not frame.is_watched or self._is_as_before(frame):
            return True
        return bool(self._kept_or("alive", frame, self._is_alive))

    def _is_alive(self, frame: ValueFrame) -> bool:
        if self._may_close(frame):
            return True
        if frame.table.kind == "object":
            # Where values are compared, a name must be left that leads to a new value.
            return (not frame.is_compared or self.names(frame) != ()) and self._can_finish(frame)
        return self.may_go_on(frame) and self._can_finish_array(frame)

    def may_go_on(self, frame: ValueFrame) -> bool:
        """Whether a comma and another member or item may follow in this object or array."""
        if not frame.is_watched:
            return True
        if frame.table.kind == "object":
            return self.names(frame) != ()
        began = with_news(frame.at_item())
        return self._judged(began) and self.has_value(began)

    def names(self, frame: ValueFrame) -> Options:
        """Property names that may come next, each after a quote; ``None`` if any name may."""
        if not frame.is_watched:
            return None
        if frame.next_names is UNSEEN:
            frame.next_names = self._kept_or("names", frame, self._names)
        found: Options = frame.next_names
        if found == ():
            self.why = self.why or "additionalProperties"
        return found

    def values(self, frame: ValueFrame, kind: str) -> Options:
        """Return the JSON texts of the values of this kind that may come next, strings without
        quotation marks; ``None`` if values that the schema does not list may come too."""
        place = frame.open_place
        listed = place.listed(kind)
        if not listed or (place.is_plain and not frame.is_watched):
            return None
        found: list[Exact] | None
        if place.is_must and not frame.is_watched:
            found = place.own_options(kind)
        else:
            found = self._kept_or(kind, frame, lambda frame: self._values(frame, kind))
        if found is None:
            return None
        return tuple(spelled for value in found for spelled in spellings(value))

    def _values(self, frame: ValueFrame, kind: str) -> list[Exact] | None:
        place = frame.open_place
        if not frame.is_watched or self._may_be(frame, place.on_others(kind), UNKNOWN):
            return None
        verdicts: dict[Vector, bool] = {}
        return [v for v in place.listed(kind) if self._is_option(frame, v, verdicts)]

    def _kept_or(self, what: str, frame: ValueFrame, look: Callable[[ValueFrame], Found]) -> Found:
        """Return ``look(frame)``, cached under ``what`` for all equivalent frames."""
        standing = frame.standing
        if standing is None:
            return look(frame)
        key = what, self._depth, self._num_out, standing
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self.why = ""
            found = look(frame)
            self._kept[key] = found, self.why
        found, why = self._kept[key]
        self.why = why or self.why
        return found

    def may_become(self, frame: ValueFrame, text: bytes) -> bool:
        """Whether ``text`` can be the beginning of a number that is valid as the next value."""
        place = frame.open_place
        if not place.is_must or len(text) > MOST_DIGITS:
            return self._may_become(frame, place, text)
        # Only the place decides, and a mask tries every short number that is a token.
        key = place, text
        if key not in self._numbers:
            if len(self._numbers) >= MOST_KEPT:
                self._numbers.clear()
            self.why = ""
            self._numbers[key] = self._may_become(frame, place, text), self.why
        is_right, why = self._numbers[key]
        self.why = why or self.why
        return is_right

    def _may_become(self, frame: ValueFrame, place: Place, text: bytes) -> bool:
        if _GROWING.fullmatch(text):
            return self._is_within(place, number_of(text.decode()))
        if not place.is_of_whole_numbers or not text.isdigit():
            return True
        number = int(text)
        if self._is_number(frame, number):
            return True
        most = place.most_number
        if not number or (most is not None and number * 10 > most):
            return False
        for scale in (10, 100):
            if any(self._is_number(frame, number * scale + more) for more in range(scale)):
                return True
        return most is None or number * 1000 <= most

    def _is_within(self, place: Place, number: Number) -> bool:
        """Whether an unfinished number, which can only grow in magnitude, may still be in range."""
        if place.most_number is not None and number > max(place.most_number, 0):
            self.why = "maximum"
            return False
        if place.least_number is not None and number < min(place.least_number, 0):
            self.why = "minimum"
            return False
        return True

    def _is_number(self, frame: ValueFrame, number: int) -> bool:
        place = frame.open_place
        vector = place.on_scalar(number)
        if place.is_must:
            return self._fits(vector)
        return self._judged(with_news(frame.filled(vector, number)))

    def is_possible(self, frame: ValueFrame, value: Exact) -> bool:
        """Whether the next value may be the complete value ``value``."""
        place = frame.open_place
        if place.is_must and not frame.compares:
            return self._fits(place.on_listed(value))
        if not frame.is_watched:
            return True
        return self._may_be(frame, verdicts_on(place, value), value)

    def has_value(self, frame: ValueFrame) -> bool:
        """Whether any value is allowed next."""
        place = frame.open_place
        if (not frame.compares or place.is_endless) and (place.is_easy or place.is_must):
            return place.has_value
        return any(self._has_kind(frame, kind) for kind in KINDS)

    def _has_container(self, frame: ValueFrame, table: PlaceTable) -> bool:
        """Whether the next value may be an object or array, whichever ``table.kind`` says."""
        if not frame.compares or table.place.is_endless:
            return True
        began = with_news(ValueFrame(table, frame))
        return self._judged(began) and self._deeper(lambda: self.is_alive(began))

    def _has_kind(self, frame: ValueFrame, kind: str) -> bool:
        """Whether the next value may be of this kind."""
        place = frame.open_place
        table = place.table(kind)
        if place.is_must and not self._fits(table.vector):
            return False
        begun = with_news(frame.opened(table.vector))
        if not self._judged(begun):
            return False
        if values := KINDS[kind]:
            return any(self.is_possible(begun, value) for value in values)
        if kind in ("object", "array"):
            return self._has_container(begun, table)
        return self.values(begun, kind) != ()

    # -- helpers

    def _is_as_before(self, frame: ValueFrame) -> bool:
        """Whether the object's last member has no effect on which names are required or allowed."""
        return frame.last in frame.table.quiet and not frame.is_compared

    def _fits(self, vector: Vector) -> bool:
        """Whether no verdict in ``vector`` is a failure, i.e. the name of a keyword."""
        for verdict in vector:
            if isinstance(verdict, str):
                self.why = verdict
                return False
        return True

    def _is_option(self, frame: ValueFrame, value: Exact, known: dict[Vector, bool]) -> bool:
        """Whether the next value may be ``value``, which the schema lists. known: cached results,
        shared by values with equal verdicts where only these matter."""
        vector = frame.open_place.on_listed(value)
        is_own = frame.is_compared or (frame.table.is_unique and frame.table.place.prefix > 0)
        if is_own or (frame.table.is_unique and value in frame.seen):
            return self._may_be(frame, vector, value)
        if vector not in known:
            known[vector] = self._may_be(frame, vector, value)
        return known[vector]

    def _may_be(self, frame: ValueFrame, vector: Vector, value: Exact) -> bool:
        """Whether the text may continue after ``value``. vector: the verdicts on ``value``."""
        filled = with_news(frame.filled(vector, value))
        if not self._judged(filled):
            return False
        # Where values are compared, the difference may come late in an object.
        most = MAX_COMPARED_DEPTH if filled.is_compared else MAX_DEPTH
        return self._deeper(lambda: self.is_alive(filled), most)

    def _deeper(self, look: Callable[[], bool], most: int = MAX_DEPTH) -> bool:
        if self._depth == 0:
            self._num_looks = 0
        self._num_looks += 1
        if self._depth >= most or self._num_looks > MOST_LOOKS:
            return True
        self._depth += 1
        try:
            return look()
        finally:
            self._depth -= 1

    def _may_close(self, frame: ValueFrame) -> bool:
        closed, parent = frame.closed(), frame.parent
        assert parent is not None, "the document itself is not closed"
        place = frame.table.place
        if place.is_must and not frame.is_compared:
            return self._fits(closed.vector)
        value = closed.exact if parent.keeps_values else None
        filled = with_news(parent.filled(closed.vector, value))
        if not self._judged(filled) or self._num_out >= MOST_NESTED:
            return self._judged(filled)
        self._num_out += 1
        try:
            return self.is_alive(filled)
        finally:
            self._num_out -= 1

    def _fits_closed(self, frame: ValueFrame, closed: ValueFrame) -> bool:
        """Whether ``frame`` may end here, as ``closed``; its parent need not be completable."""
        parent, place = frame.parent, frame.table.place
        assert parent is not None, "the document itself is not closed"
        if place.is_must and not frame.is_compared:
            return self._fits(closed.vector)
        value = closed.exact if parent.keeps_values else None
        return self._judged(with_news(parent.filled(closed.vector, value)))

    def _judged(self, frame: ValueFrame) -> bool:
        verdict = verdict_of(frame)
        if isinstance(verdict, str):
            self.why = verdict
            return False
        return True

    # -- objects

    def _names(self, frame: ValueFrame) -> Options:
        if len(frame.table.place.known_names) > MOST_NAMES:
            return None
        if (names := self._names_left(frame)) is None:
            return None
        return tuple(b'"' + name.encode() for name in names if self._is_possible(frame, name))

    def _names_left(self, frame: ValueFrame) -> Sequence[str] | None:
        """Names in the schema that may follow; ``None`` if names outside it may follow, too."""
        place = frame.table.place
        if place.has_patterns or self._judged(with_news(frame.named(OTHER_NAME, place.others))):
            return None
        return [name for name in place.known_names if name not in frame.names]

    def _is_possible(self, frame: ValueFrame, name: str) -> bool:
        began = with_news(frame.named(name))
        if not self._judged(began):
            return False
        place = began.open_place
        if place.is_must and not place.has_value:
            self.why = "properties"
            return False
        if frame.is_compared and not self.has_value(began):
            return False
        return self._is_as_before(began) or self._deeper(lambda: self._is_finished_by(began))

    def _is_finished_by(self, began: ValueFrame) -> bool:
        """Whether the object can be completed once its last property has a value."""
        filled = self._filled(began)
        return self._may_close(filled) or self._can_finish(filled)

    def _can_finish(self, frame: ValueFrame) -> bool:
        """Whether the object can be completed as it is, or with further members of any values."""
        why, waiting, seen = self.why, [frame], {frozenset[str](frame.names)}
        closed = frame.closed()
        if not self._fits_closed(frame, closed):
            lacking = dict.fromkeys(each for each in closed.missing if isinstance(each, str))
            if lacking:
                whole = with_news(frame.with_members([*lacking]))
                if self._judged(whole) and self._fits_closed(whole, whole.closed()):
                    return True
        for _ in range(MOST_MISSING):
            if not waiting:
                self.why = why
                # A name that matches a pattern may do what no known name does.
                place = frame.table.place
                return place.has_patterns or len(place.known_names) > MOST_NAMES
            frame = waiting.pop()
            closed = frame.closed()
            if self._fits_closed(frame, closed):
                return True
            for name in self._others(frame, closed):
                if (names := frozenset((*frame.names, name))) not in seen:
                    seen.add(names)
                    waiting += self._with_member(frame, name)
        return True  # unknown: the search would take too long

    def _with_member(self, frame: ValueFrame, name: str) -> Iterator[ValueFrame]:
        """Yield the frame with one more member of unknown value, if such a member is allowed."""
        is_other = name.startswith(OTHER_NAME)
        began = with_news(frame.named(name, frame.table.place.others if is_other else None))
        if self._judged(began):
            yield self._filled(began)

    def _others(self, frame: ValueFrame, closed: ValueFrame) -> list[str]:
        """Return the names to try as further members of the object, required names last."""
        lacking = [n for n in closed.missing if isinstance(n, str) and n not in frame.names]
        if len(frame.table.place.known_names) > MOST_NAMES:
            return lacking
        names = self._names_left(frame)
        found = [f"{OTHER_NAME}{len(frame.names)}"] if names is None else list(names)
        if names is None:
            known = frame.table.place.known_names
            found += [name for name in known if name not in frame.names]
        return [*found, *lacking]

    def _filled(self, began: ValueFrame) -> ValueFrame:
        """Return the frame after its current member or item got an unknown value."""
        return with_news(began.filled(began.open_place.start, UNKNOWN))

    # -- arrays

    def _can_finish_array(self, frame: ValueFrame) -> bool:
        began = with_news(frame.at_item())
        is_alike = frame.table.is_unique and frame.count >= frame.table.place.prefix
        options = self._num_options(began) if is_alike else None
        for _ in range(MAX_DEPTH):
            closed = frame.closed()
            if self._fits_closed(frame, closed):
                return True
            num_more = max((n for n in closed.missing if isinstance(n, int)), default=1)
            if options is not None and num_more > options:
                self.why = "uniqueItems"
                return False
            frame = with_news(frame.stretched(num_more))
            if not self._judged(frame):
                return False
        return True

    def _num_options(self, began: ValueFrame) -> int | None:
        """How many different values the array item may have; ``None`` if there are too many."""
        place, found = began.open_place, 0
        if place.is_endless:
            return None
        for kind, values in KINDS.items():
            vector = place.table(kind).vector
            if place.is_must and not self._fits(vector):
                continue
            begun = with_news(began.opened(vector))
            if not self._judged(begun):
                continue
            if values:
                found += sum(self.is_possible(begun, value) for value in values)
            elif kind in ("object", "array") or (more := self.values(begun, kind)) is None:
                return None
            else:
                found += len(more)
        return found


def verdict_of(frame: ValueFrame) -> Verdict:
    """Return the verdict on the whole text: True, the failed keyword, or ``None`` (undecided)."""
    while frame.parent is not None:
        frame = frame.parent
    return frame.verdicts[-1]


def spellings(value: Exact) -> tuple[bytes, ...]:
    """Return the JSON text of a number, or of a string without its quotation marks."""
    if isinstance(value, str):
        return (value.encode("utf-8", "surrogatepass"),)
    return (str(value).encode(),)
