"""Objects and arrays that are being written, each within the one that holds it.

A frame never changes once it is part of a state: every step makes a new one, so that a state is
copied by a reference to its innermost frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.structured.checked.demands import UNKNOWN, Verdict
from engine.structured.checked.exact import Exact, array_of, kind_of, object_of
from engine.structured.checked.places import Member, Place, Table, Vector

UNSEEN = object()  # it was not looked at what may be named next
Key = str | int  # the name of a property, or the index of an item


class Account:
    """What is known of the members or items that are written, by the number of a rule."""

    __slots__ = ("failed", "hits", "left", "perhaps", "unsure")

    def __init__(self) -> None:
        self.failed: dict[int, str] = {}  # the keyword by which one is wrong
        self.left: dict[int, tuple[Key, ...]] = {}  # wrong unless another rule speaks of them
        self.hits: dict[int, frozenset[Key]] = {}  # what ``contains`` is looking for
        self.perhaps: dict[int, frozenset[Key]] = {}  # of which that is not known
        self.unsure: frozenset[int] = frozenset()  # one of them may be wrong

    def _copy(self) -> Account:
        other = Account()
        for name in Account.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def with_failed(self, failed: Sequence[tuple[int, str]]) -> Account:
        """With rules that a member or an item breaks, and the keyword; the first one counts."""
        other = self._copy()
        other.failed = {**dict(failed), **self.failed}
        return other

    def with_unsure(self, number: int) -> Account:
        other = self._copy()
        other.unsure = self.unsure | {number}
        return other

    def with_left(self, number: int, key: Key) -> Account:
        found = self.left.get(number, ())
        if key in found:
            return self
        other = self._copy()
        other.left = {**self.left, number: (*found, key)}
        return other

    def with_held(self, number: int, key: Key, verdict: Verdict) -> Account:
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


NOTHING = Account()


class Frame:
    """A value that others stand in, up to what is written of it."""

    __slots__ = (
        *("parent", "table", "verdicts", "account"),
        *("names", "count", "open", "is_over", "is_kept", "parts", "seen", "is_repeated"),
        *("missing", "last", "is_watched", "is_vague", "next_names"),
    )

    parent: Frame | None
    table: Table
    verdicts: list[Verdict]
    account: Account
    names: dict[str, Member]
    count: int
    open: tuple[Key, Member, Vector] | None
    is_over: bool
    is_kept: bool
    parts: Any
    seen: frozenset[Exact]
    is_repeated: bool
    missing: list[str | None]
    last: str | None
    is_watched: bool
    is_vague: bool
    next_names: Any

    @classmethod
    def begun(cls, table: Table, parent: Frame | None) -> Frame:
        """An object or an array of which nothing is written."""
        self = cls()
        self.table, self.parent = table, parent
        self.verdicts = table.start.copy()
        self.account, self.names, self.seen = NOTHING, {}, frozenset()
        self.count = 0
        self.open = self.parts = self.last = None
        self.is_over = self.is_repeated = False
        self.is_kept = table.keeps or (parent is not None and parent.keeps_values)
        self.is_watched = table.is_watchful or (
            parent is not None and (parent.keeps_values or parent.is_watched)
        )
        self.is_vague = False
        self.missing = []
        self.next_names = UNSEEN
        table.judge(self)
        return self

    @property
    def keeps_values(self) -> bool:
        """Whether the values in it are compared with others."""
        return self.is_kept or self.table.is_unique

    @property
    def vector(self) -> Vector:
        """The verdicts that whoever holds it waits for."""
        verdicts = self.verdicts
        return tuple([verdicts[number] for number in self.table.place.ends])

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

    def copy(self) -> Frame:
        """One that may be changed, its lists of verdicts too."""
        other = Frame()
        for name in Frame.__slots__:
            setattr(other, name, getattr(self, name))
        other.verdicts = self.verdicts.copy()
        other.missing = []
        other.next_names = UNSEEN
        return other

    def named(self, name: str, member: Member | None = None) -> Frame:
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

    def at_item(self) -> Frame:
        """With an item that begins."""
        other, member = self.copy(), self.table.place.item(self.count)
        other.count += 1
        other._note(self.count, member, member.place.start, is_whole=False)
        return other

    def opened(self, vector: Vector) -> Frame:
        """With news of the value that is being written in it."""
        assert self.open is not None, "a value is being written"
        other = self.copy()
        other._note(self.open[0], self.open[1], vector, is_whole=False)
        return other

    def filled(self, vector: Vector, value: Exact) -> Frame:
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

    def closed(self) -> Frame:
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

    def _note(self, key: Key, member: Member, vector: Vector, *, is_whole: bool) -> None:
        """What the value of a member or an item says of this one."""
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
        self.table.judge(self)


def with_news(frame: Frame) -> Frame:
    """The frame within frames that know how it stands."""
    parent = frame.parent
    if parent is None or parent.open is None:
        return frame
    vector = frame.vector
    if vector == parent.open[2]:
        return frame
    other = frame.copy()
    other.parent = with_news(parent.opened(vector))
    return other


def verdicts_on(place: Place, value: Exact) -> Vector:
    """The verdicts of a place's roots on a whole value."""
    table = place.table(kind_of(value))
    if table.kind not in ("object", "array"):
        return place.on_scalar(value)
    frame = Frame.begun(table, None)
    for part in value[1]:
        if table.kind == "object":
            name, part = part
            frame = frame.named(name)
        else:
            frame = frame.at_item()
        assert frame.open is not None, "a value follows"
        frame = frame.filled(verdicts_on(frame.open[1].place, part), part)
    return frame.closed().vector
