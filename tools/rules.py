"""Rules of the source other than its layers: sizes, circles of imports, contents of tests.

    python tools/rules.py    prints sizes above the budgets, and private reads of tests

`tests/test_architecture.py` fails for a circle and for a test that asserts nothing; it counts the
others. A test that reads ``pool._loop`` breaks when the product is rearranged, though no user
notices anything.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import source_tree as tree

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ATTRIBUTES = 20
MAX_MODULES = 15
DOCUMENTED = frozenset({"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"})
"""Public in spite of their underscore: attributes of named tuples, ``os`` and ``sys``."""
CHECKS = ("raises", "warns", "fail", "check_returncode")
"""Calls that assert something, besides those whose names begin with ``assert_``."""

Imports = dict[str, set[str]]


def above(modules: dict[str, tree.Module]) -> Iterator[str]:
    """Files, functions, classes and packages that are larger than the budgets."""
    for module in modules.values():
        lines = len(module.text.splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{module.where}: {lines} lines"
        for name, function in module.functions():
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{module.where}:{function.lineno} {name}: {lines} lines"
        for cls in module.classes():
            count = len(tree.attributes(cls))
            if count > MAX_ATTRIBUTES:
                yield f"{module.where}:{cls.lineno} {cls.name}: {count} attributes"
    sizes = Counter(module.path.parent for module in modules.values() if not module.is_package)
    for package, count in sizes.items():
        if count > MAX_MODULES:
            yield f"{package.relative_to(tree.ROOT)}: {count} modules"


def imports_inside_packages(modules: dict[str, tree.Module]) -> Imports:
    """Which modules each module imports of its own package (`engine.sched` with all below it)."""
    return {
        name: {
            found.module
            for found in module.imports
            if found.module in modules
            and found.module != name
            and package_of(found.module) == package_of(name)
        }
        for name, module in modules.items()
    }


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def circles(imports: Imports) -> list[list[str]]:
    """Groups of modules each of which reaches all others of its group.

    Imports within functions and those for the type checker count.
    """
    reached = {name: reachable(name, imports) for name in imports}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in imports
        if name in reached[name]
    }
    return sorted(map(list, groups))


def reachable(name: str, imports: Imports) -> set[str]:
    found: set[str] = set()
    todo = [name]
    while todo:
        new = imports[todo.pop()] - found
        found |= new
        todo += new
    return found


def test_files() -> list[tree.Module]:
    """The files below `tests`."""
    return [module for module in tree.sources() if module.where.startswith("tests/")]


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore and is not an exception."""
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def private_names(module: tree.Module) -> set[str]:
    """Private attributes of a module's classes: methods, fields, and what is set through self."""
    names: set[str] = set()
    for cls in module.classes():
        for node in tree.walk(cls):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    names.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return {name for name in names if is_private(name)}


def private_reads() -> list[str]:
    """Where a test names a private attribute of a class that is not the tests' own."""
    own = set().union(*map(private_names, test_files()))
    for module in tree.sources():
        if not module.where.startswith("tests/"):
            own -= private_names(module)
    return [
        f"{module.where}:{node.lineno} {ast.unparse(node)}"
        for module in test_files()
        for node in module.nodes
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def calls(nodes: list[ast.AST]) -> set[str]:
    """Names of the functions that nodes call: ``c`` for a call of ``a.b.c`` or of ``c``."""
    found = (node.func for node in nodes if isinstance(node, ast.Call))
    return {
        func.attr if isinstance(func, ast.Attribute) else func.id
        for func in found
        if isinstance(func, ast.Attribute | ast.Name)
    }


def asserts(nodes: list[ast.AST], called: set[str]) -> bool:
    """Whether an assertion is among the nodes of a function or among the calls that it makes."""
    return any(isinstance(node, ast.Assert | ast.Raise) for node in nodes) or any(
        name in CHECKS or name.startswith("assert_") for name in called
    )


def without_assertion() -> list[str]:
    """Tests that assert nothing, neither themselves nor in what they call."""
    called: dict[tuple[str, tree.Function], set[str]] = {}
    helpers: set[str] = set()
    silent: set[ast.AST] = set()
    for module in test_files():
        for function in (node for node in module.nodes if isinstance(node, tree.Function)):
            nodes = tree.walk(function)
            names = called[module.where, function] = calls(nodes)
            if asserts(nodes, names):
                helpers.add(function.name)
            else:
                silent.add(function)
    while more := {node.name for (_, node), names in called.items() if names & helpers} - helpers:
        helpers |= more
    return [
        f"{path}:{node.lineno} {node.name}"
        for (path, node), names in called.items()
        if Path(path).name.startswith("test_") and node.name.startswith("test_")
        if node in silent and not names & helpers
    ]


def main() -> None:
    print("\n".join([*above(tree.modules()), *private_reads()]))


if __name__ == "__main__":
    main()
