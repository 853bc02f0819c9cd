"""Phases of copies of KV blocks in which a core can die.

host write   a core copies a block into the memory that cores share
host read    a core copies a block out of it
disk write   a core writes a block to its directory
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.sched.policies.fcfs import FCFS

PHASES = ("host write", "host read", "disk write")
GO_ON = "go on"


class Halting(FCFS):
    """A policy that halts a thread of its core, once the file ``phase`` is there, amid a copy. The
    file then has the number of the process. It waits for a file ``GO_ON``."""

    def __init__(self, directory: str = "", phase: str = "") -> None:
        super().__init__()
        self.place = Path(directory) / phase
        place, method = phase.split() if phase else ("", "")
        if place == "host":
            self._in_host(method)
        elif place == "disk":
            self._in_disk()

    def _in_host(self, method: str) -> None:
        from engine.kv_transfer.host import HostStore

        own = getattr(HostStore, method)

        def call(store: Any, keys: Sequence[bytes], rows: Any) -> Any:
            store._copy = self._half
            try:
                return own(store, keys, rows)
            finally:
                store._copy = np.copyto

        setattr(HostStore, method, call)

    def _half(self, to: np.ndarray, source: np.ndarray) -> None:
        half = to.shape[1] // 2
        to[:, :half] = source[:, :half]
        self._halt()
        to[:, half:] = source[:, half:]

    def _in_disk(self) -> None:
        write = os.pwritev

        def pwritev(fd: int, buffers: Sequence[Any], offset: int) -> int:
            done = 0
            for buffer in buffers:
                for part in (buffer[: len(buffer) // 2], buffer[len(buffer) // 2 :]):
                    done += write(fd, [part], offset + done)
                    self._halt()
            return done

        os.pwritev = pwritev  # type: ignore[assignment]

    def _halt(self) -> None:
        if not wanted(self.place):
            return
        self.place.write_text(str(os.getpid()))
        while not (self.place.parent / GO_ON).exists():
            time.sleep(0.01)


def wanted(place: Path) -> bool:
    """True if somebody waits for the phase, and no core has come to it."""
    try:
        os.rename(place.with_suffix(".wanted"), place.with_suffix(".found"))
    except FileNotFoundError:
        return False
    return True
