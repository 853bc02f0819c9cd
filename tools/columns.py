"""Prints tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence


def print_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows, with the first column aligned to the left and the others to the right."""
    lines = [head, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(head))]
    for line in lines:
        first, *figures = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *figures]).rstrip())
