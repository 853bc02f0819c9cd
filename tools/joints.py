"""What ties the tests to the inside of the product: private reads, and constants that they patch.

    python tools/joints.py    counts by file

A test that reads ``pool._loop`` or patches ``engine.x.LIMIT`` breaks when the product is
rearranged, though no user notices anything. ``tests/test_architecture.py`` holds which few may.
Also found here: tests that assert nothing, tests that are the same, and waits that a busy machine
makes too short.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import source_tree

DOCUMENTED = frozenset({"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"})
"""Public in spite of their underscore: of named tuples, ``os`` and ``sys``."""
WAITS = frozenset(
    {
        *(
            "check_output",
            "communicate",
            "create_connection",
            "exception",
            "HTTPConnection",
            "join",
        ),
        *("result", "timeout", "urlopen", "wait", "wait_for", "wait_until"),
    }
)
"""Calls that give up after some seconds. `timeout` is the mark of a test, too."""
MIN_WAIT_SECONDS = 100.0
TEST_SECONDS = 1200.0  # the limit in pyproject.toml, which a mark may only raise
BY_NAME = ("getattr", "setattr", "delattr", "hasattr", "object")
"""Their second argument names an attribute; the last is `patch.object` of `unittest.mock`."""


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


def attributes(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | str, str]]:
    """Where, of what and which: all attributes that are read, set, or named in a string."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name):
                yield node, owner, name
            case ast.Call(func=ast.Name(id=call), args=[owner, ast.Constant(value=str(name)), *_]):
                if call in BY_NAME:
                    yield node, owner, name
            case ast.Call(func=ast.Attribute(attr=call), args=[first, *rest]) if call in BY_NAME:
                match first, rest:
                    case ast.Constant(value=str(path)), _:
                        owner_path, _, name = path.rpartition(".")
                        yield node, owner_path, name
                    case _, [ast.Constant(value=str(name)), *_]:
                        yield node, first, name


def joint(path: str, node: ast.expr, owner: ast.expr | str, name: str) -> Joint:
    text = owner if isinstance(owner, str) else ast.unparse(owner)
    return Joint(path, node.lineno, name, f"{text}.{name}")


def is_own(owner: ast.expr | str) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")


def private_reads(path: str, tree: ast.AST, helpers: set[str]) -> list[Joint]:
    """Private attributes of others; those in ``helpers`` are the tests' own."""
    return [
        joint(path, node, owner, name)
        for node, owner, name in attributes(tree)
        if is_private(name) and name not in helpers and not is_own(owner)
    ]


def patched_constants(path: str, tree: ast.AST) -> list[Joint]:
    """Module constants that are given another value, by a fixture or by hand."""
    return [
        joint(path, node, owner, name)
        for node, owner, name in attributes(tree)
        if is_constant(name) and is_set(node) and not is_own(owner)
    ]


def short_waits(path: str, tree: ast.AST) -> list[Joint]:
    """Calls that give up after a few seconds, which on a busy machine pass with nothing wrong. A
    second or less is a pause, not a wait for something."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = last_name(node.func)
        times = [each.value for each in node.keywords if each.arg == "timeout"]
        times += node.args if name in WAITS else []
        limit = (
            TEST_SECONDS if ast.unparse(node.func) == "pytest.mark.timeout" else MIN_WAIT_SECONDS
        )
        if name in WAITS | {"run"} and any(is_short(each, limit) for each in times):
            found.append(Joint(path, node.lineno, name, ast.unparse(node)))
    return found


def is_short(node: ast.expr, limit: float) -> bool:
    match node:
        case ast.Constant(value=int() | float() as seconds):
            return 1.0 < seconds < limit
    return False


def is_set(node: ast.expr) -> bool:
    """Does this give the attribute a value?"""
    if isinstance(node, ast.Attribute):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Call) and last_name(node.func) in ("setattr", "delattr", "object")


def last_name(called: ast.expr) -> str:
    """``c`` of a call of ``a.b.c`` or of ``c``."""
    match called:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def trees(top: str) -> dict[str, ast.Module]:
    """The files below a folder, by path from the root on."""
    return {m.where: m.tree for m in source_tree.sources() if m.where.startswith(f"{top}/")}


def helper_names() -> set[str]:
    """Private names that only classes of the tests have, none of the product or its tools."""

    def of(*tops: str) -> set[str]:
        return {name for top in tops for tree in trees(top).values() for name in own_names(tree)}

    return of("tests") - of("engine", "kernels", "benchmarks", "tools", "examples")


@cache
def find() -> tuple[list[Joint], list[Joint]]:
    """Private reads and patched constants of all tests."""
    reads: list[Joint] = []
    patched: list[Joint] = []
    helpers = helper_names()
    for path, tree in trees("tests").items():
        reads += private_reads(path, tree, helpers)
        patched += patched_constants(path, tree)
    return reads, patched


# -- what tests say


class Said(NamedTuple):
    """A function of the tests: where it is, what it calls, and whether it asserts itself."""

    path: str
    node: source_tree.Function
    calls: frozenset[str]
    asserts: bool


CHECKS = ("raises", "warns", "fail", "check_returncode")


@cache
def functions() -> tuple[Said, ...]:
    """Every function of the tests, methods too."""
    return tuple(
        said(path, node)
        for path, tree in trees("tests").items()
        for node in ast.walk(tree)
        if isinstance(node, source_tree.Function)
    )


def said(path: str, function: source_tree.Function) -> Said:
    inside = list(ast.walk(function))
    calls = frozenset(last_name(node.func) for node in inside if isinstance(node, ast.Call))
    asserts = any(isinstance(node, ast.Assert | ast.Raise) for node in inside)
    asserts = asserts or any(name in CHECKS or name.startswith("assert_") for name in calls)
    return Said(path, function, calls, asserts)


def asserting() -> set[str]:
    """Names of functions of the tests that assert something, or call one that does."""
    known = {each.node.name for each in functions() if each.asserts}
    while more := {f.node.name for f in functions() if f.calls & known} - known:
        known |= more
    return known


def tests() -> list[Said]:
    return [
        each
        for each in functions()
        if Path(each.path).name.startswith("test_") and each.node.name.startswith("test_")
    ]


def without_assertion() -> list[str]:
    """Tests that can fail only by an exception that they do not speak of."""
    known = asserting()
    return [
        f"{test.path}:{test.node.lineno} {test.node.name}"
        for test in tests()
        if not test.asserts and not test.calls & known
    ]


def twins() -> list[str]:
    """Tests that are word for word the same."""
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for path, test, *_ in tests():
        body = test.body[1:] if ast.get_docstring(test) else test.body
        text = "".join(ast.dump(node) for node in (test.args, *body))
        alike[text].append(f"{path}:{test.lineno} {test.name}")
    return [", ".join(each) for each in alike.values() if len(each) > 1]


def show(title: str, joints: list[Joint]) -> None:
    print(f"{title}: {len(joints)}")
    for path in dict.fromkeys(joint.path for joint in joints):
        own = [joint for joint in joints if joint.path == path]
        print(f"  {len(own):3} {path}: {', '.join(f'{j.line} {j.text}' for j in own)}")


if __name__ == "__main__":
    for title, joints in zip(("private reads", "patched constants"), find(), strict=True):
        show(title, joints)
