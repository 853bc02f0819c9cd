"""An engine whose core is another process, and both use a made-up device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.config.engine import EngineConfig
from engine.core.build import build_core
from engine.core.client import CoreClient
from engine.core.inproc_client import InprocClient
from engine.rpc.launch import start_core
from engine.rpc.pixel_route import PixelRoute
from engine.rpc.zmq_client import EngineCoreClient
from support.fake_ipc import FakeDevice


@dataclass(frozen=True)
class FakeDeviceBuild:
    """Builds a core on the CPU, to whose made-up device clients may copy pixels."""

    directory: Path

    def __call__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> InprocClient:
        device = FakeDevice(self.directory, has_tensors=True)
        return build_core(config, clock=clock, open_memory=lambda _: device)


@contextmanager
def llm_with_fake_device(model: Path, device: FakeDevice, **options: Any) -> Iterator[LLM]:
    """The core is its own process, and the front end copies pixels to ``device``."""

    def open_core(config: EngineConfig) -> CoreClient:
        client = start_core(config, FakeDeviceBuild(device.directory))
        route_over(client, config, device)
        return client

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.frontend.session.open_core", open_core)
        llm = LLM(model, multiprocess=True, **options)
    with llm:
        yield llm


def route_over(client: EngineCoreClient, config: EngineConfig, device: FakeDevice) -> None:
    core = client.decided
    client.route = PixelRoute(config.media, core.device, lambda name: device)
