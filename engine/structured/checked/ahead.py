"""Looks ahead: can what is written still be finished, and what may the next name or value be?

It errs on one side: what it calls dead is dead, and what it calls alive may turn out not to be.
"""

from __future__ import annotations

from engine.structured.checked.frames import Frame
from engine.structured.checked.places import Places


class Ahead:
    """Looks ahead in the texts of one schema."""

    def __init__(self, places: Places, is_ordered: bool) -> None:
        self._places = places
        self._is_ordered = is_ordered
        self.why = ""  # what was answered last cannot go on

    def is_alive(self, frame: Frame) -> bool:
        """Whether the object or the array may be closed, or gone on with."""
        return True

    def may_go_on(self, frame: Frame) -> bool:
        return True

    def names(self, frame: Frame) -> tuple[bytes, ...] | None:
        """With the quotation mark before them."""
        return None

    def values(self, frame: Frame, kind: str) -> tuple[bytes, ...] | None:
        return None
