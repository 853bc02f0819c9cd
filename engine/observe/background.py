"""Log lines that a thread of their own writes: whoever logs never waits for who reads them.

A pipe that nobody reads is full after 64 KiB; a write to it then takes for ever. Lines that come
while too many wait are dropped and counted. The thread wakes up for many lines at once, because
each time it competes for the interpreter with what is logged; warnings wake it immediately.
"""

from __future__ import annotations

import copy
import logging
import math
import queue
import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.observe.logs import ROOT

MAX_LINES = 10_000
GATHER_SECONDS = 0.05  # in which lines join the first that waits
LOOK_MS = 100  # between two looks whether all is over
END_SECONDS = 1.0  # for the last lines to be written


class BackgroundHandler(logging.Handler):
    """Hands records to other handlers in a thread; ``close`` waits a moment for the last ones.

    A message that is an object, logged without arguments, becomes text in that thread.
    """

    def __init__(self, targets: Sequence[logging.Handler], max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self.num_dropped = 0
        """Lines that were not written, since the last one that was."""
        self._targets = list(targets)
        self._max_lines = max_lines
        self._end_at = math.inf  # after which no line is waited for
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._is_urgent = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._records.qsize() >= self._max_lines:
            self.num_dropped += 1
            return
        if record.args:  # which may change meanwhile
            text = record.getMessage()
            record = copy.copy(record)
            record.msg, record.args = text, None
        self._records.put(record)
        if record.levelno >= logging.WARNING:
            self._is_urgent.set()

    def close(self) -> None:
        self._end_at = time.monotonic() + END_SECONDS / 2
        self._records.put(None)
        self._is_urgent.set()
        self._thread.join(END_SECONDS)
        super().close()

    def _run(self) -> None:
        is_over = False
        while not is_over:
            gathered = [self._records.get()]
            self._is_urgent.wait(GATHER_SECONDS)
            self._is_urgent.clear()
            gathered += (self._records.get() for _ in range(self._records.qsize()))
            for record in gathered:
                if record is None:
                    is_over = True
                else:
                    self._hand_on(record)
            dropped, self.num_dropped = self.num_dropped, 0
            if dropped:
                text = f"{dropped} lines of the log were dropped: nobody read it"
                level = logging.WARNING
                self._hand_on(logging.LogRecord(ROOT, level, __file__, 0, text, None, None))

    def _hand_on(self, record: logging.LogRecord) -> None:
        for target in self._targets:
            if record.levelno < target.level:
                continue
            if self._may_write(target):
                target.handle(record)
            else:
                self.num_dropped += 1

    def _may_write(self, target: logging.Handler) -> bool:
        """Wait until a line can be written, but not past the end: a thread that is in the middle of
        a write holds locks which the end of the process waits for."""
        try:
            fd = target.stream.fileno()  # type: ignore[attr-defined]
        except (AttributeError, OSError, ValueError):  # no file, or closed
            return True
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        while not poller.poll(LOOK_MS):
            if time.monotonic() > self._end_at:
                return False
        return True


@contextmanager
def logging_in_background(*others: str) -> Iterator[None]:
    """Within it the engine's own log handlers write in a thread, and take what ``others`` log as
    well; those of a program around the engine are left alone."""
    logger = logging.getLogger(ROOT)
    own = list(logger.handlers)
    if not own:
        yield
        return
    background = BackgroundHandler(own)
    logger.handlers[:] = [background]
    for name in others:
        logging.getLogger(name).addHandler(background)
    try:
        yield
    finally:
        for name in others:
            logging.getLogger(name).removeHandler(background)
        logger.handlers[:] = own
        background.close()
