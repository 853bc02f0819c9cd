"""The program of a text process that raises, or talks rubbish, when it gets a signal."""

import signal
from typing import Any

from engine.frontend import pool_process

RAISE, RUBBISH = signal.SIGUSR1, signal.SIGUSR2


def main(descriptor: int) -> None:
    answer, owed = pool_process._answer, []

    def rubbish_or(*args: Any) -> list[bytes]:
        frames = answer(*args)
        return [b"rubbish", owed.pop()] if owed else frames

    def fail(*_: Any) -> None:
        raise LookupError("asked to")

    pool_process._answer = rubbish_or
    signal.signal(RAISE, fail)
    signal.signal(RUBBISH, lambda *_: owed.append(b"more of it"))
    pool_process.main(descriptor)
