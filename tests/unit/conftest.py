"""The fast tier: what starts a process or opens a socket belongs elsewhere, and is counted."""

from __future__ import annotations

import multiprocessing.process
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from support import house

HERE = Path(__file__).parent
STARTS = {
    "starts a process": (
        (subprocess.Popen, "__init__"),
        (multiprocessing.process.BaseProcess, "start"),
        (os, "fork"),
        (os, "posix_spawn"),
        (os, "system"),
    ),
    "opens a socket": (
        (zmq.Context, "socket"),
        (socket.socket, "bind"),
        (socket.socket, "connect"),
    ),
}
_noted: set[str] = set()  # by the test that runs


def _noting(what: str, function: Any) -> Any:
    def noted(*args: Any, **options: Any) -> Any:
        _noted.add(what)
        return function(*args, **options)

    return noted


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watches the tests in this folder, with all fixtures they use."""
    _noted.clear()
    with pytest.MonkeyPatch.context() as patch:
        for what, places in STARTS.items() if item.path.is_relative_to(HERE) else ():
            for owner, name in places:
                patch.setattr(owner, name, _noting(what, getattr(owner, name)))
        yield


@pytest.fixture(autouse=True)
def _what_was_started_is_counted() -> Iterator[None]:
    yield
    house.count("a unit test belongs into tests/contract", sorted(_noted))


@pytest.fixture
def warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Also if an engine that ran in this process before was given another level."""
    caplog.set_level("WARNING", "engine")


@pytest.fixture
def gate() -> Iterator[threading.Semaphore]:
    """Steps of the core, let through one by one; at the end all of them."""
    steps = threading.Semaphore(0)
    yield steps
    steps.release(10_000)
