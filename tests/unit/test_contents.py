"""The front end's half of late pictures: what is processed when, for whom, and what is kept."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from support.late_pictures import Core, Hands, pixels, submission

from engine.errors import RefusedError, RequestError
from engine.frontend.contents import Contents
from engine.frontend.processing import Processed


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
    (late,) = front.core.brought or [None]
    assert late is None and front.hands.order == ["a", "a"]
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
