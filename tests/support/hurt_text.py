"""The program of a text process that raises, or talks rubbish, when it gets a signal."""

import signal
from typing import Any

from engine.frontend import text_worker_main

RAISE, RUBBISH = signal.SIGUSR1, signal.SIGUSR2


def main(descriptor: int) -> None:
    answer, owed = text_worker_main.answer, []

    def rubbish_or(*args: Any) -> bytes:
        frame = answer(*args)
        return owed.pop() if owed else frame

    def fail(*_: Any) -> None:
        raise LookupError("asked to")

    text_worker_main.answer = rubbish_or
    signal.signal(RAISE, fail)
    signal.signal(RUBBISH, lambda *_: owed.append(b"rubbish"))
    text_worker_main.main(descriptor)
