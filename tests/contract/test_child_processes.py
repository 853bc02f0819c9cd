"""A child process and what its parent knows of its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from engine.ipc.process import Child, Line

NUM_CHILDREN = 8
NUM_THREADS = 4


def sit(line: Line) -> None:
    """Wait for the end of the parent, or for its wish."""
    line.poll(None)


@contextmanager
def others_are_started() -> Iterator[None]:
    """Threads that ask for dead children again and again, as each start of a process does."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            multiprocessing.active_children()

    threads = [threading.Thread(target=ask) for _ in range(NUM_THREADS)]
    for each in threads:
        each.start()
    try:
        yield
    finally:
        is_over.set()
        for each in threads:
            each.join()


def test_how_a_child_has_ended_is_known_while_others_are_started() -> None:
    """Two cores may die at once, and the first is started again while the second is asked for."""
    children = [Child("sitter", sit) for _ in range(NUM_CHILDREN)]
    try:
        with others_are_started():
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
                how = child.how_it_ended()
                while how is None:  # on a busy machine
                    how = child.how_it_ended()
                assert how.startswith("was killed by SIGKILL")
    finally:
        for child in children:
            child.close()
