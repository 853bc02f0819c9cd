"""The program of a text process, with inputs that kill it, hang it, or make it talk rubbish."""

import os
import signal
import time

from engine.frontend import text_worker_main
from engine.messages.text import Encode, Encoded, Job, Render, Rendered, Reply, TextDelta
from engine.text import detokenizer as text
from engine.text.detokenizer import Detokenizer, TextReader

DEADLY, HANGING, RUBBISH, NO_TEXT = "deadly", "hanging", "rubbish", "no text"
DEADLY_ID = 300
"""A token that no process survives."""
RAISING_ID = 302
"""A token that cannot be read."""


class DeadlyTextServer(text_worker_main.TextServer):
    def do(self, job: Job) -> Reply:
        text = b""
        if isinstance(job, Encode | Render):
            text = job.text if isinstance(job, Encode) else job.template
        if text.startswith(DEADLY.encode()):
            os.kill(os.getpid(), signal.SIGSEGV)
        if text.startswith(HANGING.encode()):
            time.sleep(1000)
        if text.startswith(NO_TEXT.encode()):
            return Rendered(b"\xff", b"")  # type: ignore[arg-type]
        return Encoded(b"xxx") if text.startswith(RUBBISH.encode()) else super().do(job)


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
    text_worker_main.TextServer = DeadlyTextServer  # type: ignore[misc]
    text_worker_main.TextReader = DeadlyReader  # type: ignore[misc]
    text.Detokenizer = RaisingDetokenizer  # type: ignore[misc]
    text_worker_main.main(descriptor)
