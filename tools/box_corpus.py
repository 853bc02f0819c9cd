"""Text for the model in the box: what every Python installation carries, as training documents.

Sources: the language reference topics behind `help()`, docstrings of the public parts of the
standard library's Python modules (read, never imported) and of the interpreter's C modules. Same
Python version, same entries in the same order.
"""

import ast
import importlib
import importlib.machinery
import inspect
import pydoc_data.topics
import re
import sys
import sysconfig
import types
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_ONE_IN = 25

_SKIPPED_FOLDERS = frozenset(
    {"distutils", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages"}
    | {"__pycache__", "_pyrepl", "test", "tests", "turtledemo"}
)
_SKIPPED_MODULES = frozenset({"antigravity", "pickletools", "this", "tkinter", "turtle"})
_SKIPPED_C_MODULES = re.compile(r"^(_test|_xx|xx|_ctypes_test|_tkinter)")
_PUBLIC_NAMES = {"posixpath": "os.path", "posix": "os", "_io": "io", "_pydatetime": "datetime"}
_UNDERLINE = re.compile(r"^([*=\-~^\"])\1{2,}$")


class Entry(NamedTuple):
    """One documented thing: `source` is the unit of the held-out split, `kind` its sort."""

    source: str
    kind: str
    name: str
    signature: str
    text: str


def is_held_out(source: str) -> bool:
    """Whether a source (a module or a topic) is kept from training; by name, so it never moves."""
    return zlib.crc32(source.encode()) % HELD_OUT_ONE_IN == 3


def read_corpus() -> list[Entry]:
    """Every entry with a public name; a text that occurs twice counts the first time only."""
    seen: set[str] = set()
    entries = []
    for entry in _all_entries():
        key = " ".join(entry.text.split())
        if len(key) >= 20 and key not in seen and _is_public(entry) and _is_plain(entry.text):
            seen.add(key)
            entries.append(entry)
    return entries


def _all_entries() -> Iterator[Entry]:
    yield from _topic_entries()
    yield from _c_entries()
    for module, path in _python_modules():
        yield from _python_entries(module, path)


def _is_public(entry: Entry) -> bool:
    parts = entry.name.split(".")
    return entry.kind == "topic" or not any(part.startswith("_") for part in parts)


def _is_plain(text: str) -> bool:
    return all(char.isprintable() or char in "\n" for char in text)


# Topics


def _topic_entries() -> Iterator[Entry]:
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        for title, body in _sections(text):
            yield Entry(f"topic:{topic}", "topic", title, title, body)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Title and body of every headed section, in order."""
    lines = text.rstrip().split("\n")
    heads = [at - 1 for at in range(1, len(lines)) if _UNDERLINE.match(lines[at])]
    for head, after in zip(heads, [*heads[1:], len(lines)], strict=True):
        body = "\n".join(lines[head + 2 : after]).strip("\n")
        if body.strip():
            yield lines[head].strip(), body


# C modules


def _c_entries() -> Iterator[Entry]:
    for name in ["builtins", *sorted(sys.stdlib_module_names - {"builtins"})]:
        if not _is_c_module(name):
            continue
        module = importlib.import_module(name)
        public = _public_name(name)
        doc = inspect.getdoc(module)
        if doc:
            yield Entry(public, "module", public, public, doc)
        for attribute, value in sorted(vars(module).items()):
            yield from _c_member(public, attribute, value)


def _is_c_module(name: str) -> bool:
    if _SKIPPED_C_MODULES.match(name):
        return False
    if name in sys.builtin_module_names:
        return True
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        folder = sysconfig.get_config_var("DESTSHARED")
        if folder and Path(folder, name + suffix).exists():
            return True
    return False


def _public_name(module: str) -> str:
    if module in _PUBLIC_NAMES:
        return _PUBLIC_NAMES[module]
    bare = module.lstrip("_")
    return bare if bare in sys.stdlib_module_names else module


def _c_member(module: str, name: str, value: object) -> Iterator[Entry]:
    prefix = "" if module == "builtins" else module + "."
    if isinstance(value, type):
        yield from _c_described(module, "class", prefix + name, value)
        for attribute, member in sorted(vars(value).items()):
            if callable(member) or isinstance(member, types.GetSetDescriptorType):
                yield from _c_described(module, "function", f"{prefix}{name}.{attribute}", member)
    elif isinstance(value, types.BuiltinFunctionType):
        yield from _c_described(module, "function", prefix + name, value)


def _c_described(module: str, kind: str, name: str, value: object) -> Iterator[Entry]:
    doc = getattr(value, "__doc__", None)
    if not isinstance(doc, str):
        return
    arguments = getattr(value, "__text_signature__", None)
    signature = name
    if isinstance(arguments, str):
        signature += re.sub(r"^\(\$\w+(, /)?(, )?", "(", arguments)
    yield Entry(module, kind, name, signature, inspect.cleandoc(doc))


# Python modules


def _python_modules() -> list[tuple[str, Path]]:
    """Dotted name and path of the standard library's modules, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        parts = [*relative.parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
        if not parts or parts[0] not in sys.stdlib_module_names:
            continue
        if _SKIPPED_FOLDERS.isdisjoint(parts) and parts[0] not in _SKIPPED_MODULES:
            found.append((_PUBLIC_NAMES.get(parts[0], ".".join(parts)), path))
    return sorted(found)


def _python_entries(module: str, path: Path) -> Iterator[Entry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        tree = ast.parse(path.read_bytes())
    doc = ast.get_docstring(tree)
    if doc:
        yield Entry(module, "module", module, module, doc)
    yield from _definitions(module, module, tree)


def _definitions(module: str, owner: str, node: ast.AST) -> Iterator[Entry]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(child)
            if doc:
                name = f"{owner}.{child.name}"
                signature = f"{name}({_arguments(child.args)})"
                yield Entry(module, "function", name, signature, doc)
        elif isinstance(child, ast.ClassDef):
            name = f"{owner}.{child.name}"
            doc = ast.get_docstring(child)
            if doc:
                yield Entry(module, "class", name, "class " + name, doc)
            yield from _definitions(module, name, child)
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _definitions(module, owner, child)


def _arguments(arguments: ast.arguments) -> str:
    written = ast.unparse(arguments)
    return re.sub(r"^(self|cls)(, /)?(, |$)", "", written)
