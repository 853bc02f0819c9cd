"""Reads the project's own source as syntax trees: imports, sizes, signatures.

Nothing is imported here, so the rules hold for modules whose dependencies are missing too.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("engine", "kernels", "policylab")
SOURCES = (*PACKAGES, "tests", "benchmarks", "tools", "examples")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def walk(node: ast.AST) -> list[ast.AST]:
    """A node and all below it, contexts and operators aside; in half the time of ``ast.walk``."""
    found = [node]
    for each in found:
        for value in each.__dict__.values():
            if isinstance(value, list):
                found += [part for part in value if isinstance(part, ast.AST)]
            elif isinstance(value, ast.AST) and value._fields:
                found.append(value)
    return found


@dataclass(frozen=True)
class Import:
    """One module named by an import statement, absolute and dotted, and where it stands."""

    module: str
    line: int
    is_lazy: bool  # inside a function
    is_typing_only: bool  # under `if TYPE_CHECKING:`


@dataclass(frozen=True)
class Module:
    path: Path

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def name(self) -> str:
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.where)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All of the tree; several rules look at each of them."""
        return walk(self.tree)

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._imports_in(self.tree, is_lazy=False, is_typing_only=False))

    def _imports_in(
        self, node: ast.AST, *, is_lazy: bool, is_typing_only: bool
    ) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                for module in self._modules_of(child):
                    yield Import(module, child.lineno, is_lazy, is_typing_only)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                for part in child.body:
                    holder = ast.Module([part], [])
                    yield from self._imports_in(holder, is_lazy=is_lazy, is_typing_only=True)
                for part in child.orelse:
                    holder = ast.Module([part], [])
                    yield from self._imports_in(
                        holder, is_lazy=is_lazy, is_typing_only=is_typing_only
                    )
            elif not isinstance(child, ast.expr):  # which holds no import
                inside = is_lazy or isinstance(child, Function)
                yield from self._imports_in(child, is_lazy=inside, is_typing_only=is_typing_only)

    def _modules_of(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, base] if base else package)
        # `from package import name` may name a module; resolved against the files that exist.
        named = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in modules() else base for name in named]

    def functions(self) -> Iterator[tuple[str, Function]]:
        """Every function with its dotted name within the module, methods and inner ones too."""
        yield from _functions_in(self.tree, "")

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))


def _functions_in(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield prefix + child.name, child
            yield from _functions_in(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from _functions_in(child, f"{prefix}{child.name}.")
        elif not isinstance(child, ast.expr):  # which holds no function but lambdas
            yield from _functions_in(child, prefix)


@cache
def sources() -> tuple[Module, ...]:
    """Every Python file of the project, tests included."""
    return tuple(
        Module(path)
        for top in SOURCES
        for path in sorted((ROOT / top).rglob("*.py"))
        if "__pycache__" not in path.parts
    )


@cache
def modules() -> dict[str, Module]:
    """The modules of `engine` and `kernels` by dotted name."""
    return {
        module.name: module
        for module in sources()
        if module.path.relative_to(ROOT).parts[0] in PACKAGES
    }


def at(name: str) -> Module | None:
    return modules().get(name)


@cache
def reachable(name: str) -> dict[str, str]:
    """All modules, ours and others', that importing `name` loads -> the module that imports them.

    Follows imports made at load time, and the packages above each module.
    """
    found: dict[str, str] = {}
    todo = [(name, name)]
    while todo:
        module, importer = todo.pop()
        for part in _with_parents(module):
            if part in found:
                continue
            found[part] = importer
            if part in modules():
                todo += [
                    (i.module, part)
                    for i in modules()[part].imports
                    if not i.is_lazy and not i.is_typing_only
                ]
    return found


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def parameters(function: Function) -> list[str]:
    """Names of the parameters a caller has to think of: no self, no cls, no catch-all."""
    args = function.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def attributes(cls: ast.ClassDef) -> set[str]:
    """Names that instances carry: annotated in the class body or assigned through self."""
    names = {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    for node in walk(cls):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names


def public_signatures(module: str, names: tuple[str, ...]) -> list[str]:
    """These functions, and these classes with a line for each of their public names."""
    lines = []
    for node in modules()[module].tree.body:
        if isinstance(node, Function) and node.name in names:
            lines += [f"def {module}.{line}" for line in _member(node)]
        elif isinstance(node, ast.ClassDef) and node.name in names:
            bases = ", ".join(ast.unparse(base) for base in node.bases)
            lines.append(f"class {module}.{node.name}({bases})")
            for inner in node.body:
                lines += [f"    {line}" for line in _member(inner)]
    return lines


def _member(node: ast.stmt) -> list[str]:
    if isinstance(node, Function) and (not node.name.startswith("_") or node.name == "__init__"):
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        marks = "".join(f"@{ast.unparse(mark)} " for mark in node.decorator_list)
        return [f"{marks}{node.name}({ast.unparse(node.args)}){returns}"]
    if isinstance(node, ast.AnnAssign) and not ast.unparse(node.target).startswith("_"):
        return [ast.unparse(node)]
    if isinstance(node, ast.Assign) and not ast.unparse(node.targets[0]).startswith("_"):
        return [ast.unparse(node)]
    return []
