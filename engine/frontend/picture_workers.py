"""Processes pictures in text processes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.errors import EngineDeadError, RequestError, WireError
from engine.frontend.processing import Processed, ThreadedPictures
from engine.frontend.text_workers import MAX_DEATHS, TASK_BYTES, FutureTask, TaskQueue
from engine.ipc.pixel_segments import adopt, read
from engine.messages.text import Decoded, Job, Reply

if TYPE_CHECKING:
    from engine.pictures.opening import Picture  # imports Pillow

MOST_SENT_BYTES = 48 << 20  # of a picture's content, in a message of at most 64 MiB
PIXELS_A_BYTE = 8  # pixels that take as long as a byte of text
FILE_BYTES_A_BYTE = 1024  # bytes of a file that count as one of text, so that few are together


class PictureTask(FutureTask):
    """A picture to decode."""

    def __init__(self, picture: Picture) -> None:
        size = picture.num_pixels // PIXELS_A_BYTE + picture.num_bytes // FILE_BYTES_A_BYTE
        super().__init__(TASK_BYTES + size)
        self._picture = picture

    def job(self, process_number: int) -> Job:
        return self._picture.job()

    def result_of(self, reply: Reply) -> Processed | Exception:
        match reply:
            case Decoded(shared=None, pixels=pixels) if pixels is not None:
                return Processed(pixels)
            case Decoded(shared=shared) if shared is not None:
                try:
                    return Processed(adopt(shared))
                except OSError:  # too many files are open: a copy needs none
                    return Processed(read(shared))
        raise WireError(f"{reply!r:.80} does not answer the job")

    def finish(self, result: Processed | Exception) -> None:
        if isinstance(result, Processed) and not self.is_wanted():
            result.close()
        super().finish(result)

    def death(self, how: str) -> RequestError:
        picture = self._picture
        return RequestError(
            f"a picture process {how} over a picture of {picture.width} x {picture.height} pixels, "
            f"{MAX_DEATHS} times; this picture cannot be decoded",
            param="multi_modal_data",
        )


class PooledPictures:
    """Decodes and processes pictures in text processes. Those that take much memory follow one
    after the other; those that do not fit into a message are processed in threads."""

    def __init__(self, queue: TaskQueue, threaded: ThreadedPictures) -> None:
        self.num_at_once = 2 * len(queue.workers)  # so that no process waits for its next one
        self._queue = queue
        self._threaded = threaded
        self._turns = ThreadPoolExecutor(1, "large pictures")

    def begin(self, picture: Picture) -> Future[Processed]:
        """Start to process a picture."""
        if picture.num_bytes > MOST_SENT_BYTES:
            return self._threaded.begin(picture)
        if picture.is_large:
            return self._turns.submit(lambda: self._put(picture).result())
        return self._put(picture)

    def close(self) -> None:
        """Let the threads end. A second call does nothing."""
        self._turns.shutdown(wait=False, cancel_futures=True)
        self._threaded.close()

    def _put(self, picture: Picture) -> Future[Processed]:
        task = PictureTask(picture)
        try:
            self._queue.put([task])
        except EngineDeadError as error:
            task.finish(error)
        return task.future
