"""The program of a text process, with inputs that kill it, hang it, or make it talk rubbish."""

import os
import signal
import time
from typing import Any

from engine.frontend import pool_process
from engine.messages.text import TextDelta
from engine.text import detokenizer as text
from engine.text.detokenizer import Detokenizer, TextReader

DEADLY, HANGING, RUBBISH, NO_TEXT = "deadly", "hanging", "rubbish", "no text"
DEADLY_ID = 300
"""A token that no process survives."""
RAISING_ID = 302
"""A token that cannot be read."""


class DeadlyTextServer(pool_process.TextServer):
    def do(self, delivery: Any) -> Any:
        payload = delivery.payloads[0] if delivery.payloads else b""
        if payload.startswith(DEADLY.encode()):
            os.kill(os.getpid(), signal.SIGSEGV)
        if payload.startswith(HANGING.encode()):
            time.sleep(1000)
        reply, payloads = super().do(delivery)
        if payload.startswith(NO_TEXT.encode()):
            return reply, [b"\xff", *payloads[1:]]
        return (reply, [b"xxx"]) if payload.startswith(RUBBISH.encode()) else (reply, payloads)


class DeadlyReader(TextReader):
    def read(self, token_ids: list[int], is_last: bool) -> TextDelta:
        if DEADLY_ID in token_ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(token_ids, is_last)


class RaisingDetokenizer(Detokenizer):
    def feed(self, token_ids: list[int]) -> str:
        if RAISING_ID in token_ids:
            raise LookupError(f"no piece {RAISING_ID}")
        return super().feed(token_ids)


def main(descriptor: int) -> None:
    pool_process.TextServer = DeadlyTextServer  # type: ignore[misc]
    pool_process.TextReader = DeadlyReader  # type: ignore[misc]
    text.Detokenizer = RaisingDetokenizer  # type: ignore[misc]
    pool_process.main(descriptor)
