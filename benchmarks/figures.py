"""Prints tables of figures, and keeps figures with a description of the machine."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import machine
from rich.console import Console
from rich.table import Table


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows of as many cells as the head; all columns but the first are set to the right."""
    table = Table(title=title)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)


def value_of(text: str) -> tuple[str, Any]:
    """Name and value of an option given as NAME=VALUE; VALUE is JSON, or a string as it is."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def keep(path: Path | None, **figures: Any) -> None:
    """Write the figures and the machine's description as JSON; nothing if no path is given."""
    if path is not None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"machine": machine.describe(), **figures}, indent=1) + "\n")
