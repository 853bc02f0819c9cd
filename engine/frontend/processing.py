"""Processes pictures in threads, and puts their pixels into shared memory for other processes."""

from __future__ import annotations

import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.ipc.pixel_segments import Segment, read, share
from engine.messages.media import Pixels, num_bytes_of

if TYPE_CHECKING:
    from engine.pictures.opening import Picture  # imports Pillow
    from engine.pictures.prompts import Pictures

logger = logging.getLogger(__name__)
MOST_THREADS = 4


class Processed:
    """The pixels of a picture: arrays of this process, or those of shared memory, which then is
    mapped only while they are read."""

    def __init__(self, made: Pixels | Segment) -> None:
        self.segment = made if isinstance(made, Segment) else None
        self._pixels = None if isinstance(made, Segment) else made

    @property
    def pixels(self) -> Pixels:
        """The arrays; those of shared memory are views."""
        if self._pixels is not None:
            return self._pixels
        assert self.segment is not None
        return read(self.segment.handle)

    @property
    def num_bytes(self) -> int:
        if self.segment is not None:
            return self.segment.size
        return num_bytes_of(self.pixels)

    def close(self) -> None:
        """Invalidate the handle of the shared memory."""
        if self.segment is not None:
            self.segment.close()


class ThreadedPictures:
    """Decodes and processes pictures in threads, which are started with the first ones."""

    def __init__(self, pictures: Pictures, *, shares: bool) -> None:
        """shares: put pixels into shared memory, if the system has some."""
        self.num_at_once = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.num_unshared = 0
        """Pictures that could not be put into shared memory."""
        self._pictures = pictures
        self._shares = shares
        self._threads = ThreadPoolExecutor(self.num_at_once, "processing")

    def begin(self, picture: Picture) -> Future[Processed]:
        """Start to process a picture."""
        return self._threads.submit(self._process, picture)

    def close(self) -> None:
        """Let the threads end. A second call does nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _process(self, picture: Picture) -> Processed:
        pixels = self._pictures.pixels(picture)
        if not self._shares:
            return Processed(pixels)
        try:
            segment = share(pixels)
        except OSError as error:
            if not self.num_unshared:
                logger.warning(
                    "pixels are sent to the core in messages, since there is no shared memory: %s",
                    error,
                )
            self.num_unshared += 1
            return Processed(pixels)
        return Processed(segment)
