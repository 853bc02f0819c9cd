"""Fixtures of suites that are spread over several files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.core_clients import KINDS, HostedCore, a_client, own_place
from support.pooled import Pools, make_model
from support.spawned import FakeBuild

from engine.config.model import ModelConfig
from engine.text.tokenizer import Tokenizer, load_tokenizer

# -- clients of a core


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def opened() -> Iterator[Callable[..., Any]]:
    """Opens clients that are closed after the test."""
    with ExitStack() as stack:
        yield lambda kind, build=None: stack.enter_context(a_client(kind, build))


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


# -- processes that make ids and text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return make_model(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(model: ModelConfig) -> Tokenizer:
    return load_tokenizer(model)


@pytest.fixture
def pools(model: ModelConfig) -> Iterator[Pools]:
    with Pools(model) as pools:
        yield pools
