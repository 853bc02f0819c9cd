"""Makes functions ("judges") that check a value by one rule of its schema while it is written.

A judge takes the value's state, a ``ValueFrame`` or a ``Scalar``, and returns a verdict. The state
has the ``verdicts`` of the rules that were judged before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.structured.checked.exact import is_whole
from engine.structured.checked.rules import Rule

Verdict = bool | str | None
Judge = Callable[[Any], Verdict]  # judges one demand on a value that is being written
UNKNOWN, OTHER = ("unknown",), ("other",)
"""Scalars of which nothing is known, or only that no schema lists them."""
UNREAD = (UNKNOWN, OTHER)
Numbers = dict[Rule, int]  # the index of each rule of a place


def demands_of(rule: Rule, numbers: Numbers, kind: str) -> tuple[Judge, ...]:
    """Make the functions that check values of type ``kind`` by one rule, the cheap ones first."""
    found: list[Judge] = []
    if kind in _OF_KIND:
        found += _OF_KIND[kind](rule, numbers)
    if rule.values is not None:
        found.append(_is_one_of(rule))
    found += _of_parts(rule, numbers)
    return tuple(found)


def _is_one_of(rule: Rule) -> Judge:
    values = rule.values or {}

    def judge(frame: Any) -> Verdict:
        if not frame.is_over or frame.is_vague:
            return None
        return frame.exact in values or "enum"

    return judge


# -- schemas for the same value


def _of_parts(rule: Rule, at: Numbers) -> Iterator[Judge]:
    for each in rule.all_of:
        yield _same_as(at[each])
    for group in rule.any_of:
        yield _any_of([at[each] for each in group])
    for group in rule.one_of:
        yield _one_of([at[each] for each in group])
    if rule.negated is not None:
        yield _negated(at[rule.negated])
    if rule.condition is not None:
        ways = (rule.consequence, rule.alternative)
        yield _conditional(at[rule.condition], *(None if e is None else at[e] for e in ways))


def _same_as(number: int) -> Judge:
    return lambda frame: frame.verdicts[number]


def _any_of(numbers: Sequence[int]) -> Judge:
    def judge(frame: Any) -> Verdict:
        found: Verdict = "anyOf"
        for number in numbers:
            verdict = frame.verdicts[number]
            if verdict is True:
                return True
            if verdict is None:
                found = None
        return found

    return judge


def _one_of(numbers: Sequence[int]) -> Judge:
    def judge(frame: Any) -> Verdict:
        num_true = num_open = 0
        for number in numbers:
            verdict = frame.verdicts[number]
            num_true += verdict is True
            num_open += verdict is None
        if num_true > 1 or num_true + num_open == 0:
            return "oneOf"
        return None if num_open else True

    return judge


def _negated(number: int) -> Judge:
    def judge(frame: Any) -> Verdict:
        verdict = frame.verdicts[number]
        return None if verdict is None else "not" if verdict is True else True

    return judge


def _conditional(condition: int, positive: int | None, negative: int | None) -> Judge:
    def judge(frame: Any) -> Verdict:
        verdicts = frame.verdicts
        verdict = verdicts[condition]
        then = True if positive is None else verdicts[positive]
        otherwise = True if negative is None else verdicts[negative]
        if verdict is not None:
            return then if verdict is True else otherwise
        if then is True and otherwise is True:
            return True
        both_fail = isinstance(then, str) and isinstance(otherwise, str)
        return then if both_fail else None

    return judge


# -- scalars


def _of_text(rule: Rule, numbers: Numbers) -> Iterator[Judge]:
    for keyword, holds in rule.texts:
        yield _check_whole(keyword, holds)
    if rule.few_texts is not None:
        yield _is_in(rule.few_texts, "pattern")


def _of_number(rule: Rule, numbers: Numbers) -> Iterator[Judge]:
    if rule.types is not None and "number" not in rule.types:
        yield _check_whole("type", is_whole)
    for keyword, holds in rule.numbers:
        yield _check_whole(keyword, holds)
    if rule.domain is not None:
        yield _is_in(rule.domain, "maximum")


def _is_in(domain: range | dict[str, None], keyword: str) -> Judge:
    def judge(frame: Any) -> Verdict:
        if frame.exact is UNKNOWN:
            return None
        return (frame.exact is not OTHER and frame.exact in domain) or keyword

    return judge


def _check_whole(keyword: str, holds: Callable[[Any], bool]) -> Judge:
    return lambda frame: None if frame.exact in UNREAD else holds(frame.exact) or keyword


# -- objects


def _of_object(rule: Rule, numbers: Numbers) -> Iterator[Judge]:
    if rule.members.required:
        yield _required(rule.members.required)
    if rule.members.least:
        yield _least_properties(rule.members.least)
    if rule.members.most is not None:
        yield _most_properties(rule.members.most)
    if names_members(rule) or rule.members.names is not None:
        yield _members(numbers[rule], _early_names(rule))
    for name, others in rule.members.dependent_names:
        yield _dependent_names(name, others)
    for name, each in rule.dependents:
        yield _dependent(name, numbers[each])
    if rule.members.unevaluated is not None:
        yield _unevaluated(rule, numbers, "unevaluatedProperties")


def _required(names: tuple[str, ...]) -> Judge:
    def judge(frame: Any) -> Verdict:
        missing = (name for name in names if name not in frame.names)
        if (first := next(missing, None)) is None:
            return True
        if not frame.is_over:
            return None
        frame.missing += [first, *missing]
        return "required"

    return judge


def _least_properties(least: int) -> Judge:
    def judge(frame: Any) -> Verdict:
        if len(frame.names) >= least:
            return True
        if not frame.is_over:
            return None
        frame.missing.append(None)
        return "minProperties"

    return judge


def _most_properties(most: int) -> Judge:
    def judge(frame: Any) -> Verdict:
        if len(frame.names) > most:
            return "maxProperties"
        return True if frame.is_over else None

    return judge


def _early_names(rule: Rule) -> tuple[str, ...] | None:
    """Return the names of the only properties whose values the rule limits; ``None``: it may limit
    any property."""
    others = (rule.members.additional, rule.members.names, rule.members.unevaluated)
    is_open = rule.members.patterns or any(each is not None for each in others)
    return None if is_open else tuple(rule.members.properties)


def _members(number: int, names: tuple[str, ...] | None) -> Judge:
    """Make a function that judges an object or array by its members. number: index of the rule;
    names: the only properties that the rule limits (``None``: it may limit any)."""

    def judge(frame: Any) -> Verdict:
        if (keyword := frame.account.failed.get(number)) is not None:
            return str(keyword)
        if number in frame.account.unsure:
            return None
        if frame.is_over:
            return True
        if names is None or frame.open is not None:
            return None
        return all(name in frame.names for name in names) or None

    return judge


def _dependent_names(name: str, others: tuple[str, ...]) -> Judge:
    def judge(frame: Any) -> Verdict:
        if name not in frame.names:
            return frame.is_over or all(each in frame.names for each in others) or None
        for each in others:
            if each not in frame.names:
                if not frame.is_over:
                    return None
                frame.missing.append(each)
                return "dependentRequired"
        return True

    return judge


def _dependent(name: str, number: int) -> Judge:
    def judge(frame: Any) -> Verdict:
        verdict: Verdict = frame.verdicts[number]
        if name in frame.names or verdict is True:
            return verdict
        return True if frame.is_over else None

    return judge


# -- arrays


def _of_array(rule: Rule, numbers: Numbers) -> Iterator[Judge]:
    if rule.elements.least:
        yield _least_items(rule.elements.least)
    if rule.elements.most is not None:
        yield _most_items(rule.elements.most)
    if rule.elements.prefix or rule.elements.items is not None:
        yield _members(numbers[rule], None)
    if rule.elements.is_unique:
        yield _unique
    if rule.elements.contained is not None:
        yield _contains(rule, numbers[rule])
    if rule.elements.unevaluated is not None:
        yield _unevaluated(rule, numbers, "unevaluatedItems")


def _least_items(least: int) -> Judge:
    def judge(frame: Any) -> Verdict:
        if frame.count >= least:
            return True
        if not frame.is_over:
            return None
        frame.missing.append(least - frame.count)
        return "minItems"

    return judge


def _most_items(most: int) -> Judge:
    def judge(frame: Any) -> Verdict:
        if frame.count > most:
            return "maxItems"
        return True if frame.is_over else None

    return judge


def _unique(frame: Any) -> Verdict:
    if frame.is_repeated:
        return "uniqueItems"
    return True if frame.is_over else None


def _contains(rule: Rule, number: int) -> Judge:
    least, most, room = (
        rule.elements.least_contained,
        rule.elements.most_contained,
        rule.elements.most,
    )

    def judge(frame: Any) -> Verdict:
        hits = len(frame.account.hits.get(number, ()))
        if most is not None and hits > most:
            return "maxContains"
        unsure = number in frame.account.perhaps
        if hits < least and not unsure:
            is_full = room is not None and frame.open is None and room - frame.count < least - hits
            return "contains" if frame.is_over or is_full else None
        if unsure and (hits < least or most is not None):
            return None
        return True if frame.is_over or most is None else None

    return judge


# -- what other rules have evaluated


def _unevaluated(rule: Rule, numbers: Numbers, keyword: str) -> Judge:
    """Make a function that fails if a member or item is invalid by the schema of ``keyword`` (such
    as ``unevaluatedItems``) and is not evaluated by another part of the rule."""
    number = numbers[rule]

    def judge(frame: Any) -> Verdict:
        for key in frame.account.left.get(number, ()):
            if not _is_evaluated(rule, numbers, key, frame):
                return keyword
        if number in frame.account.unsure:
            return None
        return True if frame.is_over else None

    return judge


def _is_evaluated(rule: Rule, numbers: Numbers, key: Any, frame: Any) -> bool:
    """Whether another part of the rule evaluates this member or item; failed parts do not count."""
    if frame.may_contain(numbers[rule], key):
        return True
    waiting = _contributing(rule, numbers, frame)
    while waiting:
        other = waiting.pop()
        if isinstance(frame.verdicts[numbers[other]], str):
            continue
        if frame.is_evaluated_by(numbers[other], key):
            return True
        waiting += _contributing(other, numbers, frame)
    return False


def _contributing(rule: Rule, numbers: Numbers, frame: Any) -> list[Rule]:
    found = [each for group in (rule.all_of, *rule.any_of, *rule.one_of) for each in group]
    found += [each for name, each in rule.dependents if name in frame.names]
    if rule.condition is not None:
        condition = frame.verdicts[numbers[rule.condition]]
        found.append(rule.condition)
        if rule.consequence is not None and not isinstance(condition, str):
            found.append(rule.consequence)
        if rule.alternative is not None and condition is not True:
            found.append(rule.alternative)
    return found


def names_members(rule: Rule) -> bool:
    """Whether a rule of the schema has subschemas for the properties of an object."""
    others = (rule.members.additional, rule.members.unevaluated)
    return bool(
        rule.members.properties or rule.members.patterns or any(each is not None for each in others)
    )


_OF_KIND: dict[str, Callable[[Rule, Numbers], Iterator[Judge]]] = {
    "string": _of_text,
    "number": _of_number,
    "object": _of_object,
    "array": _of_array,
}
