"""Fixtures of suites that are spread over several files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_clients import HostedCore, own_place
from spawned import FakeBuild


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sockets lie in a directory of the test's own, which is empty at its end."""
    with own_place(monkeypatch) as path:
        yield path


@pytest.fixture
def core(place: Path) -> Iterator[HostedCore]:
    """A core behind sockets, in a thread of this process."""
    with HostedCore(FakeBuild()) as core:
        yield core
