"""Options for LoRA adapters: what they take, and which mistakes are named."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from engine.config.args import EngineArgs
from engine.config.cli import add_options, read_options
from engine.config.lora import LoRAConfig, LoRAModule
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_modules": ["sql=x"]}, "lora_modules is .* and enable_lora is False"),
        ({"adapter_dir": "x"}, "adapter_dir is .* and enable_lora is False: .*--enable-lora"),
        ({"enable_lora": True, "lora_modules": ["sql"]}, "has 'sql', must be NAME=PATH, e.g. sql="),
        ({"enable_lora": True, "lora_modules": ["=x"]}, "has '=x', must be NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["{x"]}, "has '{x', which is not JSON"),
        ({"enable_lora": True, "lora_modules": [{"name": 3, "path": "x"}]}, "must be NAME=PATH"),
        ({"enable_lora": True, "lora_modules": ["a=x", "a=y"]}, "lora_modules has 'a' twice"),
        ({"max_loras": 0}, "max_loras is 0, must be in 1..4096"),
        ({"max_lora_rank": 0}, "max_lora_rank is 0, must be at least 1"),
        ({"max_loras": 4, "max_cpu_loras": 2}, r"max_cpu_loras is 2, must be at least 4 \(max_"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineArgs(**options).create_config()


def test_modules_are_named_as_on_vllms_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, LoRAConfig)
    line = ["--lora-modules", "a=x=y", '{"name": "b", "path": "p", "base_model_name": "m"}']
    line += ["--lora-modules", '[{"name": "c", "path": "q"}]', "--enable-lora"]
    options = read_options(parser.parse_args(line), LoRAConfig)
    assert options.modules == (LoRAModule("a", "x=y"), LoRAModule("b", "p"), LoRAModule("c", "q"))
