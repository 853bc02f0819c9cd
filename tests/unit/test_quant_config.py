"""What directories say of their quantisation: read, or refused by name, whatever it is."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config.model import read_model_info
from engine.errors import ModelError
from engine.models.quant import FORMATS, format_of

GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
}
STATED: dict[str, dict[str, Any]] = {
    "awq": {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"bits": 4, "group_size": 128, "desc_act": True, "sym": True, "dynamic": {}},
    "fp8": {"activation_scheme": "static", "weight_block_size": [128, 128], "fmt": "e4m3"},
    "compressed-tensors": {
        "format": "int-quantized",
        "config_groups": {"group_0": GROUP},
        "ignore": ["lm_head"],
        "sparsity_config": {},
    },
    "mxfp4": {"modules_to_not_convert": ["lm_head"]},
}
JUNK = (None, [], {}, "x", -7, 3.5, True, [1, 2, 3], {"a": 1}, 10**30)


def written(path: Path, stated: Any) -> Path:
    content = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (path / "config.json").write_text(json.dumps({**content, "quantization_config": stated}))
    return path


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of nested tables."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def test_every_format_has_an_example() -> None:
    assert STATED.keys() == FORMATS.keys()


@pytest.mark.parametrize("method", STATED)
def test_what_tools_write_is_understood(tmp_path: Path, method: str) -> None:
    found = format_of(
        read_model_info(written(tmp_path, {"quant_method": method, **STATED[method]}))
    )
    assert found is not None and found.name == method
    shapes = [field.shapes for field in found.fields("model.layers.0.mlp.up_proj", (256, 128))]
    assert shapes and all(shapes)


@pytest.mark.parametrize("method", STATED)
def test_junk_is_refused_by_name_or_makes_sense(tmp_path: Path, method: str, seed: int) -> None:
    dice, num_refused = random.Random(seed), 0
    for _ in range(100):
        stated = {"quant_method": method, **copy.deepcopy(STATED[method])}
        container, key = dice.choice(list(places(stated)))
        container[key] = dice.choice(JUNK)
        try:
            found = format_of(read_model_info(written(tmp_path, stated)))
            if found is not None:
                found.fields("model.layers.0.mlp.up_proj", (256, 128))
        except ModelError:
            num_refused += 1
    assert num_refused


def test_a_plain_directory_has_no_format(tmp_path: Path) -> None:
    for nothing in (None, {}):
        assert format_of(read_model_info(written(tmp_path, nothing))) is None
