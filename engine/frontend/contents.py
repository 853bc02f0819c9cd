"""Contents: processes the pictures of requests elsewhere, and brings their content to the core.

    request accepted ─> waiting ─> being processed ─> brought ─its requests end─> idle ─> dropped
                                   (other threads)    └─ again for each later request with it

Only the thread that steps the core calls ``start``, ``deliver``, ``end`` and ``close``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

from engine.core.client import CoreClient
from engine.errors import EngineError, RefusedError, RequestError, WireError
from engine.frontend.processing import Processed
from engine.ipc.sealed_files import most_open_files
from engine.messages.media import MediaContent

if TYPE_CHECKING:
    from engine.frontend.prompt import Submission
    from engine.pictures.opening import Picture  # imports Pillow

MOST_BYTES = 1 << 30  # of content made ahead of the requests that finish


class Processing(Protocol):
    """Processes pictures outside of the thread that steps the core."""

    num_at_once: int
    """Number of pictures that are processed at the same time."""

    def begin(self, picture: Picture) -> Future[Processed]:
        """Start to process a picture. The future raises ``RequestError`` for a damaged one."""

    def close(self) -> None:
        """Release threads."""


class Content:
    """The content of one media item, from its first request on."""

    def __init__(self, key: str, picture: Picture) -> None:
        self.key = key
        self.picture: Picture | None = picture  # until it is processed
        self.users: set[str] = set()  # core ids of unfinished requests
        self.future: Future[Processed] | None = None
        self.made: Processed | None = None
        self.num_bytes = 0

    def message(self) -> MediaContent:
        """The message for a core, once the picture is processed."""
        assert self.made is not None
        segment = self.made.segment
        if segment is None:
            return MediaContent(self.key, self.made.pixels)
        pixels = None
        with suppress(WireError):  # too many files are open here: the core may still read it
            pixels = self.made.pixels
        return MediaContent(self.key, pixels, segment.handle)


class Contents:
    """The content of the media of unfinished requests and, up to ``cache_bytes``, of those whose
    requests have ended, least recently used first to go.

    Pictures are processed in the order of their requests, and further ones wait while
    ``most_bytes`` are held for requests that have all of theirs."""

    def __init__(
        self,
        client: CoreClient,
        processing: Processing,
        wake: Callable[[], object],
        *,
        cache_bytes: int = 0,
        most_bytes: int = MOST_BYTES,
        most_idle: int | None = None,
    ) -> None:
        """wake: called in other threads when ``deliver`` has something to do. most_idle: most items
        kept whose requests have ended, by default for an eighth of the files that this process may
        open, since each takes one."""
        self._client = client
        self._processing = processing
        self._wake = wake
        self._cache_bytes = cache_bytes
        self._most_bytes = most_bytes
        self._most_idle = most_open_files() // 8 if most_idle is None else most_idle
        self._contents: dict[str, Content] = {}
        self._idle: dict[str, None] = {}  # keys without users, longest idle first
        self._waiting: deque[Content] = deque()
        self._done: SimpleQueue[tuple[str, Future[Processed]]] = SimpleQueue()
        self._used_by: dict[str, set[str]] = {}  # core id -> keys
        self._missing: dict[str, set[str]] = {}  # core id -> keys that are not processed
        self._num_processing = 0
        self._num_bytes = 0  # of contents in use
        self._num_idle_bytes = 0

    def __len__(self) -> int:
        """Number of media items, idle ones included."""
        return len(self._contents)

    def start(self, submission: Submission) -> None:
        """Process the pictures of a request that the core has accepted, and bring their content.
        Raises ``EngineDeadError``."""
        names = [request.request_id for request in submission.requests]
        for key, picture in submission.pictures.items():
            content = self._contents.get(key)
            if content is None:
                content = self._contents[key] = Content(key, picture)
                self._waiting.append(content)
            self._use(content, names)
            if content.made is not None:
                self._client.bring(names, content.message())
        self._begin()

    def deliver(self) -> None:
        """Bring content that has been processed since the last call. Raises
        ``EngineDeadError``."""
        while not self._done.empty():
            key, future = self._done.get_nowait()
            self._num_processing -= 1
            content = self._contents.get(key)
            if content is not None and content.future is future:
                content.picture = content.future = None  # what it makes is freed with the content
                self._take(content, future)
            elif not (future.cancelled() or future.exception()):
                future.result().close()  # its requests have ended
            self._begin()

    def end(self, core_id: str) -> None:
        """Release the content of a request that has ended; unknown ids are ignored."""
        self._missing.pop(core_id, None)
        for key in self._used_by.pop(core_id, ()):
            content = self._contents[key]
            content.users.discard(core_id)
            if not content.users:
                self._release(content)
        self._begin()

    def reset(self) -> None:
        """Drop the content that no unfinished request uses."""
        self._trim(0)

    def close(self) -> None:
        """Drop everything. A second call does nothing."""
        self._waiting.clear()
        for content in self._contents.values():
            if content.made is not None:
                content.made.close()
            elif content.future is not None:
                content.future.cancel()
        self._contents.clear()
        self._used_by.clear()
        self._idle.clear()
        self._processing.close()

    # -- helpers

    def _use(self, content: Content, names: Sequence[str]) -> None:
        if content.key in self._idle:
            del self._idle[content.key]
            self._num_idle_bytes -= content.num_bytes
            self._num_bytes += content.num_bytes
        content.users.update(names)
        for name in names:
            self._used_by.setdefault(name, set()).add(content.key)
            if content.made is None:
                self._missing.setdefault(name, set()).add(content.key)

    def _begin(self) -> None:
        """Start to process waiting pictures, as many as are allowed at once and ahead."""
        while self._waiting and self._num_processing < self._processing.num_at_once:
            # Without a request that has all of its content, none can end and make room.
            if self._num_bytes >= self._most_bytes and len(self._used_by) > len(self._missing):
                return
            content = self._waiting.popleft()
            if not content.users:  # its requests have ended
                continue
            assert content.picture is not None
            self._num_processing += 1
            try:
                content.future = self._processing.begin(content.picture)
            except RuntimeError as error:  # the system starts no more threads
                content.future = Future()
                content.future.set_exception(error)
            notify = partial(_notify, self._done, self._wake, content.key)
            content.future.add_done_callback(notify)

    def _take(self, content: Content, future: Future[Processed]) -> None:
        names = sorted(content.users)
        for name in names:
            missing = self._missing[name]
            missing.discard(content.key)
            if not missing:
                del self._missing[name]
        # Not raised here: an error refers to where it was raised, and so to the future and picture.
        error = CancelledError() if future.cancelled() else future.exception()
        if error is not None:
            self._drop(content)
            self._client.bring(names, _failed(content.key, error))
            return
        content.made = future.result()
        content.num_bytes = content.made.num_bytes
        self._num_bytes += content.num_bytes
        self._client.bring(names, content.message())

    def _release(self, content: Content) -> None:
        """Keep content without users for later requests, if it has been processed."""
        if content.made is None:
            if content.future is not None:
                content.future.cancel()
            content.picture = None  # it may wait for long
            del self._contents[content.key]
            return
        self._num_bytes -= content.num_bytes
        self._num_idle_bytes += content.num_bytes
        self._idle[content.key] = None
        self._trim(self._cache_bytes)

    def _trim(self, num_bytes: int) -> None:
        while self._num_idle_bytes > num_bytes or len(self._idle) > self._most_idle:
            key = next(iter(self._idle))
            del self._idle[key]
            content = self._contents.pop(key)
            self._num_idle_bytes -= content.num_bytes
            assert content.made is not None
            content.made.close()

    def _drop(self, content: Content) -> None:
        """Forget content that cannot be used."""
        del self._contents[content.key]
        for name in content.users:
            self._used_by[name].discard(content.key)


def _notify(
    done: SimpleQueue[tuple[str, Future[Processed]]],
    wake: Callable[[], object],
    key: str,
    future: Future[Processed],
) -> None:
    """Pass a result on, in the thread that has made it."""
    done.put((key, future))
    wake()


def _failed(key: str, error: BaseException) -> MediaContent:
    """The content of a picture that could not be processed."""
    if isinstance(error, RequestError) and not isinstance(error, RefusedError):
        return MediaContent(key, error=str(error))
    ours = isinstance(error, EngineError)
    message = str(error) if ours else f"{type(error).__name__}: {error}"
    reason = f"a picture could not be processed: {message}"
    return MediaContent(key, error=reason, code="request_failed")
