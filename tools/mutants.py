"""Makes mutants of a module: one operator, constant, condition or statement is changed.

Texts are left alone (docstrings, messages, log lines, annotations, ``__repr__``), and so are the
bodies and defaults of protocols, which never run, and ``strict=True`` of ``zip``, an assertion that
does not fail in correct code.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


class Mutant(NamedTuple):
    """A changed place: its line, and the code before and after."""

    file: str
    line: int
    number: int  # among the mutants of its file
    before: str
    after: str


class Change(NamedTuple):
    """How to make a mutant of a tree, and how to undo it."""

    node: ast.AST
    do: Callable[[], None]
    undo: Callable[[], None]


def mutants(file: str, source: str) -> Iterator[tuple[Mutant, ast.Module]]:
    """Each mutant of a source with its tree, which is valid until the next one is made."""
    tree = ast.parse(source)
    for number, change in enumerate(list(changes(tree))):
        before = ast.unparse(change.node)
        change.do()
        after = ast.unparse(change.node)
        after = "(removed)" if after == before else after
        yield Mutant(file, change.node.lineno, number, _short(before), _short(after)), tree
        change.undo()


def changes(tree: ast.Module) -> Iterator[Change]:
    """All changes that can be made to a tree."""
    for node in _code(tree):
        yield from _changes_of(node)
        for body in _bodies(node):
            for index, statement in enumerate(body):
                if _is_removable(statement):
                    yield _remove(body, index)


def _changes_of(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            for index in range(len(node.ops)):
                yield from _swap_item(node, node.ops, index)
        case ast.BoolOp() | ast.BinOp() | ast.AugAssign():
            yield from _swap(node)
        case ast.UnaryOp(op=ast.Not()):
            yield _set(node, "op", ast.UAdd())
        case ast.Constant(value=bool() | int()):
            is_flag = isinstance(node.value, bool)
            yield _set(node, "value", not node.value if is_flag else node.value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            yield _set(node, "test", ast.UnaryOp(ast.Not(), test))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may be changed."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params", "msg"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_wording(child):
                yield from _code(child)


def _is_wording(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Import() | ast.ImportFrom():
            return True
        case ast.FunctionDef(name="__repr__"):
            return True
        case ast.ClassDef(bases=[ast.Name(id="Protocol"), *_]):
            return True
        case ast.keyword(arg="strict", value=ast.Constant(value=True)):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return True
        case ast.Assign(targets=[ast.Name(id="__slots__" | "__all__")]):
            return True
    return False


def _bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and not isinstance(node, ast.Module | ast.ClassDef):
            yield body


def _is_removable(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="logger")))):
            return False
        case ast.Expr(value=ast.Call() | ast.YieldFrom()) | ast.AugAssign() | ast.Delete():
            return True
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return True
        case ast.Continue() | ast.Break():
            return True
    return False


def _swap(node: ast.BoolOp | ast.BinOp | ast.AugAssign) -> Iterator[Change]:
    other = SWAPPED.get(type(node.op))
    if other is not None:
        yield _set(node, "op", other())


def _swap_item(node: ast.AST, ops: list[ast.cmpop], index: int) -> Iterator[Change]:
    old, other = ops[index], SWAPPED.get(type(ops[index]))
    if other is not None:
        yield Change(
            node,
            lambda: ops.__setitem__(index, other()),
            lambda: ops.__setitem__(index, old),
        )


def _set(node: ast.AST, name: str, new: object) -> Change:
    old = getattr(node, name)
    return Change(node, lambda: setattr(node, name, new), lambda: setattr(node, name, old))


def _remove(body: list[ast.stmt], index: int) -> Change:
    old = body[index]
    empty = ast.copy_location(ast.Pass(), old)
    return Change(
        old,
        lambda: body.__setitem__(index, empty),
        lambda: body.__setitem__(index, old),
    )


def _short(code: str) -> str:
    line = " ".join(code.split())
    return line if len(line) <= 90 else line[:87] + "..."
