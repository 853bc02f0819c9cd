"""The open objects and arrays of a text, as frames, each with a link to the frame around it.

A frame is never changed once it is part of a state: each step makes new frames. So copying a state
copies only a reference to the innermost frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.structured.checked.demands import UNKNOWN, Verdict
from engine.structured.checked.exact import Exact, array_of, kind_of, object_of
from engine.structured.checked.places import Member, Place, PlaceTable, Vector

MOST_COMPARED = 64  # names or items of a frame in a key
MOST_NESTED = 8  # nested frames in a key, or frames to look outward
UNSEEN = object()  # the allowed names were not computed yet
Key = str | int  # the name of a property, or the index of an item


class MemberAccount:
    """How a value's members or items satisfy or break each rule so far, by rule number."""

    __slots__ = ("failed", "hits", "left", "perhaps", "unsure")

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}  # the keyword that one of them breaks
        self.left: dict[int, tuple[Key, ...]] = {}  # invalid unless another rule evaluates them
        self.hits: dict[int, frozenset[Key]] = {}  # those that satisfy ``contains``
        self.perhaps: dict[int, frozenset[Key]] = {}  # those that may satisfy it
        self.unsure: frozenset[int] = frozenset()  # rules that one of them may break

    def _copy(self) -> MemberAccount:
        other = MemberAccount.__new__(MemberAccount)
        other.failed, other.hits, other.left = self.failed, self.hits, self.left
        other.perhaps, other.unsure = self.perhaps, self.unsure
        return other

    def with_failed(self, failed: Sequence[tuple[int, str]]) -> MemberAccount:
        """Return a copy with more failed rules: (number, keyword that failed). If a rule had failed
        before, its first keyword is kept."""
        if all(number in self.failed for number, _ in failed):
            return self
        other = self._copy()
        other.failed = {**dict(failed), **self.failed}
        return other

    def with_unsure(self, number: int) -> MemberAccount:
        if number in self.unsure:
            return self
        other = self._copy()
        other.unsure = self.unsure | {number}
        return other

    def with_left(self, number: int, key: Key) -> MemberAccount:
        found = self.left.get(number, ())
        if key in found:
            return self
        other = self._copy()
        other.left = {**self.left, number: (*found, key)}
        return other

    def with_held(self, number: int, key: Key, verdict: Verdict) -> MemberAccount:
        """Return a copy that counts item ``key`` as a (possible) match of a rule's ``contains``."""
        if isinstance(verdict, str):
            return self
        other = self._copy()
        found = self.hits if verdict is True else self.perhaps
        found = {**found, number: found.get(number, frozenset()) | {key}}
        if verdict is True:
            other.hits = found
        else:
            other.perhaps = found
        return other


NOTHING = MemberAccount()


