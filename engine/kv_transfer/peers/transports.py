"""Transport: reads the memory of other processes in place of messages, with a library that does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Lent(NamedTuple):
    """Memory that other processes may read until it is freed: bytes [n], and their address."""

    data: NDArray[np.uint8]
    address: int


class Transport(Protocol):
    """One process's end. Thread-safe. ``name``: both ends have the same."""

    name: str

    @property
    def session(self) -> str:
        """Identifies this process to others."""

    def lend(self, num_bytes: int) -> Lent:
        """Memory of this process, which other processes can read, and into which ``read`` copies.
        Raises ``OSError``."""

    def read(
        self, session: str, address: int, into: NDArray[np.uint8], is_over: Callable[[], bool]
    ) -> bool:
        """Copy lent memory of another process, from ``address`` on, to a part of this one's. False
        if it fails, or ``is_over`` becomes true; then ``into`` may still change later."""

    def close(self) -> None:
        """Lend nothing any more. May be repeated."""
