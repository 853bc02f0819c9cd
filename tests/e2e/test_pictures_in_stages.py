"""Pictures in prompts of a model that stages of a pipeline compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from e2e.picture_cases import picture, picture_without_pixels
from e2e.seeing_models import make_seeing_model
from e2e.test_pictures import GREEDY, PROMPTS, prompt_of

from engine import LLM
from engine.messages.requests import MediaItem
from engine.mm.encoding import Encoded, ItemEncoder

OPTIONS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 4}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm", "qwen3-vl", "qwen3.5", "gemma3"])
def test_stages_see_the_pictures(name: str, tmp_path: Path) -> None:
    """Also where vectors are added to the outputs of layers of several stages, where positions have
    axes, and where tokens of a picture see later ones."""
    path, found = make_seeing_model(tmp_path / name, name), []
    image = "<start_of_image>" if name == "gemma3" else "<image>"
    prompts = [prompt_of(text.replace("<image>", image), pictures) for text, pictures in PROMPTS]
    for count in (1, 2, 3):
        sizes = {"pipeline_parallel_size": count, "num_kv_blocks": 200}
        with LLM(path, max_num_batched_tokens=64, **OPTIONS, **sizes, log_level="error") as model:
            outputs = model.generate(prompts, GREEDY, use_tqdm=False)
            outputs += model.generate(prompts[:1], GREEDY, use_tqdm=False)
        found.append([each.outputs[0].token_ids for each in outputs])
    assert found[1:] == [found[0]] * 2


@pytest.mark.slow
def test_a_picture_that_cannot_be_encoded_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = picture_without_pixels(monkeypatch)
    prompts = [prompt_of("<image> a", [each]) for each in (picture(9, 9), bad, picture(8, 8))]
    path, found = make_seeing_model(tmp_path / "llava", "llava"), []
    for count in (1, 2):
        with LLM(path, pipeline_parallel_size=count, num_kv_blocks=200, **OPTIONS) as model:
            outputs = model.generate(prompts, GREEDY, use_tqdm=False)
            assert "cannot be encoded" in str(outputs[1].outputs[0].error)
            outputs += model.generate(prompts[2:], GREEDY, use_tqdm=False)
            outputs += model.generate(prompts[1:2], GREEDY, use_tqdm=False)  # alone in its step
            outputs += model.generate(prompts[:1], GREEDY, use_tqdm=False)
        found.append(
            [(each.outputs[0].token_ids, each.outputs[0].finish_reason) for each in outputs]
        )
        reasons = [reason for _, reason in found[-1]]
        assert reasons == ["length", "error", "length", "length", "error", "length"]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_picture_that_only_the_first_stage_cannot_encode_is_an_error(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other stages have encoded it, and must not answer from what the first one lacks."""

    def run(self: ItemEncoder, items: Sequence[MediaItem]) -> Encoded:
        return Encoded({}, {item.hash: "there is no memory" for item in items})

    monkeypatch.setattr(ItemEncoder, "run", run)
    path = make_seeing_model(tmp_path / "llava", "llava")
    words: dict[str, Any] = {"prompt": "a b"}
    sees = prompt_of("<image> a", [picture(9, 9)])
    with LLM(path, pipeline_parallel_size=count, num_kv_blocks=200, **OPTIONS) as model:
        for prompts in ([words, sees], [sees], [words], [sees, words, sees]):
            outputs = model.generate(prompts, GREEDY, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                answer = output.outputs[0]
                assert answer.finish_reason == ("length" if prompt is words else "error")
                assert prompt is words or "there is no memory" in str(answer.error)
