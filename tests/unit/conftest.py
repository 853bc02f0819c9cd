"""The fast tier: no test of it starts a process, opens a socket or waits for either."""

from __future__ import annotations

import multiprocessing.process
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

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
_refused: list[str] = []  # by the test that runs


def _refuse(what: str) -> Any:
    def refused(*args: Any, **options: Any) -> None:
        _refused.append(what)
        pytest.fail(f"this test {what}, which no unit test does: it belongs into tests/contract")

    return refused


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Of the tests in this folder, with all fixtures they use; what needs a GPU is skipped here."""
    _refused.clear()
    is_ours = item.path.is_relative_to(HERE) and item.get_closest_marker("gpu") is None
    with pytest.MonkeyPatch.context() as patch:
        for what, places in STARTS.items() if is_ours else ():
            for owner, name in places:
                patch.setattr(owner, name, _refuse(what))
        yield


@pytest.fixture(autouse=True)
def _nothing_was_started() -> Iterator[None]:
    """Said again where the first word was lost, in a thread or to an `except`."""
    yield
    assert not _refused, f"this test {_refused[0]}: it belongs into tests/contract"
