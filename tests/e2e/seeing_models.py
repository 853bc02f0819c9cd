"""Random tiny models of images and text, with tokenizers and image processors."""

from __future__ import annotations

import json
import zlib
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from e2e.tiny_models import DELTA
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

TEXT: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
IMAGE, START, END = "<image>", "<start_of_image>", "<end_of_image>"
FIRST = ("<pad>", "<s>", "</s>")
SPECIAL = (
    *(IMAGE, START, END, "[IMG_BREAK]", "[IMG_END]"),
    *("<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)


class Case(NamedTuple):
    """The class of a model and its configuration, and the image processor's class and options."""

    model: str
    text: dict[str, Any]
    vision: dict[str, Any]
    options: dict[str, Any]
    processor: str
    processing: dict[str, Any]


SQUARE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
TILES = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
GRID = [[32 * rows, 32 * columns] for rows in range(1, 4) for columns in range(1, 4)]
CLIP = {"model_type": "clip_vision_model", "projection_dim": 32}
SIGLIP = {"model_type": "siglip_vision_model"}
CASES: dict[str, Case] = {
    "llava": Case(
        *("Llava", {"model_type": "llama"}, CLIP, {}, "CLIPImageProcessorPil", SQUARE),
    ),
    "llava-full-siglip": Case(
        "Llava",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        SIGLIP,
        {"vision_feature_select_strategy": "full", "vision_feature_layer": -1},
        "SiglipImageProcessorPil",
        {"size": {"height": 32, "width": 32}},
    ),
    "llava-layers": Case(
        "Llava",
        {"model_type": "mistral", "sliding_window": 24},
        CLIP,
        {"vision_feature_layer": [-2, -1]},
        "LlavaImageProcessorPil",
        {**SQUARE, "do_pad": True},
    ),
    "onevision": Case(
        "LlavaOnevision",
        {"model_type": "qwen2"},
        SIGLIP,
        {"image_grid_pinpoints": GRID, "vision_aspect_ratio": "anyres_max_2"},
        "LlavaOnevisionImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": GRID},
    ),
    "smolvlm": Case(
        *("SmolVLM", {"model_type": "llama"}, {}, {"scale_factor": 2}),
        *("SmolVLMImageProcessorPil", TILES),
    ),
    "idefics3": Case(
        *("Idefics3", {"model_type": "llama", "tie_word_embeddings": True}, {}),
        *({"scale_factor": 2}, "Idefics3ImageProcessorPil", TILES),
    ),
    "smolvlm-whole": Case(
        *("SmolVLM", {"model_type": "llama"}, {}, {"scale_factor": 2}),
        *("SmolVLMImageProcessorPil", {**TILES, "do_image_splitting": False}),
    ),
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
}
QWEN_PROCESSING = {
    "patch_size": 8,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 72 * 72},
}
MROPE = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 3, 3]}
CASES |= {
    "qwen2.5-vl": Case(
        "Qwen2_5_VL",
        {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
        {"model_type": "qwen2_5_vl_vision", "window_size": 32, "fullatt_block_indexes": [1]},
        {"tie_word_embeddings": True},
        *("Qwen2VLImageProcessorPil", QWEN_PROCESSING),
    ),
    "qwen3-vl": Case(
        "Qwen3VL",
        {"model_type": "qwen3_vl_text", "rope_parameters": MROPE, "head_dim": 16},
        {
            "model_type": "qwen3_vl_vision",
            "depth": 3,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        {},
        *("Qwen2VLImageProcessorPil", QWEN_PROCESSING),
    ),
}
CASES["qwen3.5"] = Case(
    "Qwen3_5",
    {
        **DELTA,
        "model_type": "qwen3_5_text",
        "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        "head_dim": 16,
    },
    {"model_type": "qwen3_5_vision", "num_position_embeddings": 36},
    {},
    *("Qwen2VLImageProcessorPil", QWEN_PROCESSING),
)
PIXTRAL_VISION = {"model_type": "pixtral", "image_size": 64, "head_dim": 16}
CASES["mistral3"] = Case(
    "Mistral3",
    {"model_type": "mistral", "head_dim": 16},
    PIXTRAL_VISION,
    {"spatial_merge_size": 2, "vision_feature_layer": -1, "tie_word_embeddings": False},
    *("PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 8}),
)
CASES["pixtral"] = Case(
    "Llava",
    {"model_type": "mistral", "head_dim": 16},
    PIXTRAL_VISION,
    {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    *("PixtralImageProcessorPil", {"size": {"longest_edge": 32}, "patch_size": 8}),
)
CASES["gemma3"] = Case(
    "Gemma3",
    {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    {**SIGLIP, "image_size": 64},
    {"mm_tokens_per_image": 16, "tie_word_embeddings": True},
    *("Gemma3ImageProcessorPil", {"size": {"height": 64, "width": 64}}),
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A tokenizer of bytes, with a token for two line ends, and the tokens of all families."""
    alphabet = sorted(ByteLevel.alphabet())
    line_end = "Ċ"  # a line end in the alphabet of bytes
    tokens = [*FIRST, *alphabet, line_end * 2]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocabulary, [(line_end, line_end)], unk_token=None))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(each, special=True) for each in (*FIRST, *SPECIAL)])
    return backend


def vision_of(case: Case) -> dict[str, Any]:
    """The configuration of the encoder."""
    vision = {**(QWEN_VISION if case.model.startswith("Qwen") else VISION), **case.vision}
    if case.text["model_type"] == "qwen2":
        vision["hidden_size"] = 32
    return vision


def config_of(case: Case, tokenizer: Tokenizer) -> Any:
    index = "image_token_id"
    if case.model.startswith(("Llava", "Gemma", "Mistral")):
        index = "image_token_index"
    ids = {index: tokenizer.token_to_id(IMAGE)}
    if case.model == "Gemma3":
        ids |= {"boi_token_index": tokenizer.token_to_id(START)}
        ids |= {"eoi_token_index": tokenizer.token_to_id(END)}
    kind = getattr(transformers, f"{case.model}Config")
    text = {**TEXT, **case.text}
    return kind(text_config=text, vision_config=vision_of(case), **case.options, **ids)


def make_seeing_model(path: Path, name: str) -> Path:
    """Write the model directory of a case, in float32."""
    case, tokenizer = CASES[name], make_tokenizer()
    config = config_of(case, tokenizer)
    torch.manual_seed(zlib.crc32(name.encode()))
    model = getattr(transformers, f"{case.model}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2.0 * parameter[0].numel() ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        if case.model == "Gemma3":  # else each token is its own likeliest successor
            model.get_input_embeddings().weight.mul_(0.1)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    getattr(transformers, case.processor)(**case.processing).save_pretrained(path)
    return path


class PixtralProcessor(NamedTuple):
    """transformers' processor of this name, which cannot be imported without torchvision."""

    image_processor: Any
    tokenizer: Any
    side: int  # pixels along a side of a token
    image_token: str = IMAGE

    def replace_image_token(self, found: dict[str, Any], index: int) -> str:
        height, width = found["image_sizes"][index]
        row = [IMAGE] * int(width // self.side) + ["[IMG_BREAK]"]
        tokens = row * int(height // self.side)
        return "".join([*tokens[:-1], "[IMG_END]"])


@cache
def processor_of(path: Path, name: str) -> Any:
    """transformers' processor of a case."""
    case = CASES[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    images = getattr(transformers, case.processor).from_pretrained(path)
    patch = vision_of(case)["patch_size"]
    if case.vision.get("model_type") == "pixtral":
        side = patch * case.options.get("spatial_merge_size", 1)
        kind = getattr(transformers, case.processor)
        images = kind.from_pretrained(path, patch_size=side)
        return partial(processed, PixtralProcessor(images, tokenizer, side))
    if case.model == "Llava":
        return transformers.LlavaProcessor(
            images,
            tokenizer,
            patch_size=patch,
            vision_feature_select_strategy=case.options.get(
                "vision_feature_select_strategy", "default"
            ),
            num_additional_image_tokens=int("clip" in case.vision["model_type"]),
            image_token=IMAGE,
        )
    if case.model == "LlavaOnevision":
        side = vision_of(case)["image_size"] // patch
        # Without what prepares videos, which needs torchvision.
        processor = transformers.LlavaOnevisionProcessor.__new__(
            transformers.LlavaOnevisionProcessor
        )
        processor.image_processor, processor.tokenizer = images, tokenizer
        processor.num_image_tokens, processor.image_token = side**2, IMAGE
        processor.vision_feature_select_strategy = "full"
        processor.vision_aspect_ratio = case.options["vision_aspect_ratio"]
        return partial(processed, processor)
    if case.model.startswith("Qwen"):
        kind = transformers.Qwen2_5_VLProcessor  # the other ones differ by videos
        processor = kind.__new__(kind)
        processor.image_processor, processor.tokenizer = images, tokenizer
        processor.image_token = IMAGE
        return partial(processed, processor)
    if case.model == "Gemma3":
        processor = transformers.Gemma3Processor.__new__(transformers.Gemma3Processor)
        processor.image_processor, processor.tokenizer = images, tokenizer
        processor.image_token = START
        processor.full_image_sequence = (
            f"\n\n{START}{IMAGE * case.options['mm_tokens_per_image']}{END}\n\n"
        )
        return partial(processed, processor)
    # SmolVLM's own processor adds only videos, for which it needs another package.
    tile = case.processing["max_image_size"]["longest_edge"]
    number = (tile // patch // case.options["scale_factor"]) ** 2
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=number)


def processed(processor: Any, images: Any, text: str, return_tensors: str) -> dict[str, Any]:
    """The model's inputs, where transformers' own processor needs torchvision."""
    found: dict[str, Any] = {}
    mark = processor.image_token
    if images is not None:
        found = dict(processor.image_processor(images=images, return_tensors=return_tensors))
        for index in range(len(images)):
            tokens = processor.replace_image_token(found, index)
            text = text.replace(mark, tokens.replace(mark, "<i>"), 1)
    found |= processor.tokenizer(text.replace("<i>", mark), return_tensors="pt")
    is_image = found["input_ids"] == processor.tokenizer.convert_tokens_to_ids(IMAGE)
    return {**found, "mm_token_type_ids": is_image.int(), "token_type_ids": is_image.int()}


@cache
def reference(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
