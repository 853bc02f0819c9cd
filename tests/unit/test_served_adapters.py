"""Which adapters a server offers as models, and how often it looks for one in a core."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.messages.adapters import AdapterInfo
from engine.server.adapters import ServedAdapters
from engine.server.errors import ApiError
from engine.server.names import ServedNames

NAMES = ServedNames(("box", "small"), ("/models/box",))


class Engine:
    """Knows adapters by name; ``looks`` are those that it was searched for."""

    has_adapters = True

    def __init__(self, *names: str) -> None:
        self.adapters = {name: AdapterInfo(name, 1, f"/{name}", "d", 8, 100) for name in names}
        self.looks: list[str] = []

    async def lora_adapters(self) -> list[AdapterInfo]:
        return list(self.adapters.values())

    async def find_adapter(self, name: str) -> AdapterInfo | None:
        self.looks.append(name)
        return self.adapters.get(name)

    async def remove_lora(self, name: str) -> bool:
        return self.adapters.pop(name, None) is not None


def served(*names: str) -> tuple[Engine, ServedAdapters]:
    engine: Any = Engine(*names)
    return engine, ServedAdapters(engine, NAMES)


def test_a_known_name_is_not_searched_again() -> None:
    engine, adapters = served("sql")
    asyncio.run(adapters.start())
    assert asyncio.run(adapters.has("sql")) and engine.looks == []
    engine.adapters["de"] = AdapterInfo("de", 2, "/de", "", 0, 0)  # in a directory
    for _ in range(3):
        assert asyncio.run(adapters.has("de"))
    assert engine.looks == ["de"]
    assert not asyncio.run(adapters.has("none")) and not asyncio.run(adapters.has("x" * 999))
    assert engine.looks == ["de", "none"], "a name that is too long is not searched"
    asyncio.run(adapters.unload("de"))
    assert not asyncio.run(adapters.has("de"))


def test_names_of_the_model_are_its_own() -> None:
    for name in ("box", "small", "/models/box"):
        _, adapters = served(name)
        with pytest.raises(ConfigError, match="has the name of the model: choose another name"):
            asyncio.run(adapters.start())
        assert asyncio.run(adapters.listed()) == []
        with pytest.raises(ApiError, match="which is a name of the base model"):
            asyncio.run(adapters.load(name, "/x", replaces=True))


def test_an_unknown_name_is_refused_with_near_ones() -> None:
    _, adapters = served("support-de", *(f"other{i}" for i in range(50)))
    asyncio.run(adapters.start())
    error = adapters.unknown("suport-de")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message.endswith("; did you mean 'support-de'?") and len(error.message) < 400
    with pytest.raises(ApiError, match="'suport-de'") as caught:
        asyncio.run(adapters.unload("suport-de"))
    assert caught.value.param == "lora_name"


def test_an_engine_without_adapters_is_not_searched() -> None:
    engine, adapters = served("sql")
    engine.has_adapters = False  # type: ignore[misc]
    asyncio.run(adapters.start())
    assert not asyncio.run(adapters.has("sql")) and asyncio.run(adapters.listed()) == []
    assert engine.looks == []
