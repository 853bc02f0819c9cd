"""What a model directory says, and what is said of one that makes no sense."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.decide import decide_max_model_len
from engine.config.model import ModelConfig, ModelInfo, read_model_info
from engine.config.sched import SchedulerOptions
from engine.errors import ConfigError, ModelError

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 7}


def info(root: Path, config: Any = LLAMA, generation: Any = None) -> ModelInfo:
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        if content is not None:
            (root / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return read_model_info(root)


def test_end_of_text_ids_come_from_both_files(tmp_path: Path) -> None:
    found = info(tmp_path, {**LLAMA, "eos_token_id": 2}, {"eos_token_id": [5, 2]})
    assert found.eos_token_ids == (2, 5)
    assert found.generation == {"eos_token_id": [5, 2]}


def test_the_text_part_of_a_multimodal_model_counts(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "vocab_size": 9, "max_position_embeddings": 77}
    found = info(tmp_path, {**LLAMA, "text_config": text})
    assert (found.vocab_size, found.model_type) == (9, "gemma3_text")
    assert (found.architecture, found.max_position_embeddings) == ("LlamaForCausalLM", 77)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_saved_dtype_is_read_by_either_name(tmp_path: Path, key: str) -> None:
    assert info(tmp_path, {**LLAMA, key: "bfloat16"}).dtype == "bfloat16"


def test_the_longest_sequence_has_several_names(tmp_path: Path) -> None:
    assert info(tmp_path, {**LLAMA, "n_positions": 33}).max_position_embeddings == 33
    assert info(tmp_path).max_position_embeddings == 2048


def test_a_model_that_counts_no_positions_takes_any_length(tmp_path: Path) -> None:
    """A file of Mamba has no limit; one with a limit keeps it."""
    assert decide_max_model_len(SchedulerOptions(), info(tmp_path)) == 2048
    asked = SchedulerOptions(max_model_len=5000)
    assert decide_max_model_len(asked, info(tmp_path)) == 5000
    with pytest.raises(ConfigError, match="max_model_len is 5000, but the model was made for 33"):
        decide_max_model_len(asked, info(tmp_path, {**LLAMA, "n_positions": 33}))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "config.json is damaged"),
        ("[" * 100_000, "config.json is damaged"),
        ({"vocab_size": 3}, "neither architectures nor model_type"),
        ({**LLAMA, "architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    ],
)
def test_a_damaged_configuration_is_named(tmp_path: Path, config: Any, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        info(tmp_path, config)


def test_a_length_that_is_no_number_is_named(tmp_path: Path) -> None:
    found = info(tmp_path, {**LLAMA, "max_position_embeddings": "long"})
    with pytest.raises(ModelError, match="max_position_embeddings is 'long', must be a number"):
        _ = found.max_position_embeddings


def test_a_missing_vocabulary_size_is_named(tmp_path: Path) -> None:
    found = info(tmp_path, {"model_type": "llama"})
    with pytest.raises(ModelError, match="vocab_size is None"):
        _ = found.vocab_size


def test_a_directory_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        read_model_info(tmp_path)
    with pytest.raises(ModelError, match=r"does not exist.*name of a repository on a hub"):
        read_model_info("some-company/some-model")


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "int4"), ("load_format", "pt"), ("quantization", "gptq")],
)
def test_options_out_of_range_are_refused_with_the_choices(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{option} is .*must be"):
        ModelConfig(**{"model": "x", option: value})
