"""Makes command-line options from a dataclass: fields become flags, their docstrings the help."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import textwrap
import types
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache, partial
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from engine.config.option import EXAMPLE, SEVERAL, SHORT

T = TypeVar("T")

ANY_OBJECT = {"name": 8, "other": "text"}


def add_options(
    parser: argparse.ArgumentParser, options: type[Any], without: Sequence[str] = ()
) -> None:
    """Add one ``--flag`` per field of the dataclass ``options``, except those in ``without``.
    Flags that are not given are missing in the parsed result.

    Each dataclass that ``options`` inherits from makes a group, headed by its docstring."""
    for each in groups_of(options):
        group = parser.add_argument_group(summary(each))
        names = [option.name for option in fields(each) if option.name not in without]
        add_named_options(group, options, names)


def add_named_options(
    group: argparse._ArgumentGroup, options: type[Any], names: Iterable[str]
) -> None:
    """Add the flags of the fields ``names`` of the dataclass ``options``, in this order."""
    hints, docs = get_type_hints(options), field_docs(options)
    found = {option.name: option for option in fields(options)}
    for name in names:
        option, flag = found[name], "--" + name.replace("_", "-")
        kind = argument_kind(hints[name], option.metadata.get(EXAMPLE))
        if SEVERAL.items() <= option.metadata.items():
            kind |= {"action": "extend", "nargs": "+"}
        help_text = (docs.get(name, "") + _shown_default(option)).replace("%", "%%")
        flags = [flag, option.metadata[SHORT]] if SHORT in option.metadata else [flag]
        group.add_argument(*flags, default=argparse.SUPPRESS, help=help_text, **kind)


def read_options(parsed: argparse.Namespace, options: type[T]) -> T:
    """Make the dataclass ``options`` from the values given on the command line."""
    names = {option.name for option in fields(options)}  # type: ignore[arg-type]
    return options(**{name: value for name, value in vars(parsed).items() if name in names})


def argument_kind(hint: Any, example: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the keywords of ``add_argument`` for a field's type. example: shown in the error if
    the value of a dict is invalid."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if get_origin(hint) is dict:
        return {"type": partial(json_object, example=example), "metavar": "JSON"}
    if hint == list[int]:
        return {"type": int, "nargs": "+", "metavar": "N"}
    if get_origin(hint) is list:
        return {"action": "append", "metavar": "NAME"}
    if hint in (int, float):
        return {"type": hint, "metavar": "N"}
    return {"type": str, "metavar": "NAME"}


def groups_of(options: type[Any]) -> list[type[Any]]:
    """Return the dataclasses that a class inherits from, in the order of their fields; if there are
    none, the class itself."""
    return [*filter(is_dataclass, reversed(options.__bases__))] or [options]


def summary(options: type[Any]) -> str:
    """Return the first line of a class's docstring, without its full stop."""
    return (options.__doc__ or options.__name__).partition("\n")[0].removesuffix(".")


def field_docs(options: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class and its base classes."""
    docs: dict[str, str] = {}
    for each in filter(is_dataclass, reversed(options.__mro__)):
        docs |= _own_docs(each)
    return docs


@cache  # parsing some hundred lines is slow, and every command has engine options
def _own_docs(options: Any) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        node.target.id: str(below.value.value)
        for node, below in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _shown_default(option: Field[Any]) -> str:
    if option.default is MISSING or option.default in (None, ()):
        return ""
    return f" (default: {option.default})"


def json_object(text: str, example: dict[str, Any] | None = None) -> dict[str, Any]:
    """Parse an argument that must be a JSON object. Errors show ``example``, a valid one."""
    hint = f"write one like '{json.dumps(example or ANY_OBJECT)}', with the quotes"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}; {hint}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object; {hint}")
    return value
