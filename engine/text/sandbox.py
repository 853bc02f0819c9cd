"""Jinja's sandbox with limits on time and size, for untrusted templates and conversations.

Every iteration of a loop and every call of a macro checks the clock. A value larger than any prompt
is refused before it is created.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from functools import partial
from itertools import count
from typing import Any

from jinja2 import TemplateError, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 5.0
MAX_CHARS = 1 << 26  # in a text
MAX_ENTRIES = 1 << 22  # in a list
MAX_NUMBER = 1 << 20  # as an argument of a function, for example a width
MAX_BITS = 1 << 14  # of an integer
TICKS = 256  # iterations between two checks of the clock
# Names that no template can use: one variable and two filters.
BUDGET, BOUNDED, TICK = " budget", " bounded", " tick"
WIDE = re.compile(r"%[-+ #0]*[\d.]*(?:\d{7}|\*)|:[^{}]*\d{7}")  # a format with a large width
NESTED_WIDTH = re.compile(r":[^{}]*\{")  # a format whose width comes from another value
SIZED = (
    "batch", "center", "indent", "pprint", "round", "slice", "tojson", "truncate", "wordwrap",
)  # fmt: skip
"""Filters whose numeric arguments are widths."""


class Budget:
    """The time left for one rendering."""

    def __init__(self, seconds: float = MAX_SECONDS) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds
        self._ticks = count(1)

    def tick(self) -> None:
        """Raise ``TemplateError`` if no time is left. Reads the clock only in some calls."""
        if next(self._ticks) % TICKS == 0 and time.monotonic() > self._end:
            raise TemplateError(f"it runs longer than {self._seconds:g} s, the limit")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates are rendered with a ``Budget`` among their variables."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.concat = bounded_join  # type: ignore[method-assign]
        del self.globals["lipsum"]
        for name, each in self.filters.items():
            self.filters[name] = bounded_filter(each, is_sized=name in SIZED)
        self.filters.update(replace=bounded_replace, join=pass_context(_filter_join))
        self.filters.update({BOUNDED: bounded, TICK: pass_context(_tick)})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = Ticking().visit(super()._parse(source, name, filename))
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            check_format(left)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_size(left.bit_length() * right, MAX_BITS)
        elif operator == "*":
            _check_product(left, right)
        return bounded(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            check_numbers((*args, *kwargs.values()))
            if name == "replace":
                return bounded_replace(owner, *args)
            if name == "join":
                return bounded_join(_between(owner, args[0]))
        call = super().call
        return bounded(call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Any:
        inner = super().wrap_str_format(value)
        return None if inner is None else partial(_format, value.__self__, inner)


class Ticking(NodeTransformer):
    """Adds a clock check to every loop and macro, and a size check to every sum and ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, BOUNDED)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        """Make a sum of several terms check its size once, not after each term."""
        last = node
        while isinstance(last.left, nodes.Add):
            last.right = self.visit(last.right)
            last = last.left
        self.generic_visit(last)
        return _filtered(node, BOUNDED)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = _filtered(nodes.Const(None, lineno=node.lineno), TICK)
        node.body = [nodes.ExprStmt(tick, lineno=node.lineno), *node.body]
        return node  # type: ignore[no-any-return]


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tick(context: Context, value: Any) -> Any:
    context[BUDGET].tick()
    return value


def check_size(size: int, most: int = MAX_CHARS) -> None:
    if size > most:
        raise TemplateError(f"it makes a value of size {size:.3g}, the limit is {most}")


def bounded(value: Any) -> Any:
    """Return the value. Raises ``TemplateError`` if it is too large."""
    if type(value) is str and len(value) < MAX_CHARS:  # the usual case
        return value
    if isinstance(value, str):
        check_size(len(value))
    elif isinstance(value, list | tuple):
        check_size(len(value), MAX_ENTRIES)
    elif isinstance(value, int):
        check_size(value.bit_length(), MAX_BITS)
    return value


def check_numbers(values: Iterable[Any]) -> None:
    """Raise ``TemplateError`` if an integer among a function's arguments is too large."""
    for value in values:
        if isinstance(value, int):
            check_size(abs(value), MAX_NUMBER)


def check_format(layout: Any, values: Iterable[Any] = ()) -> None:
    """Raise ``TemplateError`` if a width in a format or in its arguments ``values`` is large."""
    if not isinstance(layout, str):
        return
    if WIDE.search(layout):
        raise TemplateError(f"it has a format wider than {MAX_NUMBER}, the limit")
    if NESTED_WIDTH.search(layout):
        check_numbers(values)


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int):
            if isinstance(other, int):
                check_size(one.bit_length() + other.bit_length(), MAX_BITS)
            elif isinstance(other, str):
                check_size(one * len(other))
            elif isinstance(other, list | tuple):
                check_size(one * len(other), MAX_ENTRIES)


def bounded_join(pieces: Iterable[str]) -> str:
    """Join the pieces. Raises ``TemplateError`` if the result is too large."""
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        check_size(size)
        kept.append(piece)
    return "".join(kept)


def bounded_replace(text: Any, old: Any, new: Any, num: int | None = None) -> str:
    """Like ``str.replace``. Raises ``TemplateError`` if the result is too large."""
    whole, before, after = str(text), str(old), str(new)
    num = -1 if num is None else num
    times = whole.count(before) if num < 0 else min(num, whole.count(before))
    check_size(len(whole) + times * (len(after) - len(before)))
    return whole.replace(before, after, num)


def bounded_filter(function: Any, *, is_sized: bool) -> Any:
    """Make a filter refuse large results and, with ``is_sized``, large numbers among arguments."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if is_sized:
            check_numbers((*args[1:], *kwargs.values()))
        return bounded(function(*args, **kwargs))

    kind = getattr(function, "jinja_pass_arg", None)  # the first argument that Jinja adds
    if kind is not None:
        checked.jinja_pass_arg = kind  # type: ignore[attr-defined]
    return checked


def _filter_join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = [context.environment.getitem(each, attribute) for each in value]
    return bounded_join(_between(str(d), value))


def _between(separator: str, values: Iterable[Any]) -> Iterable[str]:
    for place, value in enumerate(values):
        if place and separator:
            yield separator
        yield str(value)


def _format(layout: str, inner: Any, *args: Any, **kwargs: Any) -> str:
    check_format(layout, (*args, *kwargs.values()))
    return str(inner(*args, **kwargs))
