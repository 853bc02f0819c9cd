"""Adapters of models that see, by the names of modules in older versions of transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import picture
from e2e.seeing_models import make_seeing_model, reference
from e2e.test_pictures import GREEDY, SMALL, prompt_of
from safetensors.torch import load_file, save_file
from support.adapter_files import save, trained

from engine import LLM, LoRARequest
from engine.errors import ConfigError

TEXT_HALF = r".*(language_model|text_model).*\.(q_proj|v_proj|down_proj)"
MARK = {"qwen2.5-vl": "<fake_token_around_image><image><end_of_utterance>"}
# What older versions write in place of what transformers 5 writes.
OLD = {
    "llava": ("model.language_model.", "language_model.model."),
    "qwen2.5-vl": ("model.language_model.", "model."),
    "smolvlm": ("model.text_model.", "model.text_model."),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("seeing")
    return cache(lambda name: make_seeing_model(root / name, name))


@pytest.mark.parametrize("name", OLD)
def test_older_names_are_those_of_the_text_half(models: Any, tmp_path: Path, name: str) -> None:
    path, (new, old) = models(name), OLD[name]
    new_names = save(
        trained(reference.__wrapped__(path), size=4.0, target_modules=TEXT_HALF), tmp_path / "new"
    )
    old_names = tmp_path / "old"
    old_names.mkdir()
    file = "adapter_model.safetensors"
    tensors = load_file(new_names / file)
    renamed = {
        key.replace(f"base_model.model.{new}", f"base_model.model.{old}"): tensor
        for key, tensor in tensors.items()
    }
    assert (renamed != tensors) == (new != old)
    save_file(renamed, old_names / file)
    config = json.loads((new_names / "adapter_config.json").read_text())
    config["target_modules"] = r".*\.(q_proj|v_proj|down_proj)"
    (old_names / "adapter_config.json").write_text(json.dumps(config))
    prompt = prompt_of(f"a {MARK.get(name, '<image>')} b", [picture(30, 40)])
    requests = [
        None,
        LoRARequest("new", 1, str(new_names)),
        LoRARequest("old", 2, str(old_names)),
    ]
    with LLM(path, enable_lora=True, max_loras=2, **SMALL) as llm:
        outputs = llm.generate([prompt] * 3, GREEDY, lora_request=requests, use_tqdm=False)
    plain, by_new, by_old = ([*each.outputs[0].token_ids] for each in outputs)
    assert plain != by_new == by_old


@pytest.mark.parametrize(
    ("name", "targets", "module"),
    [
        ("llava", ["q_proj", "v_proj"], "model.vision_tower"),
        ("qwen2.5-vl", "all-linear", "model.visual"),
    ],
)
def test_an_adapter_of_the_encoder_is_refused(
    models: Any, tmp_path: Path, name: str, targets: Any, module: str
) -> None:
    path = models(name)
    adapter = save(trained(reference.__wrapped__(path), target_modules=targets), tmp_path / "all")
    with LLM(path, enable_lora=True, **SMALL) as llm:
        message = f"it changes {module}.*, a module of the encoder of pictures"
        with pytest.raises(ConfigError, match=message):
            llm.llm_engine.add_lora(LoRARequest("all", 1, str(adapter)))
