"""What ties the tests to the inside of the product: private reads, and constants that they patch.

    python tools/test_joints.py    counts by file

A test that reads ``pool._loop`` or patches ``engine.x.LIMIT`` breaks when the product is
rearranged, though no user notices anything. ``tests/test_architecture.py`` holds which few may.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTED = frozenset({"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"})
"""Public in spite of their underscore: of named tuples, ``os`` and ``sys``."""
BY_NAME = ("getattr", "setattr", "delattr", "hasattr")  # their second argument names an attribute


class Joint(NamedTuple):
    """A place in a test: its file from the root on, its line, what it reads or patches."""

    path: str
    line: int
    name: str
    """The attribute or constant alone."""
    text: str


def is_private(name: str) -> bool:
    """Does it begin with one underscore, and is not public all the same?"""
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def is_constant(name: str) -> bool:
    return name.isupper() and name.replace("_", "").isalnum()


def own_names(tree: ast.AST) -> set[str]:
    """Private attributes that the classes of a module have: methods, fields, set through self."""
    names: set[str] = set()
    for cls in ast.walk(tree):
        if not isinstance(cls, ast.ClassDef):
            continue
        for node in ast.walk(cls):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return {name for name in names if is_private(name)}


def attributes(tree: ast.AST) -> Iterator[tuple[ast.AST, str, str]]:
    """Where, of what and which: all attributes that are read, set, or named in a string."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name):
                yield node, ast.unparse(owner), name
            case ast.Call(func=ast.Name(id=call), args=[owner, ast.Constant(value=str(name)), *_]):
                if call in BY_NAME:
                    yield node, ast.unparse(owner), name
            case ast.Call(func=ast.Attribute(attr=call), args=[first, *rest]) if call in BY_NAME:
                match first, rest:
                    case ast.Constant(value=str(path)), _:
                        owner_path, _, name = path.rpartition(".")
                        yield node, owner_path, name
                    case _, [ast.Constant(value=str(name)), *_]:
                        yield node, ast.unparse(first), name


def private_reads(path: str, tree: ast.AST, helpers: set[str]) -> list[Joint]:
    """Private attributes of others; those in ``helpers`` are the tests' own."""
    return [
        Joint(path, node.lineno, name, f"{owner}.{name}")
        for node, owner, name in attributes(tree)
        if isinstance(node, ast.expr) and is_private(name) and name not in helpers
        if owner not in ("self", "cls")
    ]


def patched_constants(path: str, tree: ast.AST) -> list[Joint]:
    """Module constants that are given another value, by a fixture or by hand."""
    found = []
    for node, owner, name in attributes(tree):
        is_set = isinstance(node, ast.Call) or (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        )
        reads = isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
        if is_set and not reads and is_constant(name) and owner not in ("self", "cls"):
            found.append(Joint(path, node.lineno, name, f"{owner}.{name}"))
    return found


def helper_names() -> set[str]:
    """Private names that only classes of the tests have, none of the product or its tools."""

    def of(*tops: str) -> set[str]:
        return {
            name
            for top in tops
            for path in (ROOT / top).rglob("*.py")
            for name in own_names(ast.parse(path.read_text(encoding="utf-8")))
        }

    return of("tests") - of("engine", "kernels", "benchmarks", "tools", "examples")


def find() -> tuple[list[Joint], list[Joint]]:
    """Private reads and patched constants of all tests."""
    reads: list[Joint] = []
    patched: list[Joint] = []
    helpers = helper_names()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        where, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))
        reads += private_reads(where, tree, helpers)
        patched += patched_constants(where, tree)
    return reads, patched


def show(title: str, joints: list[Joint]) -> None:
    print(f"{title}: {len(joints)}")
    for path in dict.fromkeys(joint.path for joint in joints):
        own = [joint for joint in joints if joint.path == path]
        print(f"  {len(own):3} {path}: {', '.join(f'{j.line} {j.text}' for j in own)}")


if __name__ == "__main__":
    for title, joints in zip(("private reads", "patched constants"), find(), strict=True):
        show(title, joints)
