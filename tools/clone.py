"""Copies a whole scheduler, so that one state can be left in several ways."""

from __future__ import annotations

import types
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from random import Random
from typing import Any

import msgspec
import numpy as np

from engine.config.sched import SchedulerConfig
from engine.sched.table import Column, FloatColumn, Table

# Nobody writes into these once they are made.
SHARED = (
    *(str, bytes, int, float, type(None), Enum, type, Random),
    *(types.FunctionType, types.ModuleType),
    *(msgspec.Struct, SchedulerConfig),
)
Memo = dict[int, Any]


def clone(value: Any) -> Any:
    """A copy of everything that can change; what is frozen is shared."""
    return _clone(value, {})


def _clone(value: Any, memo: Memo) -> Any:
    cls = value.__class__
    make = _MAKERS.get(cls)
    if make is None:
        make = _MAKERS[cls] = _maker(cls)
    if make is _share:
        return value
    known = memo.get(id(value))
    return known if known is not None else make(value, memo)


def _share(value: Any, memo: Memo) -> Any:
    return value


def _are_shared(values: Iterable[Any]) -> bool:
    """All of them, as most lists and columns are full of numbers."""
    return all(_MAKERS.get(cls) is _share for cls in set(map(type, values)))


def _list(value: Any, memo: Memo) -> Any:
    made = memo[id(value)] = value.__class__()
    made.extend(value if _are_shared(value) else [_clone(inner, memo) for inner in value])
    return made


def _deque(value: Any, memo: Memo) -> Any:
    made = memo[id(value)] = deque(maxlen=value.maxlen)
    made.extend([_clone(inner, memo) for inner in value])
    return made


def _tuple(value: Any, memo: Memo) -> Any:
    inner = [_clone(inner, memo) for inner in value]
    return value.__class__(*inner) if hasattr(value, "_fields") else tuple(inner)


def _dict(value: Any, memo: Memo) -> Any:
    made: dict[Any, Any] = {}
    if isinstance(value, defaultdict):
        made = defaultdict(value.default_factory)
    memo[id(value)] = made
    if _are_shared(value) and _are_shared(value.values()):
        made.update(value)
        return made
    for key, inner in value.items():
        made[_clone(key, memo)] = _clone(inner, memo)
    return made


def _set(value: Any, memo: Memo) -> Any:
    return value.__class__(_clone(inner, memo) for inner in value)


def _array(value: Any, memo: Memo) -> Any:
    made = memo[id(value)] = value[:] if isinstance(value, array) else value.copy()
    if isinstance(value, np.ndarray) and value.dtype == object:
        for index, inner in enumerate(value):
            made[index] = _clone(inner, memo)
    return made


def _column(value: Column, memo: Memo) -> Column:
    length = len(value.at)
    is_float = isinstance(value, FloatColumn)
    made = FloatColumn(length, value.default) if is_float else type(value)(length)
    memo[id(value)] = made
    made._attach(value.at[:])
    return made


def _table(value: Table, memo: Memo) -> Table:
    made: Table = _object(value, memo)
    made.bind()  # a function that writes into the columns of the first
    return made


def _method(value: Any, memo: Memo) -> Any:
    return getattr(_clone(value.__self__, memo), value.__name__)


def _object(value: Any, memo: Memo) -> Any:
    made = memo[id(value)] = object.__new__(value.__class__)
    for name in _slots(value.__class__):
        inner = getattr(value, name, _UNSET)
        if inner is not _UNSET:
            object.__setattr__(made, name, _clone(inner, memo))
    for name, inner in getattr(value, "__dict__", {}).items():
        made.__dict__[name] = _clone(inner, memo)
    return made


@cache
def _slots(cls: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _maker(cls: type) -> Callable[[Any, Memo], Any]:
    """How objects of this class are copied."""
    if issubclass(cls, SHARED):
        return _share
    for base, make in _BY_BASE:
        if issubclass(cls, base):
            return make
    return _object


_BY_BASE: tuple[tuple[Any, Callable[[Any, Memo], Any]], ...] = (
    (Column, _column),
    (Table, _table),
    (deque, _deque),
    (list, _list),
    (tuple, _tuple),
    (dict, _dict),
    ((set, frozenset), _set),
    ((array, np.ndarray), _array),
    ((types.MethodType, types.BuiltinMethodType), _method),
)
_UNSET = object()  # a slot that has no value yet
_MAKERS: dict[type, Callable[[Any, Memo], Any]] = {}