class ValueFrame:
    """An object, an array or the whole document while it is written: what is known of it so far."""

    __slots__ = (
        *("parent", "table", "verdicts", "account"),
        *("names", "count", "open", "is_over", "is_kept", "parts", "seen", "is_repeated"),
        *("missing", "last", "is_compared", "is_watched", "is_vague", "next_names", "learned"),
    )

    def __init__(self, table: PlaceTable, parent: ValueFrame | None) -> None:
        """Begin an object or array, after its opening bracket."""
        self.table, self.parent = table, parent
        self.verdicts = table.start.copy()
        self.account = NOTHING
        self.names: dict[str, Member] = {}
        self.count = 0  # items that were begun
        self.open: tuple[Key, Member, Vector] | None = None  # the value that is being written
        self.parts: Any = None  # the finished values, as a linked list
        self.seen: frozenset[Exact] = frozenset()
        self.last: str | None = None  # name
        self.is_over = self.is_repeated = False
        self.is_kept = table.keeps or (parent is not None and parent.keeps_values)
        is_within = parent is not None and parent.compares
        self.is_compared = table.keeps or (is_within and not table.place.is_endless)
        is_watched = parent is not None and parent.is_watched and not table.place.is_must
        self.is_watched: bool = table.is_watchful or self.is_compared or is_watched
        self.is_vague = False
        self.missing: list[str | int | None] = []  # names, items or any property (``None``)
        self.next_names: Any = UNSEEN
        self.learned: dict[Any, Any] = {}
        table.judge(self)

    @property
    def open_place(self) -> Place:
        """The rules that apply to the value that is being written."""
        assert self.open is not None, "a value is being written"
        return self.open[1].place

    @property
    def keeps_values(self) -> bool:
        """Whether the values of members or items are stored, for ``uniqueItems`` or ``enum``."""
        return self.is_kept or self.table.is_unique

    @property
    def compares(self) -> bool:
        """Whether the values themselves decide what may follow, not only the verdicts on them."""
        return self.is_compared or self.table.is_unique

    @property
    def vector(self) -> Vector:
        """The root rules' verdicts on this object or array, which its parent needs."""
        verdicts = self.verdicts
        return tuple([verdicts[number] for number in self.table.place.ends])

    @property
    def standing(self) -> Any:
        """A hashable state: frames with equal states allow the same further texts. ``None`` if it
        would be too large."""
        found: list[Any] = []
        frame: ValueFrame | None = self
        for _ in range(MOST_NESTED):
            if frame is None or frame.is_compared:
                break
            if len(frame.names) > MOST_COMPARED or len(frame.seen) > MOST_COMPARED:
                break
            account = frame.account
            found += (frame.table, tuple(frame.verdicts), frame.count, frame.seen, frame.last)
            found += (frozenset(frame.names), frame.is_vague, frame.open and frame.open[2])
            found += (tuple(account.hits.items()), tuple(account.left.items()), account.unsure)
            if frame.parent is None or frame.table.place.is_must:
                return tuple(found)
            frame = frame.parent
        return None

    @property
    def exact(self) -> Exact:
        """The complete object or array as a hashable value; its values must have been stored. If
        one of its values is unknown, the result equals nothing else."""
        if self.is_vague:
            return object()
        found, parts = [], self.parts
        while parts is not None:
            part, parts = parts
            found.append(part)
        found.reverse()
        return object_of(found) if self.table.kind == "object" else array_of(found)

    def copy(self) -> ValueFrame:
        """Return a copy that may be changed."""
        other = ValueFrame.__new__(ValueFrame)
        other.parent, other.table, other.account = self.parent, self.table, self.account
        other.names, other.count, other.open = self.names, self.count, self.open
        other.is_over, other.is_kept, other.parts = self.is_over, self.is_kept, self.parts
        other.seen, other.is_repeated, other.last = self.seen, self.is_repeated, self.last
        other.is_watched, other.is_vague = self.is_watched, self.is_vague
        other.is_compared = self.is_compared
        other.verdicts, other.missing = self.verdicts.copy(), []
        other.next_names, other.learned = UNSEEN, {}
        return other

    def named(self, name: str, member: Member | None = None) -> ValueFrame:
        """Return a copy of the object in which the value of property ``name`` begins. member: the
        rules for that value, if already known."""
        other = self.copy()
        if member is None:
            member = self.table.place.property(name)
        other.names = {**self.names, name: member}
        other.last = name
        if member.failing:
            other.account = self.account.with_failed(member.failing)
        other._record(name, member, member.place.start, is_whole=False)
        return other

    def at_item(self) -> ValueFrame:
        """Return a copy of the array in which the next item has begun."""
        other, member = self.copy(), self.table.place.item(self.count)
        other.count += 1
        other._record(self.count, member, member.place.start, is_whole=False)
        return other

    def opened(self, vector: Vector) -> ValueFrame:
        """Return a copy with ``vector`` as the verdicts on the value that is being written."""
        assert self.open is not None, "a value is being written"
        other = self.copy()
        other._record(self.open[0], self.open[1], vector, is_whole=False)
        return other

    def filled(self, vector: Vector, value: Exact) -> ValueFrame:
        """Return a copy in which the current value is complete. vector: the rules' verdicts on the
        value; value: needed only if values are stored."""
        assert self.open is not None, "a value is being written"
        other = self.copy()
        key, member, _ = self.open
        if self.table.is_unique:
            other.is_repeated = self.is_repeated or value in self.seen
            other.seen = self.seen | {object() if value is UNKNOWN else value}
        other.is_vague = self.is_vague or value is UNKNOWN
        if self.is_kept:
            part = value if self.table.kind == "array" else (key, value)
            other.parts = part, self.parts
        other._record(key, member, vector, is_whole=True)
        return other

    def with_members(self, names: Sequence[str]) -> ValueFrame:
        """Return a copy of the object with more members, whose values are unknown."""
        other, place = self.copy(), self.table.place
        members = {name: place.property(name) for name in names}
        other.names, other.last, other.is_vague = {**self.names, **members}, names[-1], True
        for name, member in members.items():
            other.account = other.account.with_failed(member.failing)
            other._record(name, member, member.place.start, is_whole=True, is_judged=False)
        self.table.judge(other)
        return other

    def stretched(self, num_more: int) -> ValueFrame:
        """Return a copy of the array with ``num_more`` further items of unknown value."""
        other, member = self.copy(), self.table.place.item(self.count)
        other.count += num_more - 1
        other._record(other.count, member, member.place.start, is_whole=True)
        other.count += 1
        other.is_vague = True
        return other

    def closed(self) -> ValueFrame:
        """Return a copy in which the object or array is closed."""
        other = self.copy()
        other.is_over = True
        self.table.judge(other)
        return other

    def is_evaluated_by(self, number: int, key: Key) -> bool:
        """Whether rule ``number`` evaluates the member or item, as for ``unevaluatedItems``."""
        return number in self._member(key).evaluators or self.may_contain(number, key)

    def may_contain(self, number: int, key: Key) -> bool:
        """Whether item ``key`` may match a rule's ``contains`` and so be evaluated by the rule."""
        rule = self.table.place.rules[number]
        if rule.elements.contained is None or not rule.elements.contained_is_evaluated:
            return False
        if self.open is None or self.open[0] != key:
            account = self.account
            return key in account.hits.get(number, ()) or key in account.perhaps.get(number, ())
        _, member, vector = self.open
        return not any(n == number and isinstance(vector[slot], str) for n, slot in member.held)

    def _member(self, key: Key) -> Member:
        return self.names[key] if isinstance(key, str) else self.table.place.item(key)

    def _record(
        self,
        key: Key,
        member: Member,
        vector: Vector,
        *,
        is_whole: bool,
        is_judged: bool = True,
    ) -> None:
        """Record the verdicts ``vector`` on the value of a member or item. is_whole: the value is
        complete; is_judged: also update the verdicts on the object or array itself."""
        self.open = None if is_whole else (key, member, vector)
        account = self.account
        for number, keyword, slot in member.wires:
            verdict = vector[slot]
            if isinstance(verdict, str):
                account = account.with_failed(
                    ((number, keyword if verdict == "false" else verdict),)
                )
            elif is_whole and verdict is None:
                account = account.with_unsure(number)
        for number, slot in member.left:
            if isinstance(vector[slot], str):
                account = account.with_left(number, key)
            elif is_whole and vector[slot] is None:
                account = account.with_unsure(number)
        for number, slot in member.held if is_whole else ():
            account = account.with_held(number, key, vector[slot])
        self.account = account
        if is_judged:
            self.table.judge(self)


def with_news(frame: ValueFrame) -> ValueFrame:
    """Pass the verdicts on a new frame to the frames around it, up to the first where they change
    nothing. Returns ``frame``."""
    child = frame
    while (parent := child.parent) is not None and parent.open is not None:
        vector = child.vector
        if vector == parent.open[2]:
            break
        child.parent = child = parent.opened(vector)
    return frame


def verdicts_on(place: Place, value: Exact) -> Vector:
    """Return the verdicts of a place's root rules on a complete value."""
    table = place.table(kind_of(value))
    if table.kind not in ("object", "array"):
        return place.on_scalar(value)
    frame = ValueFrame(table, None)
    for part in value[1]:
        if table.kind == "object":
            name, part = part
            frame = frame.named(name)
        else:
            frame = frame.at_item()
        frame = frame.filled(verdicts_on(frame.open_place, part), part)
    return frame.closed().vector
