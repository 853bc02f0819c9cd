"""The part of a text process that decodes pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config.model import read_model_info
from engine.errors import WireError
from engine.ipc.pixel_segments import Segment, share
from engine.messages.text import Decode, Decoded, Job, Reply
from engine.pictures.opening import picture_of
from engine.pictures.processing import ImageProcessor


class PictureServer:
    """Decodes and processes pictures."""

    def __init__(self, model: str | Path, own: Mapping[str, Any]) -> None:
        """model: directory; own: settings in place of those of its image processor."""
        self._processor = ImageProcessor(read_model_info(model), own)
        self._segments: list[Segment] = []  # that the front end may not have opened yet

    def begin(self) -> None:
        """Release the results of former jobs, which the front end has read."""
        for segment in self._segments:
            segment.close()
        self._segments.clear()

    def do(self, job: Job) -> Reply:
        """Execute a job. Raises ``RequestError`` for a damaged picture."""
        if not isinstance(job, Decode):
            raise WireError(f"{job!r:.80} is no job of a process that decodes pictures")
        pixels = self._processor.pixels(picture_of(job).decode())
        try:
            segment = share(pixels)
        except OSError:  # the system has no shared memory
            return Decoded(None, pixels)
        self._segments.append(segment)
        return Decoded(segment.handle)
