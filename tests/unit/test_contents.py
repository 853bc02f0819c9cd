"""The front end's half of late pictures: what is processed when, for whom, and what is kept."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.late_pictures import Core, Hands, pixels, submission
from support.patience import WAIT_SECONDS

from engine.errors import RefusedError, RequestError
from engine.frontend.contents import Contents
from engine.frontend.picture_workers import PictureTask
from engine.frontend.processing import Processed, ThreadedPictures
from engine.frontend.text_workers import TaskQueue
from engine.ipc.pixel_segments import share


class Front:
    def __init__(self, num_at_once: int = 2, **options: Any) -> None:
        self.core, self.hands, self.wakes = Core(), Hands(num_at_once), 0
        client: Any = self.core
        self.contents = Contents(client, self.hands, self.wake, **options)

    def wake(self) -> None:
        self.wakes += 1

    def start(self, names: str, keys: str) -> None:
        self.contents.start(submission(names.split(), keys.split()))

    def finish(self, key: str, size: int = 4) -> None:
        self.hands.finish(key, size)
        self.contents.deliver()


def test_content_is_brought_once_for_all_sequences_of_a_request() -> None:
    front = Front()
    front.start("1 2", "a")
    front.contents.deliver()
    assert front.core.take() == [] and front.wakes == 0
    front.finish("a")
    assert front.core.take() == [(["1", "2"], "a", "")] and front.wakes == 1
    front.contents.end("1")
    assert len(front.contents) == 1
    front.contents.end("2")
    front.contents.end("unknown")
    assert len(front.contents) == 0


def test_a_picture_of_two_requests_is_processed_once() -> None:
    front = Front()
    front.start("1", "a")
    front.start("2", "a b")
    front.finish("a")
    front.start("3", "a")
    assert front.hands.order == ["a", "b"]
    assert front.core.take() == [(["1", "2"], "a", ""), (["3"], "a", "")]


@pytest.mark.parametrize(
    ("error", "message", "code"),
    [
        (RequestError("a picture is damaged: no data"), "a picture is damaged: no data", "invalid"),
        (RefusedError("no process"), "a picture could not be processed: no process", "request"),
        (ValueError("why"), "a picture could not be processed: ValueError: why", "request_failed"),
    ],
)
def test_an_error_is_brought_and_a_later_request_tries_again(
    error: Exception, message: str, code: str
) -> None:
    front = Front()
    front.start("1", "a b")
    front.start("2", "a")
    front.hands.fail("a", error)
    front.contents.deliver()
    assert front.core.brought[0][1].code.startswith(code)
    assert front.core.take() == [(["1", "2"], "a", message)]
    front.start("3", "a")
    assert front.hands.order == ["a", "b", "a"]
    for name in "123":
        front.contents.end(name)
    assert len(front.contents) == 0


def test_an_abort_cancels_what_only_that_request_needs() -> None:
    front = Front(num_at_once=2)
    front.start("1", "a b c")
    front.start("2", "b")
    front.contents.end("1")
    assert front.hands.begun["a"].cancelled() and not front.hands.begun["b"].cancelled()
    front.contents.deliver()
    assert front.hands.order == ["a", "b"], "c is not processed at all"
    front.finish("b")
    assert front.core.take() == [(["2"], "b", "")]
    front.contents.end("2")
    assert len(front.contents) == 0


def test_what_was_being_processed_at_an_abort_is_dropped() -> None:
    front = Front(cache_bytes=100)
    front.start("1", "a")
    front.hands.begun["a"].set_running_or_notify_cancel()
    front.contents.end("1")
    front.start("2", "a")
    assert not front.core.brought and front.hands.order == ["a", "a"]
    front.finish("a")
    assert front.core.take() == [(["2"], "a", "")]


def test_pictures_of_ended_requests_are_kept_within_the_bound() -> None:
    front = Front(cache_bytes=10)
    for name, key in ("1", "a"), ("2", "b"), ("3", "c"):
        front.start(name, key)
        front.finish(key)
    for name in "123":
        front.contents.end(name)
    assert len(front.contents) == 2, "two of four bytes fit"
    front.core.take()
    front.start("4", "b")
    assert front.core.take() == [(["4"], "b", "")], "at once, from the cache"
    front.contents.reset()
    assert len(front.contents) == 1, "what is in use stays"
    front.contents.end("4")
    front.contents.reset()
    assert len(front.contents) == 0


def test_no_more_pictures_are_kept_than_files_may_be_open() -> None:
    front = Front(cache_bytes=1000, most_idle=2)
    for name, key in ("1", "a"), ("2", "b"), ("3", "c"):
        front.start(name, key)
        front.finish(key)
    for name in "123":
        front.contents.end(name)
    front.core.take()
    front.start("4", "c")
    assert front.core.take() == [(["4"], "c", "")]
    assert len(front.contents) == 2


def test_content_is_freed_when_it_is_dropped() -> None:
    """Not by the next collection of garbage, since it holds files and memory."""
    front = Front()
    front.start("1", "a")
    made = Processed(pixels())
    seen = weakref.ref(made)
    gc.disable()
    try:
        front.hands.begun.pop("a").set_result(made)
        front.contents.deliver()
        del made
        front.core.take()
        assert seen() is not None
        front.contents.end("1")
        assert seen() is None
    finally:
        gc.enable()


def test_no_more_is_processed_ahead_than_the_bound_allows() -> None:
    front = Front(num_at_once=1, most_bytes=8)
    for name in "123":
        front.start(name, f"a{name} b{name}")
    for key in ("a1", "b1"):
        front.finish(key)
    assert front.hands.order == ["a1", "b1"], "the first request can finish and make room"
    front.contents.end("1")
    assert front.hands.order == ["a1", "b1", "a2"]
    front.finish("a2", 100)
    assert front.hands.order[-1] == "b2", "no request has all of its pictures yet"
    front.finish("b2")
    assert front.hands.order[-1] == "b2"
    front.contents.end("2")
    assert front.hands.order[-1] == "a3"


def test_closing_ends_everything() -> None:
    front = Front()
    front.start("1", "a b c")
    begun = front.hands.begun["a"]
    front.contents.close()
    front.contents.close()
    front.contents.deliver()
    front.contents.end("1")
    assert begun.cancelled() and front.hands.is_closed and not len(front.contents)
    assert front.core.take() == []


@dataclass(eq=False)
class Picture:
    """A picture of a request, in place of one with a header."""

    is_damaged: bool = False
    num_pixels: int = 100
    num_bytes: int = 100
    gate: threading.Event | None = None

    def pixels(self) -> Any:
        if self.gate is not None:
            assert self.gate.wait(WAIT_SECONDS)
        if self.is_damaged:
            raise RequestError("a picture is damaged")
        return pixels()


def with_picture(name: str, picture: Picture) -> Any:
    requests = [SimpleNamespace(request_id=name)]
    return SimpleNamespace(requests=requests, pictures={"a": picture})


@pytest.mark.parametrize("what", ["processed", "damaged", "aborted"])
def test_the_file_of_a_picture_is_freed_when_it_has_been_processed(what: str) -> None:
    """Not by the next collection of garbage, which may come after thousands of files."""
    has_come, gate = threading.Semaphore(0), threading.Event()
    pictures: Any = SimpleNamespace(pixels=Picture.pixels)
    client: Any = Core()
    contents = Contents(client, ThreadedPictures(pictures, shares=False), has_come.release)
    picture = Picture(is_damaged=what == "damaged", gate=gate)
    seen = weakref.ref(picture)
    gc.disable()
    try:
        contents.start(with_picture("1", picture))
        del picture
        if what == "aborted":
            contents.end("1")
        gate.set()
        assert has_come.acquire(timeout=WAIT_SECONDS)
        contents.deliver()
        if what != "aborted":
            assert client.take()[0][2] == ("a picture is damaged" if what == "damaged" else "")
        contents.close()  # its threads end, and have nothing any more
        for thread in threading.enumerate():
            if thread.name.startswith("processing"):
                thread.join(WAIT_SECONDS)
        assert seen() is None
    finally:
        gc.enable()


def test_a_task_does_not_keep_its_picture() -> None:
    picture: Any = Picture()
    seen = weakref.ref(picture)
    gc.disable()
    try:
        task = PictureTask(picture)
        task.finish(RequestError("damaged"))
        del task, picture
        assert seen() is None
    finally:
        gc.enable()


def test_large_files_of_small_pictures_are_sent_to_a_process_one_at_a_time() -> None:
    """Together they would exceed what it reads at once, and end it."""
    queue = TaskQueue()
    worker: Any = SimpleNamespace(is_idle=False, is_down=False)
    queue.workers.append(worker)
    large: Any = Picture(num_bytes=48 << 20)
    small: Any = Picture()
    queue.put([PictureTask(each) for each in (large, large, large, small, small)])
    assert [len(queue.take(worker)) for _ in range(4)] == [1, 1, 1, 2]


def test_a_core_gets_handles_though_too_many_files_are_open_here() -> None:
    front = Front(cache_bytes=1000)
    front.start("1", "a")
    made = Processed(share(pixels()))
    front.hands.begun.pop("a").set_result(made)
    front.contents.deliver()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        front.start("2", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    ids, content = front.core.brought[-1]
    assert ids == ["2"] and made.segment is not None and content.shared == made.segment.handle
    front.contents.close()


def test_a_request_whose_picture_gets_no_thread_fails_alone() -> None:
    front = Front()
    hands: Any = front.hands
    begin = hands.begin

    def fails(picture: Any) -> Any:
        raise RuntimeError("can't start new thread")

    hands.begin = fails
    front.start("1", "a")
    front.contents.deliver()
    assert front.core.brought[0][1].code == "request_failed"
    assert "can't start new thread" in front.core.take()[0][2]
    hands.begin = begin
    front.start("2", "a")
    front.finish("a")
    assert front.core.take() == [(["2"], "a", "")]
