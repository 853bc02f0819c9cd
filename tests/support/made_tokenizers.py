"""Small tokenizers of the kinds that models ship with, made on the spot, as model directories."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "def f(x):\n    return x + 1  # a comment\n\n\tprint('hello')",
    "Füchse springen über Hunde; café naïve déjà vu. Ελληνικά και кириллица.",
    "日本語のテキスト と 한국어 and emoji 😀😃 👍🏽 end",
] * 4


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: bytes shown as letters; a space belongs to the next word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def metaspace() -> Tokenizer:
    """Like Llama 2 and Mistral: a mark for the space, and tokens of single bytes where needed."""
    tokenizer = _with_byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def replaced_spaces() -> Tokenizer:
    """Like Gemma: spaces are replaced in the text, without a prefix."""
    tokenizer = _with_byte_fallback()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _with_byte_fallback() -> Tokenizer:
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    trained.train_from_iterator((line.replace(" ", "▁") for line in TEXT[:3]), trainer)
    pieces = json.loads(trained.to_str())["model"]
    vocab = {token: index for index, token in enumerate([*SPECIAL, *BYTES])}
    for token in pieces["vocab"]:
        vocab.setdefault(token, len(vocab))
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            [tuple(merge) for merge in pieces["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return tokenizer


MAKERS = {"byte_level": byte_level, "metaspace": metaspace, "replaced_spaces": replaced_spaces}


def save(root: Path, tokenizer: Tokenizer, files: dict[str, Any] | None = None) -> Path:
    """A directory with tokenizer.json, a config, and ``files``: objects as JSON, or texts."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(root / "tokenizer.json"))
    defaults = {
        "config.json": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
    }
    for name, content in {**defaults, **(files or {})}.items():
        (root / name).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (root / name).write_text(text, encoding="utf-8")
    return root
