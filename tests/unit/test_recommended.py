"""Sampling values that a model's makers recommend: which are taken, what becomes of odd ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.config.model import ModelConfig
from engine.errors import ConfigError, ModelError
from engine.frontend.recommended import recommended_sampling

GOOD: dict[str, Any] = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}


def directory(path: Path, content: object = None) -> Path:
    path.mkdir(exist_ok=True)
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (path / "generation_config.json").write_text(text)
    return path


def found(path: Path, **options: Any) -> dict[str, Any]:
    return dict(recommended_sampling(ModelConfig(model=str(path), **options)))


def test_what_the_file_recommends_is_taken_by_the_names_of_requests(tmp_path: Path) -> None:
    others = {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "max_length": 9,
        "transformers_version": "",
    }
    model = directory(tmp_path, {**GOOD, "max_new_tokens": 64, **others})
    assert found(model) == {**GOOD, "max_tokens": 64}


@pytest.mark.parametrize("content", [None, {}, {"eos_token_id": 2}, dict.fromkeys(GOOD)])
def test_where_nothing_is_recommended_nothing_holds(content: object, tmp_path: Path) -> None:
    assert found(directory(tmp_path, content)) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", 2.5),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", 20.5),
        ("top_k", False),
        ("min_p", "none"),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
    ],
)
def test_a_value_that_cannot_be_used_is_left_out_and_named(
    key: str, value: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = directory(tmp_path, {**GOOD, key: value})
    with caplog.at_level(logging.WARNING, "engine"):
        values = found(model)
    assert values == {name: own for name, own in GOOD.items() if name != key}
    (line,) = caplog.messages
    for part in (str(model / "generation_config.json"), key, str(value), "must be"):
        assert part in line
    assert line.count(key) == 1


@pytest.mark.parametrize(
    ("content", "values"),
    [
        ({"do_sample": False}, {}),
        ({"do_sample": False, "temperature": 0.0}, {"temperature": 0.0}),
        ({"top_k": 20.0, "temperature": 1}, {"top_k": 20, "temperature": 1}),
        ({"top_k": -1}, {"top_k": -1}),
    ],
)
def test_do_sample_says_nothing_and_whole_numbers_may_have_a_point(
    content: object, values: dict[str, Any], tmp_path: Path
) -> None:
    assert found(directory(tmp_path, content)) == values


@pytest.mark.parametrize("text", ["[1]", "{", "\x00"])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json is damaged"):
        found(directory(tmp_path, text))


def test_another_directory_or_none(tmp_path: Path) -> None:
    model = directory(tmp_path / "model", GOOD)
    other = directory(tmp_path / "other", {"top_k": 7})
    assert found(model, generation_config=str(other)) == {"top_k": 7}
    assert found(model, generation_config="vllm") == {}
    empty = directory(tmp_path / "empty")
    for wrong in (str(empty), str(tmp_path / "nowhere"), "Auto", ""):
        with pytest.raises(ConfigError, match=r"generation_config is '.*', must be 'auto'"):
            found(model, generation_config=wrong)


def test_an_override_is_put_on_top(tmp_path: Path) -> None:
    model = directory(tmp_path, GOOD)
    override = {"top_k": 7, "min_p": None, "max_new_tokens": 5}
    wanted = {**GOOD, "top_k": 7, "max_tokens": 5}
    del wanted["min_p"]
    assert found(model, override_generation_config=override) == wanted
    alone = found(model, generation_config="vllm", override_generation_config=override)
    assert alone == {"top_k": 7, "max_tokens": 5}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"temprature": 1}, "has the unknown key 'temprature'; .* did you mean 'temperature'"),
        ({"eos_token_id": 1}, "has the unknown key 'eos_token_id'; there are: temperature, "),
        ({"temperature": 3}, "override_generation_config: temperature is 3, must be in"),
        ({"top_k": "20"}, "override_generation_config: top_k is '20'"),
    ],
)
def test_a_mistake_in_an_override_is_an_error(
    override: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        found(directory(tmp_path, GOOD), override_generation_config=override)


def test_what_holds_is_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = directory(tmp_path, {"temperature": 0.6, "top_k": 20})
    with caplog.at_level(logging.INFO, "engine"):
        found(model, override_generation_config={"top_k": 5})
        (line,) = caplog.messages
        assert "temperature 0.6, top_k 5" in line and "override_generation_config" in line
        assert str(model / "generation_config.json") in line
        caplog.clear()
        found(model, generation_config="vllm")
        assert not caplog.messages
