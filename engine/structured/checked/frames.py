"""Objects and arrays that are being written, each within the one that holds it.

A frame never changes once it is part of a state: every step makes a new one, so that a state is
copied by a reference to its innermost frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.structured.checked.demands import UNKNOWN, Verdict
from engine.structured.checked.exact import Exact, array_of, kind_of, object_of
from engine.structured.checked.places import Member, Place, PlaceTable, Vector

MOST_COMPARED = 64  # names or items
MOST_NESTED = 8  # values within each other that are compared, or looked at
UNSEEN = object()  # it was not looked at what may be named next
Key = str | int  # the name of a property, or the index of an item


class MemberAccount:
    """What is known of the members or items that are written, by the number of a rule."""

    __slots__ = ("failed", "hits", "left", "perhaps", "unsure")

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}  # the keyword by which one is wrong
        self.left: dict[int, tuple[Key, ...]] = {}  # wrong unless another rule speaks of them
        self.hits: dict[int, frozenset[Key]] = {}  # what ``contains`` is looking for
        self.perhaps: dict[int, frozenset[Key]] = {}  # of which that is not known
        self.unsure: frozenset[int] = frozenset()  # one of them may be wrong

    def _copy(self) -> MemberAccount:
        other = MemberAccount.__new__(MemberAccount)
        other.failed, other.hits, other.left = self.failed, self.hits, self.left
        other.perhaps, other.unsure = self.perhaps, self.unsure
        return other

    def with_failed(self, failed: Sequence[tuple[int, str]]) -> MemberAccount:
        """With rules that a member or an item breaks, and the keyword; the first one counts."""
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
        """verdict: whether the item is what ``contains`` is looking for."""
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
    """A value that others stand in, up to what is written of it."""

    __slots__ = (
        *("parent", "table", "verdicts", "account"),
        *("names", "count", "open", "is_over", "is_kept", "parts", "seen", "is_repeated"),
        *("missing", "last", "is_compared", "is_watched", "is_vague", "next_names", "learned"),
    )

    parent: ValueFrame | None
    table: PlaceTable
    verdicts: list[Verdict]
    account: MemberAccount
    names: dict[str, Member]
    count: int
    open: tuple[Key, Member, Vector] | None
    is_over: bool
    is_kept: bool
    parts: Any
    seen: frozenset[Exact]
    is_repeated: bool
    missing: list[str | int | None]
    last: str | None
    is_compared: bool
    is_watched: bool
    is_vague: bool
    next_names: Any
    learned: dict[Any, Any]

    @classmethod
    def begun(cls, table: PlaceTable, parent: ValueFrame | None) -> ValueFrame:
        """An object or an array of which nothing is written."""
        self = cls()
        self.table, self.parent = table, parent
        self.verdicts = table.start.copy()
        self.account, self.names, self.seen = NOTHING, {}, frozenset()
        self.count = 0
        self.open = self.parts = self.last = None
        self.is_over = self.is_repeated = False
        self.is_kept = table.keeps or (parent is not None and parent.keeps_values)
        is_within = parent is not None and parent.compares
        self.is_compared = table.keeps or (is_within and not table.place.is_endless)
        is_watched = parent is not None and parent.is_watched and not table.place.is_must
        self.is_watched = table.is_watchful or self.is_compared or is_watched
        self.is_vague = False
        self.missing = []
        self.next_names, self.learned = UNSEEN, {}
        table.judge(self)
        return self

    @property
    def keeps_values(self) -> bool:
        """Whether the values in it are compared with others."""
        return self.is_kept or self.table.is_unique

    @property
    def compares(self) -> bool:
        """Whether what may follow depends on which values it has, and not on their verdicts
        alone."""
        return self.is_compared or self.table.is_unique

    @property
    def vector(self) -> Vector:
        """The verdicts that whoever holds it waits for."""
        verdicts = self.verdicts
        return tuple([verdicts[number] for number in self.table.place.ends])

    @property
    def standing(self) -> Any:
        """All that decides about how it may go on; equal ones go on alike. ``None`` if that depends
        on too much to be compared."""
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
        """The whole value, of one that is kept; equal to no other if something of it is unknown."""
        if self.is_vague:
            return object()
        found, parts = [], self.parts
        while parts is not None:
            part, parts = parts
            found.append(part)
        found.reverse()
        return object_of(found) if self.table.kind == "object" else array_of(found)

    def copy(self) -> ValueFrame:
        """One that may be changed, its lists of verdicts too."""
        other = ValueFrame()
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
        """With a name whose value follows. member: what holds for it, if that is known."""
        other = self.copy()
        if member is None:
            member = self.table.place.property(name)
        other.names = {**self.names, name: member}
        other.last = name
        if member.failing:
            other.account = self.account.with_failed(member.failing)
        other._note(name, member, member.place.start, is_whole=False)
        return other

    def at_item(self) -> ValueFrame:
        """With an item that begins."""
        other, member = self.copy(), self.table.place.item(self.count)
        other.count += 1
        other._note(self.count, member, member.place.start, is_whole=False)
        return other

    def opened(self, vector: Vector) -> ValueFrame:
        """With news of the value that is being written in it."""
        assert self.open is not None, "a value is being written"
        other = self.copy()
        other._note(self.open[0], self.open[1], vector, is_whole=False)
        return other

    def filled(self, vector: Vector, value: Exact) -> ValueFrame:
        """With the value that was being written. value: if it is kept."""
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
        other._note(key, member, vector, is_whole=True)
        return other

    def with_members(self, names: Sequence[str]) -> ValueFrame:
        """A copy with members of which only the names are known."""
        other, place = self.copy(), self.table.place
        members = {name: place.property(name) for name in names}
        other.names, other.last, other.is_vague = {**self.names, **members}, names[-1], True
        for name, member in members.items():
            other.account = other.account.with_failed(member.failing)
            other._note(name, member, member.place.start, is_whole=True, is_judged=False)
        self.table.judge(other)
        return other

    def stretched(self, num_more: int) -> ValueFrame:
        """A copy with this many items of which nothing is known."""
        other, member = self.copy(), self.table.place.item(self.count)
        other.count += num_more - 1
        other._note(other.count, member, member.place.start, is_whole=True)
        other.count += 1
        other.is_vague = True
        return other

    def closed(self) -> ValueFrame:
        """With nothing after it."""
        other = self.copy()
        other.is_over = True
        self.table.judge(other)
        return other

    def is_evaluated_by(self, number: int, key: Key) -> bool:
        """Whether a rule of the value speaks of a member or an item in it."""
        return number in self._member(key).evaluators or self.may_contain(number, key)

    def may_contain(self, number: int, key: Key) -> bool:
        """Whether an item may be what a rule's ``contains`` is looking for, which counts as
        evaluated."""
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

    def _note(
        self,
        key: Key,
        member: Member,
        vector: Vector,
        *,
        is_whole: bool,
        is_judged: bool = True,
    ) -> None:
        """What the value of a member or an item says of this one. is_judged: it is all there is."""
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
    """A new frame, within frames that know how it stands."""
    child = frame
    while (parent := child.parent) is not None and parent.open is not None:
        vector = child.vector
        if vector == parent.open[2]:
            break
        child.parent = child = parent.opened(vector)
    return frame


def verdicts_on(place: Place, value: Exact) -> Vector:
    """The verdicts of a place's roots on a whole value."""
    table = place.table(kind_of(value))
    if table.kind not in ("object", "array"):
        return place.on_scalar(value)
    frame = ValueFrame.begun(table, None)
    for part in value[1]:
        if table.kind == "object":
            name, part = part
            frame = frame.named(name)
        else:
            frame = frame.at_item()
        assert frame.open is not None, "a value follows"
        frame = frame.filled(verdicts_on(frame.open[1].place, part), part)
    return frame.closed().vector
