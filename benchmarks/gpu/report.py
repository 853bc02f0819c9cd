"""Writes results to a file after each row, and prints a table after each section."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from gpu.box import Box, Row, Rows


class Section(NamedTuple):
    """A part of the run. It ends with the first row after `budget` seconds."""

    name: str
    budget: float
    rows: Callable[[Box], Rows]


@dataclass
class Found:
    """The rows of a section, and how the section ended."""

    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    ended: str = "done"  # or "cut off", "skipped", or the error


class Report:
    """The results of a run, written to `path` after each row."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        self.about = about
        self.sections: dict[str, Found] = {}

    def run(self, sections: Sequence[Section], box: Box, seconds: float) -> None:
        """Run the sections one after the other; none begins when `seconds` have passed."""
        deadline = time.monotonic() + seconds
        for section in sections:
            found = self.sections[section.name] = Found()
            began = time.monotonic()
            if began > deadline:
                found.ended = "skipped"
            else:
                self._fill(found, section, box, min(began + section.budget, deadline))
            found.seconds = round(time.monotonic() - began, 1)
            self.write()
            show(section.name, found)
            box.clear()

    def _fill(self, found: Found, section: Section, box: Box, end: float) -> None:
        try:
            with contextlib.closing(section.rows(box)) as rows:
                for row in rows:
                    found.rows.append(row)
                    self.write()
                    if time.monotonic() > end:
                        found.ended = "cut off"
                        break
        except Exception as error:
            found.ended = f"{type(error).__name__}: {error}"
            traceback.print_exc()

    def write(self) -> None:
        sections = {name: vars(found) for name, found in self.sections.items()}
        text = json.dumps({**self.about, "sections": sections}, indent=1)
        self.path.write_text(text + "\n")

    @property
    def is_sound(self) -> bool:
        """Whether no section ended with an error."""
        return {found.ended for found in self.sections.values()} <= {"done", "cut off", "skipped"}


def show(name: str, found: Found) -> None:
    """Print the rows of a section as a table."""
    table = Table(title=f"{name}: {found.ended}, {found.seconds:.1f} s", title_justify="left")
    columns = list(dict.fromkeys(key for row in found.rows for key in row))
    for column in columns:
        table.add_column(column)
    for row in found.rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    Console(width=150).print(table)


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
