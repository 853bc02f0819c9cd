"""Ctrl-C waits for the end of a step: a core stopped half-way through one could not go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class HeldInterrupt:
    """Inside, an interrupt is only noted; ``KeyboardInterrupt`` is raised on leaving.

    Does nothing outside the main thread and where the program handles interrupts itself.
    """

    def __init__(self) -> None:
        self._is_holding = False
        self._is_noted = False

    def __enter__(self) -> HeldInterrupt:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            signal.signal(signal.SIGINT, self._note)
            self._is_holding = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_noted and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True
