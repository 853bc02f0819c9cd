"""Pictures in prompts: tokens equal to those of transformers, and errors that say what to do."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.picture_cases import as_file, picture, picture_without_pixels
from e2e.seeing_models import CASES, make_seeing_model, processor_of, reference
from PIL import Image
from safetensors.torch import load_file, save_file

from engine import LLM, SamplingParams
from engine.errors import ConfigError, ModelError, RequestError
from engine.mm import compute
from engine.mm.encoding import ItemEncoder
from engine.pictures.processing import ImageProcessor

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
SMALL = {"num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 200}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("seeing")

    @cache
    def make(name: str) -> Path:
        return make_seeing_model(root / name, name)

    return make


@pytest.fixture(scope="module")
def smolvlm(models: Any) -> Iterator[LLM]:
    with LLM(models("smolvlm"), max_num_batched_tokens=64, **SMALL) as llm:
        yield llm


def prompt_of(text: str, pictures: Sequence[Any]) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(pictures)}}


def expected(path: Path, name: str, text: str, pictures: Sequence[Image.Image]) -> list[int]:
    """Token ids of prompt and answer, by transformers."""
    images = [each.convert("RGB") for each in pictures] or None
    inputs = processor_of(path, name)(images=images, text=text, return_tensors="pt")
    read = ["input_ids", "attention_mask", "pixel_values", "pixel_attention_mask", "image_sizes"]
    if name.startswith("qwen"):
        read += ["image_grid_thw", "mm_token_type_ids"]
    if name == "gemma3":
        read.append("token_type_ids")
    inputs = {key: value for key, value in inputs.items() if key in read}
    with torch.inference_mode():
        return (
            reference(path)
            .generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None)[0]
            .tolist()
        )


def tokens_of(output: Any) -> list[int]:
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


THREE = [picture(128, 128, "RGBA"), picture(40, 40, "CMYK"), picture(300, 33, "P")]
PROMPTS = [
    ("what is <image> this?", [picture(50, 30)]),
    ("<image><image>", [picture(1, 1), picture(30, 200, "L")]),
    ("none", []),
    ("a <image> b <image> c <image>", THREE),
]


def mark_of(name: str) -> str:
    """The text that a picture has in a prompt."""
    if name == "gemma3":
        return "<start_of_image>"
    return "<fake_token_around_image><image><end_of_utterance>" if "qwen" in name else "<image>"


def prompts_of(name: str) -> list[tuple[str, list[Image.Image]]]:
    """``PROMPTS`` for a model, which may need tokens around each picture."""
    mark = mark_of(name)
    prompts = [(text.replace("<image>", mark), pictures) for text, pictures in PROMPTS]
    return [*prompts, (f"\n{mark}\n\n{mark}\n\n\n?", THREE[:2])]


@pytest.mark.parametrize("name", CASES)
def test_tokens_equal_those_of_transformers(models: Any, name: str) -> None:
    """In one batch, with chunks that end within pictures."""
    path, prompts = models(name), prompts_of(name)
    with LLM(path, max_num_batched_tokens=24, **SMALL) as llm:
        outputs = llm.generate([prompt_of(*each) for each in prompts], GREEDY, use_tqdm=False)
    for output, (text, pictures) in zip(outputs, prompts, strict=True):
        assert tokens_of(output) == expected(path, name, text, pictures), text


def test_both_names_of_tensors_are_read(models: Any, tmp_path: Path) -> None:
    """Published LLaVA models have other names than the modules of transformers 5."""
    path = models("llava")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(path / "model.safetensors")
    assert "language_model.model.norm.weight" in stored
    renamed = {
        f"model.{name}".replace("language_model.model.", "language_model.").replace(
            "model.language_model.lm_head.", "lm_head."
        ): tensor
        for name, tensor in stored.items()
    }
    assert "model.language_model.norm.weight" in renamed and "lm_head.weight" in renamed
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text, pictures = PROMPTS[0]
    with LLM(tmp_path, **SMALL) as llm:
        (output,) = llm.generate(prompt_of(text, pictures), GREEDY, use_tqdm=False)
    assert tokens_of(output) == expected(path, "llava", text, pictures)


def test_a_directory_of_qwen2_5_as_published(models: Any, tmp_path: Path) -> None:
    """With sizes at the top of config.json, and without the names of modules of transformers 5."""
    path = models("qwen2.5-vl")
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((path / "config.json").read_text())
    half = config.pop("text_config")
    given = half.pop("rope_parameters")
    section = {"type": "mrope", "mrope_section": given["mrope_section"]}
    flat = {**half, **config, "rope_theta": given["rope_theta"], "rope_scaling": section}
    flat["vision_config"]["model_type"] = flat["model_type"] = "qwen2_5_vl"
    (tmp_path / "config.json").write_text(json.dumps(flat))
    stored = load_file(path / "model.safetensors")
    names = {
        name: name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        for name in stored
    }
    assert {"model.norm.weight", "visual.merger.ln_q.weight"} <= set(names.values())
    renamed = {names[name]: tensor for name, tensor in stored.items()}
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    text, pictures = prompts_of("qwen2.5-vl")[1]
    with LLM(tmp_path, **SMALL) as llm:
        (output,) = llm.generate(prompt_of(text, pictures), GREEDY, use_tqdm=False)
    assert tokens_of(output) == expected(path, "qwen2.5-vl", text, pictures)


def test_a_prefix_with_the_same_picture_is_cached(models: Any, smolvlm: LLM) -> None:
    shown, other = picture(60, 60, seed=1), picture(60, 60, seed=2)
    text = "<image> and a question of some length"
    first, again, different = (
        smolvlm.generate(prompt_of(text, [each]), GREEDY, use_tqdm=False)[0]
        for each in (shown, as_file(shown), other)
    )
    assert first.prompt_token_ids == again.prompt_token_ids == different.prompt_token_ids
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert different.outputs[0].token_ids != first.outputs[0].token_ids
    more = smolvlm.generate(prompt_of(text + "?", [shown]), GREEDY, use_tqdm=False)[0]
    assert different.num_cached_tokens == 0
    assert more.num_cached_tokens > 64
    assert tokens_of(more) == expected(models("smolvlm"), "smolvlm", text + "?", [shown])


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl", "qwen3-vl"])
def test_a_cached_prefix_keeps_positions(models: Any, name: str) -> None:
    """Two pictures, of which the first or a part of it is cached, and text models' steps between:
    decodes after pictures share steps with decodes and prompts without any."""
    path = models(name)
    mark = mark_of(name)
    shown, other, last = (picture(70, 60, seed=seed) for seed in range(3))
    prompts = [
        (mark + "a" * 30 + mark, [shown, other]),
        (mark + "a" * 30 + mark, [shown, last]),
        (mark + "a" * 25 + "b", [shown]),
        ("only text", []),
        (mark + "a" * 30 + mark, [shown, other]),
    ]
    with LLM(path, max_num_batched_tokens=64, block_size=16, **SMALL) as llm:
        outputs = [llm.generate(prompt_of(*each), GREEDY, use_tqdm=False)[0] for each in prompts]
        together = llm.generate([prompt_of(*each) for each in prompts], GREEDY, use_tqdm=False)
    for output, again, each in zip(outputs, together, prompts, strict=True):
        assert tokens_of(output) == tokens_of(again) == expected(path, name, *each)
    assert all(output.num_cached_tokens for output in (*outputs[1:3], outputs[4]))


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen3-vl"])
def test_preempted_requests_encode_again(models: Any, name: str) -> None:
    """With a pool of blocks that holds two of the requests, and pairs with the same picture."""
    path = models(name)
    mark = mark_of(name)
    prompts = [(f"{i} {mark} " + "x" * 40, [picture(40, 30, seed=i // 2)]) for i in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    # Layers with a window have blocks of their own.
    num_blocks = 36 if name == "gemma3" else 18
    options = {**SMALL, "num_kv_blocks": num_blocks, "max_model_len": 128}
    with LLM(path, max_num_batched_tokens=48, **options) as llm:
        outputs = llm.generate([prompt_of(*each) for each in prompts], params, use_tqdm=False)
        stats = llm.llm_engine.stats()
    assert stats is not None and stats.num_preemptions > 0
    for output, (text, pictures) in zip(outputs, prompts, strict=True):
        count = len(output.prompt_token_ids) + 8
        assert tokens_of(output)[:count] == expected(path, name, text, pictures)


@pytest.mark.parametrize("name", [pytest.param("smolvlm", marks=pytest.mark.slow), "qwen2.5-vl"])
def test_a_core_in_its_own_process_sees(models: Any, name: str) -> None:
    path = models(name)
    text, pictures = prompts_of(name)[1]
    params = SamplingParams(max_tokens=8, top_k=1, ignore_eos=True, n=2)
    with LLM(path, multiprocess=True, **SMALL) as llm:
        (output,) = llm.generate(prompt_of(text, pictures), params, use_tqdm=False)
    wanted = expected(path, name, text, pictures)
    assert tokens_of(output) == wanted
    assert output.outputs[1].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2.5-vl"])
def test_a_recorded_run_is_replayed(models: Any, tmp_path: Path, name: str) -> None:
    from engine.core.replay import replay

    log, prompts = tmp_path / "steps", prompts_of(name)
    with LLM(models(name), step_log=str(log), max_num_batched_tokens=24, **SMALL) as llm:
        llm.generate([prompt_of(*each) for each in prompts], GREEDY, use_tqdm=False)
    outcome = replay(log)
    assert (outcome.difference, outcome.num_requests) == (None, len(prompts))


@pytest.mark.parametrize("kind", ["video", "video_url", "input_audio", "audio_url"])
def test_videos_and_sound_are_refused(smolvlm: LLM, kind: str) -> None:
    part = {"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}
    with pytest.raises(RequestError, match=f"type '{kind}', must be text or a picture"):
        smolvlm.chat([{"role": "user", "content": [part]}], GREEDY, use_tqdm=False)


def test_pictures_in_chats(models: Any, smolvlm: LLM) -> None:
    shown = picture(33, 70)
    url = f"data:image/png;base64,{base64.b64encode(as_file(shown)).decode()}"
    chats = [
        [{"role": "u", "content": [part, {"type": "text", "text": "what?"}]}]
        for part in (
            {"type": "image", "image": shown},
            {"type": "image_url", "image_url": {"url": url}},
        )
    ]
    one, other = smolvlm.chat(chats, GREEDY, use_tqdm=False)
    wanted = expected(models("smolvlm"), "smolvlm", "u: <image>what?a:", [shown])
    assert tokens_of(one) == tokens_of(other) == wanted


def test_a_file_is_rotated_as_it_says(smolvlm: LLM, models: Any) -> None:
    """A PNG, and a JPEG whose pixels are wide and whose picture is tall."""
    turned = picture(80, 40)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = turned.transpose(Image.Transpose.ROTATE_270)
    prompt = prompt_of("<image>", [as_file(turned, exif=exif)])
    output = smolvlm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert tokens_of(output) == expected(models("smolvlm"), "smolvlm", "<image>", [upright])


WHOLE = as_file(picture(64, 64), "JPEG")
BOMB = as_file(Image.new("1", (20_000, 20_000)))
WRONG = {
    "no file": ([b"not a picture"], "13 bytes cannot be read as BMP, GIF, JPEG, PNG, WEBP"),
    "too large": ([BOMB], "20000 x 20000|too large"),
    "other format": ([as_file(picture(5, 5), "TIFF")], "convert it to PNG"),
    "other type": ([5], r"a picture is 5 \(int\), must be a PIL image "),
    "a path": (["/etc/passwd"], "no files are read: .* allowed_local_media_path"),
    "one more": ([picture(5, 5)] * 2, "has 1 image tokens .* 2 pictures: the numbers must be"),
    "none": ([], "has 1 image tokens .* 0 pictures"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_picture_is_refused(smolvlm: LLM, name: str) -> None:
    pictures, message = WRONG[name]
    with pytest.raises(RequestError, match=message) as caught:
        smolvlm.generate(prompt_of("<image>", pictures), GREEDY, use_tqdm=False)
    assert caught.value.param == "multi_modal_data"


def test_a_picture_that_cannot_be_decoded_fails_alone(smolvlm: LLM) -> None:
    """Its header is right, so this is found when others run already."""
    cut = WHOLE[: len(WHOLE) // 2]
    pictures = [[picture(9, 9)], [cut], [picture(9, 9), cut], [WHOLE]]
    prompts = [prompt_of("<image> " * len(each), each) for each in pictures]
    outputs = smolvlm.generate(prompts, GREEDY, use_tqdm=False)
    ends = [each.outputs[0] for each in outputs]
    assert [end.finish_reason for end in ends] == ["length", "error", "error", "length"]
    for end in ends[1:3]:
        assert end.code == "invalid_media" and "a picture is damaged" in str(end.error)


def test_what_cannot_go_with_pictures_is_refused(smolvlm: LLM) -> None:
    prompt = prompt_of("<image>", [picture(5, 5)])
    cut = SamplingParams(truncate_prompt_tokens=5)
    for given, params, message in (
        ({**prompt, "multi_modal_data": {"video": []}}, GREEDY, "reads no other media"),
        ({**prompt, "multi_modal_data": 5}, GREEDY, "must be .*image"),
        (prompt, cut, "cannot be cut"),
        ({**prompt, "prompt": "<image>" + "x" * 5000}, GREEDY, "too long"),
    ):
        with pytest.raises(RequestError, match=message):
            smolvlm.generate(given, params, use_tqdm=False)
    chat = [{"role": "u", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]
    with pytest.raises(RequestError, match="send the picture as a data URL"):
        smolvlm.chat(chat, GREEDY, use_tqdm=False)


def test_a_text_model_refuses_pictures(llm_engine: Any) -> None:
    prompt = prompt_of("<image>", [picture(5, 5)])
    with pytest.raises(RequestError, match="reads only text"):
        llm_engine.add_request("a", prompt, GREEDY)


def test_a_picture_that_cannot_be_encoded_fails_alone(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = picture_without_pixels(monkeypatch)
    prompts = [prompt_of("<image> a", [each]) for each in (picture(9, 9), bad, picture(8, 8))]
    with LLM(models("llava"), **SMALL) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    ends = [each.outputs[0].finish_reason for each in outputs]
    assert ends == ["length", "error", "length"]
    assert "cannot be encoded" in str(outputs[1].outputs[0].error)


def test_a_directory_without_settings_for_pictures_reads_text(models: Any, tmp_path: Path) -> None:
    path = models("llava")
    for file in path.iterdir():
        if not file.name.startswith("pre"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert "llava" in json.loads((tmp_path / "config.json").read_text())["model_type"]
    with LLM(tmp_path, **SMALL) as llm:
        (output,) = llm.generate("none", GREEDY, use_tqdm=False)
        assert tokens_of(output) == expected(path, "llava", "none", [])
        with pytest.raises(RequestError, match="reads only text"):
            llm.generate(prompt_of("<image>", [picture(5, 5)]), GREEDY, use_tqdm=False)


def test_options_limit_pictures(models: Any) -> None:
    path = models("smolvlm")
    options = {
        "limit_mm_per_prompt": {"image": 1},
        "mm_processor_kwargs": {"do_image_splitting": False},
        "max_num_encoder_input_tokens": 4,
        "encoder_cache_size": 4,
    }
    text, pictures = PROMPTS[0]
    with LLM(path, **SMALL, **options) as llm:
        (output,) = llm.generate(prompt_of(text, pictures), GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="has 2 pictures, and limit_mm_per_prompt allows 1"):
            llm.generate(prompt_of("<image><image>", [picture(5, 5)] * 2), GREEDY, use_tqdm=False)
    whole = 4 + len(text) - len("<image>") + 3
    assert len(output.prompt_token_ids) == whole
    message = r"at most 4 .* raise max_num_encoder_input_tokens"
    with (
        LLM(path, **SMALL, max_num_encoder_input_tokens=4) as llm,
        pytest.raises(RequestError, match=message),
    ):
        llm.generate(prompt_of(text, pictures), GREEDY, use_tqdm=False)
    for wrong, message in (
        ({"limit_mm_per_prompt": {"video": 1}}, "only image"),
        ({"mm_processor_kwargs": {"tiles": 1}}, r"'tiles', which SmolVLM.* does not have"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(path, **SMALL, **wrong)


@pytest.mark.parametrize("name", ["gemma3", "qwen3.5"])
def test_a_limit_of_no_pictures_leaves_the_encoder_out(
    models: Any, tmp_path: Path, name: str
) -> None:
    """Its weights need not even be there."""
    path = models(name)
    for file in path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    stored = load_file(path / "model.safetensors")
    kept = {key: each for key, each in stored.items() if "vis" not in key}
    assert len(kept) < len(stored)
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="lacks weights of the encoder of pictures"):
        LLM(tmp_path, **SMALL)
    with LLM(tmp_path, limit_mm_per_prompt={"image": 0}, **SMALL) as llm:
        (output,) = llm.generate("none", GREEDY, use_tqdm=False)
        assert tokens_of(output) == expected(path, name, "none", [])
        with pytest.raises(RequestError, match="limit_mm_per_prompt is 0"):
            llm.generate(prompt_of(mark_of(name), [picture(5, 5)]), GREEDY, use_tqdm=False)


def test_pictures_are_not_split_over_steps_if_that_is_wished(models: Any) -> None:
    path, options = models("llava"), {**SMALL, "disable_chunked_mm_input": True}
    with pytest.raises(ConfigError, match=r"must be computed in one step, .* is 8; raise it"):
        LLM(path, max_num_batched_tokens=8, **options)
    with LLM(path, max_num_batched_tokens=24, **options) as llm:
        outputs = llm.generate([prompt_of(*each) for each in PROMPTS], GREEDY, use_tqdm=False)
    for output, each in zip(outputs, PROMPTS, strict=True):
        assert tokens_of(output) == expected(path, "llava", *each)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_pictures_are_encoded_one_by_one_for_the_same_bits(
    models: Any, monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
) -> None:
    numbers: list[int] = []  # pictures of each run of the encoder
    load = compute.load_tower

    def load_tower(*about: Any) -> Any:
        tower = load(*about)

        def encode(arrays: dict[str, torch.Tensor]) -> torch.Tensor:
            numbers.append(len(arrays["pixel_values"]))
            return tower(arrays)

        return encode

    monkeypatch.setattr(compute, "load_tower", load_tower)
    path = models("llava")
    prompts = [prompt_of(*each) for each in PROMPTS]
    with LLM(path, batch_invariant=batch_invariant, **SMALL) as llm:
        llm.generate(prompts, GREEDY, use_tqdm=False)
        # Later pictures are there from the first step, since all of them are processed.
        llm.llm_engine.reset_encoder_cache()
        assert llm.reset_prefix_cache()
        numbers.clear()
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, each in zip(outputs, PROMPTS, strict=True):
        assert tokens_of(output) == expected(path, "llava", *each)
    assert numbers and (max(numbers) == 1) == batch_invariant


def test_pictures_are_read_anew_after_resets(
    models: Any, smolvlm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def noting(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any) -> Any:
            done.append(name)
            return function(*args)

        monkeypatch.setattr(owner, name, noted)

    shown = picture(44, 31)
    wanted = expected(models("smolvlm"), "smolvlm", "<image> seen?", [shown])
    noting(ImageProcessor, "pixels")
    noting(ItemEncoder, "_batch")
    engine = smolvlm.llm_engine
    for resets, what in (
        ([], ["pixels", "_batch"]),
        ([], []),
        ([engine.reset_encoder_cache], ["_batch"]),
        # Without the second one, the request could end before the picture is processed.
        ([engine.reset_mm_cache, engine.reset_encoder_cache], ["pixels", "_batch"]),
    ):
        for reset in resets:
            reset()
        assert engine.reset_prefix_cache()
        done.clear()
        (output,) = smolvlm.generate(prompt_of("<image> seen?", [shown]), GREEDY, use_tqdm=False)
        assert tokens_of(output) == wanted
        assert done == what
