"""Lets steps run while an adapter is read.

A thread that waits for the GIL gets it only if another one leaves it for longer than a moment, and
kernels wait for a core that another thread uses. So a thread that reads works in short bursts, and
sleeps between them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BURST = 0.0002  # seconds of work between two pauses
PAUSE = 0.0006  # seconds


class _Turns(threading.local):
    """What a thread knows of its turn."""

    urgent: threading.Event | None = None  # None: the thread need not give way
    began = 0.0


_TURNS = _Turns()


@contextmanager
def taking_turns(is_urgent: threading.Event) -> Iterator[None]:
    """Context in which ``give_way`` pauses this thread, except while the event is set: nothing is
    done then but to wait for its result."""
    _TURNS.urgent, _TURNS.began = is_urgent, time.perf_counter()
    try:
        yield
    finally:
        _TURNS.urgent = None


def give_way(burst: float = BURST, sleep: Callable[[float], None] = time.sleep) -> None:
    """Pause for a moment if this thread has worked for ``burst`` seconds. Called between pieces of
    work; does nothing outside of ``taking_turns``."""
    urgent = _TURNS.urgent
    if urgent is None or urgent.is_set():
        return
    if time.perf_counter() - _TURNS.began > burst:
        sleep(PAUSE)
        _TURNS.began = time.perf_counter()
