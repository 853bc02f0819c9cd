"""Processes pictures in threads."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.messages.media import Pixels

if TYPE_CHECKING:
    from engine.pictures.opening import Picture  # imports Pillow
    from engine.pictures.prompts import Pictures

MOST_THREADS = 4


class ThreadedPictures:
    """Decodes and processes pictures in threads, which are started with the first ones."""

    def __init__(self, pictures: Pictures) -> None:
        self.num_at_once = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pictures = pictures
        self._threads = ThreadPoolExecutor(self.num_at_once, "processing")

    def begin(self, picture: Picture) -> Future[Pixels]:
        """Start to process a picture."""
        return self._threads.submit(self._pictures.pixels, picture)

    def close(self) -> None:
        """Let the threads end. A second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
