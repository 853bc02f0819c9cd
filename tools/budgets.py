"""Prints what of `engine` and `kernels` is above the soft budgets; exit status 1 if anything is.

    python tools/budgets.py

Files, functions, attributes of a class, modules of a package, and modules of one package that
import each other in a circle: imports within functions and those for the type checker count.
"""

from __future__ import annotations

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

Imports = dict[str, set[str]]


def above(modules: dict[str, tree.Module]) -> Iterator[str]:
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
    for circle in circles(imports_inside_packages(modules)):
        yield f"circle of imports: {', '.join(circle)}"


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
    """Groups of modules each of which reaches all others of its group (Tarjan 1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[-len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return found


def main() -> int:
    lines = list(above(tree.modules()))
    print("\n".join(lines) or "nothing is above the soft budgets")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
