"""Who attaches to a core must have the tokenizer of its model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.core_clients import HostedCore, own_place
from support.spawned import FakeBuild, fake_config

from engine.assets import BOX_MODEL
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.core.inproc_client import InprocClient
from engine.errors import ConfigError
from engine.rpc.launch import open_core


@dataclass(frozen=True)
class ModelBuild(FakeBuild):
    """A fake core that says which model it runs."""

    model: str = ""

    def __call__(self, config: EngineConfig, **options: Any) -> InprocClient:
        client = super().__call__(config, **options)
        client.decided = replace(client.decided, model=self.model)
        return client


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_place(monkeypatch) as path:
        yield path


def attach(core: HostedCore, model: ModelConfig) -> str:
    """Model of the core, as a client with this one hears of it."""
    config = replace(fake_config(core_address=core.address.data), model=model)
    client = open_core(config)
    told: str = client.decided.model
    client.shutdown()
    return told


BOX = ModelConfig(model=str(BOX_MODEL))


def test_a_model_that_was_not_named_is_the_one_in_the_box() -> None:
    with HostedCore(ModelBuild(model="/models/other")) as core:
        with pytest.raises(ConfigError, match="runs /models/other, but this engine has no model"):
            attach(core, BOX)
        assert core.host.health().state == "ready"
        for named in (
            ModelConfig(model="/models/other"),
            ModelConfig(model="/copies/of-it"),
            replace(BOX, tokenizer="/models/other"),
            replace(BOX, skip_tokenizer_init=True),
        ):
            assert attach(core, named) == "/models/other"


@pytest.mark.parametrize("model", ["", str(BOX_MODEL), f"/elsewhere/{BOX_MODEL.name}"])
def test_the_box_is_the_same_wherever_it_was_installed(model: str) -> None:
    with HostedCore(ModelBuild(model=model)) as core:
        assert attach(core, BOX) == model


def test_a_directory_whose_name_is_no_text_harms_nobody() -> None:
    with HostedCore(ModelBuild(model="/models/\udcff")) as core:
        assert attach(core, ModelConfig(model="m")) == "/models/?"
