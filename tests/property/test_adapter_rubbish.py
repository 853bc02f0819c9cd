"""Adapters' files with random damage are read, or refused with a reason; nothing else happens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support import adapter_files

from engine.lora.adapter import AdapterError
from engine.lora.files import WEIGHTS, read_adapter
from engine.lora.peft_config import CONFIG

ROUNDS = 120
KEYS = (
    *("r", "lora_alpha", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"),
    *("layers_to_transform", "layers_pattern", "modules_to_save", "target_parameters", "bias"),
    *("use_dora", "use_rslora", "lora_bias", "peft_type", "init_lora_weights", "new_key"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 3, 4, -1, 1.5, 1e400, 10**40, "", "q_proj", ".*", "(", "all-linear"),
    *([], ["q_proj"], [1], [None], [[]], {}, {"q_proj": 4}, {"(": 4}, {".*": "x"}, {"a": {}}),
)
MEMBERS = (-1, 0, 1, 7, 2**31, 2**63, 2**70, None, "x", 1.5, [], True)


def made(root: Path, use_dora: bool) -> Path:
    tensors = {
        **adapter_files.product("model.layers.0.self_attn.q_proj"),
        **adapter_files.product("model.layers.1.self_attn.v_proj", outs=3),
    }
    if use_dora:
        for name in [name for name in tensors if name.endswith("lora_B.weight")]:
            magnitude = name.replace("lora_B.weight", "lora_magnitude_vector")
            tensors[magnitude] = torch.ones(len(tensors[name]))
    return adapter_files.write(root, adapter_files.config_of(use_dora=use_dora), tensors)


def damage_config(dice: random.Random, root: Path) -> None:
    config = json.loads((root / CONFIG).read_text())
    for _ in range(dice.randint(1, 3)):
        config[dice.choice(KEYS)] = dice.choice(VALUES)
    (root / CONFIG).write_text(json.dumps(config))


def damage_header(dice: random.Random, root: Path) -> None:
    content = (root / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    entry = header[dice.choice([key for key in header if key != "__metadata__"])]
    field = dice.choice(["dtype", "shape", "data_offsets"])
    if field == "dtype" or dice.random() < 0.2:
        entry[field] = dice.choice([*MEMBERS, "F32", "BF16", "I8", "F8_E4M3"])
    else:
        entry[field][dice.randrange(len(entry[field]))] = dice.choice(MEMBERS)
    text = json.dumps(header).encode()
    (root / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def damage_bytes(dice: random.Random, root: Path) -> None:
    file = root / dice.choice([CONFIG, WEIGHTS])
    content = bytearray(file.read_bytes())
    for _ in range(dice.randint(1, 4)):
        content[dice.randrange(min(len(content), 400))] = dice.randrange(256)
    if dice.random() < 0.3:
        del content[dice.randrange(len(content)) :]
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [damage_config, damage_header, damage_bytes])
def test_damaged_files(tmp_path: Path, damage: Any, seed: int) -> None:
    dice, outcomes = random.Random(seed), set()
    for number in range(ROUNDS):
        root = made(tmp_path / str(number), dice.random() < 0.3)
        damage(dice, root)
        try:
            adapter = read_adapter(root, "one")
        except AdapterError as error:
            outcomes.add("refused")
            assert str(error).startswith(f"adapter 'one' at {root}: ")
        else:
            outcomes.add("read")
            assert all(one.a.shape[0] == one.b.shape[1] for one in adapter.modules.values())
    assert "refused" in outcomes
