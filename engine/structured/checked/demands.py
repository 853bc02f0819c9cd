"""The demands of a rule, each as a function of the value that is being written.

It gets a frame (``frames``), or a ``Scalar``, whose ``verdicts`` has those of the rules before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.structured.checked.exact import is_whole
from engine.structured.checked.places import Part, Place, Verdict
from engine.structured.checked.rules import Rule


def demands_of(place: Place, number: int, kind: str) -> tuple[Part, ...]:
    """Those of one rule of the place on values of this kind, the cheaper ones first."""
    rule = place.rules[number]
    found: list[Part] = []
    if kind in _OF_KIND:
        found += _OF_KIND[kind](place, number, rule)
    if rule.values is not None:
        found.append(_is_one_of(rule))
    found += _of_parts(place, rule)
    return tuple(found)


def _is_one_of(rule: Rule) -> Part:
    values = rule.values or {}
    return lambda frame: None if not frame.is_over else frame.exact in values or "enum"


# -- schemas for the same value


def _of_parts(place: Place, rule: Rule) -> Iterator[Part]:
    at = place.numbers
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


def _same_as(number: int) -> Part:
    return lambda frame: frame.verdicts[number]


def _any_of(numbers: Sequence[int]) -> Part:
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


def _one_of(numbers: Sequence[int]) -> Part:
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


def _negated(number: int) -> Part:
    def judge(frame: Any) -> Verdict:
        verdict = frame.verdicts[number]
        return None if verdict is None else "not" if verdict is True else True

    return judge


def _conditional(condition: int, positive: int | None, negative: int | None) -> Part:
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


def _of_text(place: Place, number: int, rule: Rule) -> Iterator[Part]:
    for keyword, holds in rule.texts:
        yield _check_whole(keyword, holds)


def _of_number(place: Place, number: int, rule: Rule) -> Iterator[Part]:
    if rule.types is not None and "number" not in rule.types:
        yield _check_whole("type", is_whole)
    for keyword, holds in rule.numbers:
        yield _check_whole(keyword, holds)


def _check_whole(keyword: str, holds: Callable[[Any], bool]) -> Part:
    return lambda frame: None if not frame.is_over else holds(frame.exact) or keyword


# -- objects


def _of_object(place: Place, number: int, rule: Rule) -> Iterator[Part]:
    if rule.required:
        yield _required(rule.required)
    if rule.least_properties:
        yield _least_properties(rule.least_properties)
    if rule.most_properties is not None:
        yield _most_properties(rule.most_properties)
    if number in place.named or rule.names is not None:
        yield _members(number, _early_names(rule))
    for name, others in rule.dependent_names:
        yield _dependent_names(name, others)
    for name, each in rule.dependents:
        yield _dependent(name, place.numbers[each])
    if rule.unevaluated_properties is not None:
        yield _unevaluated(place, number, "unevaluatedProperties")


def _required(names: tuple[str, ...]) -> Part:
    def judge(frame: Any) -> Verdict:
        for name in names:
            if name not in frame.names:
                if not frame.is_over:
                    return None
                frame.missing.append(name)
                return "required"
        return True

    return judge


def _least_properties(least: int) -> Part:
    def judge(frame: Any) -> Verdict:
        if len(frame.names) >= least:
            return True
        if not frame.is_over:
            return None
        frame.missing.append(None)
        return "minProperties"

    return judge


def _most_properties(most: int) -> Part:
    def judge(frame: Any) -> Verdict:
        if len(frame.names) > most:
            return "maxProperties"
        return True if frame.is_over else None

    return judge


def _early_names(rule: Rule) -> tuple[str, ...] | None:
    """The names whose values decide about all members; ``None`` if any name may."""
    others = (rule.additional, rule.names, rule.unevaluated_properties)
    is_open = rule.patterns or any(each is not None for each in others)
    return None if is_open else tuple(rule.properties)


def _members(number: int, names: tuple[str, ...] | None) -> Part:
    """What is known of the values of members or items: did one fail? names: that decide alone."""

    def judge(frame: Any) -> Verdict:
        if (keyword := frame.failed.get(number)) is not None:
            return keyword
        if number in frame.unsure:
            return None
        if frame.is_over:
            return True
        if names is None or frame.open is not None:
            return None
        return all(name in frame.names for name in names) or None

    return judge


def _dependent_names(name: str, others: tuple[str, ...]) -> Part:
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


def _dependent(name: str, number: int) -> Part:
    def judge(frame: Any) -> Verdict:
        verdict: Verdict = frame.verdicts[number]
        if name in frame.names or verdict is True:
            return verdict
        return True if frame.is_over else None

    return judge


# -- arrays


def _of_array(place: Place, number: int, rule: Rule) -> Iterator[Part]:
    if rule.least_items:
        yield _least_items(rule.least_items)
    if rule.most_items is not None:
        yield _most_items(rule.most_items)
    if rule.prefix or rule.items is not None:
        yield _members(number, None)
    if rule.is_unique:
        yield _unique
    if rule.contained is not None:
        yield _contains(number, rule)
    if rule.unevaluated_items is not None:
        yield _unevaluated(place, number, "unevaluatedItems")


def _least_items(least: int) -> Part:
    def judge(frame: Any) -> Verdict:
        if frame.count >= least:
            return True
        return "minItems" if frame.is_over else None

    return judge


def _most_items(most: int) -> Part:
    def judge(frame: Any) -> Verdict:
        if frame.count > most:
            return "maxItems"
        return True if frame.is_over else None

    return judge


def _unique(frame: Any) -> Verdict:
    if frame.is_repeated:
        return "uniqueItems"
    return True if frame.is_over else None


def _contains(number: int, rule: Rule) -> Part:
    least, most, room = rule.least_contained, rule.most_contained, rule.most_items

    def judge(frame: Any) -> Verdict:
        hits = len(frame.hits.get(number, ()))
        if most is not None and hits > most:
            return "maxContains"
        unsure = frame.num_unsure.get(number, 0)
        if hits < least and not unsure:
            is_full = room is not None and frame.open is None and room - frame.count < least - hits
            return "contains" if frame.is_over or is_full else None
        if unsure and (hits < least or most is not None):
            return None
        return True if frame.is_over or most is None else None

    return judge


# -- what other rules have evaluated


def _unevaluated(place: Place, number: int, keyword: str) -> Part:
    """Members and items that fail, unless a rule that holds has evaluated them."""

    def judge(frame: Any) -> Verdict:
        for key in frame.left.get(number, ()):
            if not _is_evaluated(place, number, key, frame):
                return keyword
        if number in frame.unsure:
            return None
        return True if frame.is_over else None

    return judge


def _is_evaluated(place: Place, number: int, key: Any, frame: Any) -> bool:
    """Whether a rule or a part of it that may hold speaks of that member or item."""
    waiting = _contributing(place, number, frame)
    while waiting:
        other = waiting.pop()
        if isinstance(frame.verdicts[other], str):
            continue
        if frame.is_evaluated_by(other, key):
            return True
        waiting += _contributing(place, other, frame)
    return key in frame.hits.get(number, ()) and place.rules[number].contained_is_evaluated


def _contributing(place: Place, number: int, frame: Any) -> list[int]:
    rule, at = place.rules[number], place.numbers
    groups = [rule.all_of, *rule.any_of, *rule.one_of]
    groups.append([each for name, each in rule.dependents if name in getattr(frame, "names", ())])
    found = [at[each] for group in groups for each in group]
    if rule.condition is not None:
        condition = frame.verdicts[at[rule.condition]]
        found.append(at[rule.condition])
        if rule.consequence is not None and not isinstance(condition, str):
            found.append(at[rule.consequence])
        if rule.alternative is not None and condition is not True:
            found.append(at[rule.alternative])
    return found


_OF_KIND: dict[str, Callable[[Place, int, Rule], Iterator[Part]]] = {
    "string": _of_text,
    "number": _of_number,
    "object": _of_object,
    "array": _of_array,
}
