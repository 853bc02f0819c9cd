"""Writes log lines in a background thread, so that logging never blocks.

A pipe without a reader is full after 64 KiB, and a write to it blocks forever. Lines that arrive
while too many are queued are dropped and counted. The thread gathers lines before it writes,
because it competes with other threads for the interpreter; warnings are written immediately."""

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
GATHER_SECONDS = 0.05  # the thread waits this long for more lines
POLL_MS = 100  # interval of checks whether a line can be written
END_SECONDS = 1.0  # time for the last lines when the handler is closed


class BackgroundHandler(logging.Handler):
    """Passes log records to other handlers in a thread; ``close`` waits briefly for the last ones.

    The thread also formats messages that are objects without arguments."""

    def __init__(self, targets: Sequence[logging.Handler], max_lines: int = MAX_LINES) -> None:
        super().__init__()
        self.num_dropped = 0
        """Number of lines dropped since the last line written."""
        self._targets = list(targets)
        self._max_lines = max_lines
        self._end_at = math.inf  # deadline for writing lines
        self._records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        self._is_urgent = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        if self._records.qsize() >= self._max_lines:
            self.num_dropped += 1
            return
        if record.args:  # format now, because arguments may change
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
                text = f"{dropped} log lines were dropped, because they were not read in time"
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
        """Wait until a handler can take a line. Returns False if it cannot before the deadline of
        ``close``, since writing might then block the exit of the process."""
        try:
            fd = target.stream.fileno()  # type: ignore[attr-defined]
        except (AttributeError, OSError, ValueError):  # not a file, or closed
            return True
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        while not poller.poll(POLL_MS):
            if time.monotonic() > self._end_at:
                return False
        return True


@contextmanager
def logging_in_background(*others: str) -> Iterator[None]:
    """Context in which the engine's own log handlers write in a background thread. others: names of
    loggers whose records these handlers write, too."""
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
