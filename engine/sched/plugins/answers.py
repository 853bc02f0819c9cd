"""Checks of values returned by plug-in hooks. Each returns an error text, or ``None`` if valid."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from math import isfinite
from numbers import Integral, Real
from pathlib import Path

import numpy as np

from engine.errors import RankError
from engine.messages.requests import ERROR_CODES
from engine.messages.step import Masks
from engine.sched.policy import Admission, Defer, Limits, Refuse
from engine.sched.request import Request, Status
from engine.sched.resource import Fit, OnRefuse
from engine.sched.table import Array
from engine.sched.view import MOST_COUNTED, View

UNBOUNDED = 2**31 - 1
ALLOWED = Fit(0)[1:]  # the other fields of a Fit that refuses nothing


def shown(value: object) -> str:
    """Text of at most 80 characters that shows a plug-in's object in a message."""
    try:
        return f"{value!r:.80}"
    except Exception:  # its __repr__ may raise
        return f"an object of {type(value).__name__}"


def raised(error: Exception) -> str:
    """Describe an exception that a hook raised: its type, message and source line. The failure of a
    rank, which a hook meets when it looks for blocks outside the pool, is no fault of the hook and
    is raised again."""
    if isinstance(error, RankError):
        raise error
    try:
        return f"{type(error).__name__}: {error}{_line_of(error)}"
    except Exception:  # its __str__ may raise
        return type(error).__name__


def _line_of(error: Exception) -> str:
    """Find where an error occurred in the hook's own file, as text such as `` (mine.py:12)``."""
    frames = list(traceback.walk_tb(error.__traceback__))[1:]
    lines = [(frame.f_code.co_filename, line) for frame, line in frames]
    own = [line for file, line in lines if file == lines[0][0]]
    return f" ({Path(lines[0][0]).name}:{own[-1]})" if own else ""


def no_answer(answer: object) -> None:
    return None


def wrong_columns(columns: tuple[Array, ...], num_requests: int) -> str | None:
    for place, column in enumerate(columns):
        if column.shape != (num_requests,):
            return (
                f"returns an array of shape {column.shape} as part {place} of the ranks, must have "
                f"one number for each of {num_requests} requests"
            )
        if column.dtype.kind not in "biuf":
            return f"returns a {column.dtype} array as part {place} of the ranks, must hold numbers"
        if column.dtype.kind == "f" and np.isnan(column).any():
            return f"returns an array with a NaN as part {place} of the ranks"
    return None


def wrong_limits(answer: object) -> str | None:
    if not isinstance(answer, Limits):
        return f"returns {answer!r}, must be Limits"
    for bound in answer[:2]:
        if bound is not None and not (isinstance(bound, Integral) and int(bound) >= 0):
            return f"returns {answer!r}, whose limits must be integers of at least 0"
    if wrong_bool(answer.admission):
        return f"returns {answer!r}, whose admission must be True or False"
    return None


def wrong_masks(answer: object) -> str | None:
    if answer is None or isinstance(answer, Masks):
        return None
    return f"returns {shown(answer)}, must be Masks or None"


def wrong_iterable(answer: object) -> str | None:
    return None if isinstance(answer, Iterable) else f"returns {answer!r}, must be iterable"


def wrong_admission(answer: object) -> str | None:
    known = isinstance(answer, Admission)
    return None if known else f"returns {answer!r}, must be Admission.YES, .SKIP or .CLOSE"


def wrong_count(answer: object, most: int) -> str | None:
    if answer.__class__ is int and 0 <= answer <= most:
        return None
    if isinstance(answer, Real) and 0 <= float(answer) <= most:
        return None
    return f"returns {answer!r}, must be a number from 0 to {most}"


def wrong_bool(answer: object) -> str | None:
    known = isinstance(answer, Real | np.bool_) and answer in (0, 1)
    return None if known else f"returns {answer!r}, must be True or False"


def wrong_verdict(answer: object) -> str | None:
    if isinstance(answer, Defer) and not (
        isinstance(answer.until, Real) and isfinite(answer.until)
    ):
        return f"returns {answer!r}, must give a time in seconds"
    if answer is None or isinstance(answer, Refuse | Defer):
        return None
    return f"returns {answer!r}, must be None, Refuse or Defer"


# -- resources


def wrong_objection(answer: object) -> str | None:
    return None if isinstance(answer, str | None) else f"returns {answer!r}, must be None or a str"


def wrong_counters(answer: object) -> str | None:
    if isinstance(answer, dict) and all(
        isinstance(name, str) and isinstance(count, Integral) and abs(int(count)) <= MOST_COUNTED
        for name, count in answer.items()
    ):
        return None
    return f"returns {shown(answer)}, must be a dict from names to integers"


def wrong_extra(answer: object, most: int) -> str | None:
    if answer.__class__ is int and 0 <= answer <= most:
        return None
    if isinstance(answer, Integral) and 0 <= int(answer) <= most:
        return None
    return f"returns {answer!r}, must be an integer from 0 to {most}"


def wrong_fit(answer: object, most: int) -> str | None:
    if answer.__class__ is Fit and answer == (most, *ALLOWED):  # the usual case
        return None
    if not isinstance(answer, Fit):
        return f"returns {answer!r}, must be a Fit"
    counts = ((answer.num_tokens, most), (answer.room, UNBOUNDED))
    if not all(isinstance(n, Integral) and 0 <= int(n) <= limit for n, limit in counts):
        return f"returns {answer!r}, must allow 0 to {most} tokens and need room for at least 0"
    if not isinstance(answer.cause, str) or not isinstance(answer.on_refuse, OnRefuse | None):
        return f"returns {answer!r}, whose cause must be a str, its on_refuse an OnRefuse"
    if not isinstance(answer.code, str) or answer.code not in ERROR_CODES:
        return f"returns {answer!r}, whose code must be one of {', '.join(sorted(ERROR_CODES))}"
    return None


def as_sortable(column: Array) -> Array:
    """The column converted to int64 or float64."""
    return column.astype(np.float64 if column.dtype.kind == "f" else np.int64, copy=False)


def wrong_list(answer: object, num_requests: int) -> str | None:
    """Return an error text unless ``answer`` is a list with one entry per request. The entries are
    not checked."""
    if isinstance(answer, list) and len(answer) == num_requests:
        return None
    return (
        f"returns {shown(answer)}, must be arrays, or a list with one tuple for each of "
        f"{num_requests} requests"
    )


def wrong_victims(view: View, named: object) -> str | None:
    if not isinstance(named, list):
        return wrong_iterable(named)
    for req in named:
        if not (isinstance(req, Request) and view.knows(req)):
            return f"returns {req!r}, which is not an unfinished request"
        if req.status is not Status.RUNNING:
            return f"returns {req!r}, which is not running"
    return None


def wrong_next(view: View, req: object) -> str | None:
    if req is None:
        return None
    if not (isinstance(req, Request) and req.is_waiting and view.knows(req)):
        return f"returns {req!r}, which is not waiting"
    if req.considered == view.step.index:
        return f"returns {req!r}, which was already offered in this step"
    return None
