"""Write docs/options.md from the fields of ``EngineArgs``: python tools/options_page.py"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from engine.config.args import EngineArgs
from engine.config.cli import field_docs, groups_of, summary

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
TABLE = ["| option | values | default | |", "|---|---|---|---|"]
HEAD = """# Options of an engine

This page lists the keywords of `EngineArgs(...)` and `LLM(...)`. On the command line they are
flags: `max_num_seqs` is `--max-num-seqs`. Where the third column is empty, the last one states
the default.
`python tools/options_page.py` writes this page from the classes in `engine/config`.
"""


def page() -> str:
    """The text of the page: a table for each group of options."""
    hints, docs = get_type_hints(EngineArgs), field_docs(EngineArgs)
    lines = [HEAD]
    for group in groups_of(EngineArgs):
        lines += [f"## {summary(group)}", "", *TABLE]
        for option in fields(group):
            default = getattr(EngineArgs(), option.name)
            shown = "" if default in (None, (), {}) else f"`{default}`"
            doc = " ".join(docs[option.name].split()).replace("|", "\\|")
            lines.append(f"| `{option.name}` | {values(hints[option.name])} | {shown} | {doc} |")
        lines.append("")
    return "\n".join(lines)


def values(hint: Any) -> str:
    """The choices or classes of a type. Tuples are left out, since any list may be a tuple."""
    named: list[str] = []
    for part in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        if get_origin(part) is Literal:
            named += [f"`{choice}`" for choice in get_args(part)]
        elif part is not NoneType and get_origin(part) is not tuple:
            named.append("any" if part is Any else part.__name__)
    return ", ".join(named)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
