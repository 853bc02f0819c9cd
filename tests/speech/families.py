# ruff: noqa: RUF001  (DeepSeek's markers have a vertical line of their own)
"""Signs of families, their markers as tokens, and the tools that requests have."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from engine.server.speech.families import FAMILIES, GENERIC
from engine.text.tokenizer import RustBackend, Tokenizer

MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>",
    "<arg_value>", "</arg_value>", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>",
    "<|call|>", "<|return|>", "<|python_tag|>",
)  # fmt: skip
TEXT = {"type": "string"}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool("edit", path=TEXT, text=TEXT),
    tool(
        "run",
        command=TEXT,
        times={"type": "integer"},
        share={"type": "number"},
        is_quiet={"type": "boolean"},
        tags={"type": "array", "items": TEXT},
        where={"type": "object"},
        note={"type": ["string", "null"]},
        either={"anyOf": [TEXT, {"type": "integer"}]},
        anything={},
    ),
    tool("noargs"),
    tool("files.read-all", path=TEXT),
]


def tokenizer_with(*markers: str, special: bool = False) -> Tokenizer:
    """A token for each byte, and one for each marker."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = RustTokenizer(models.BPE({char: n for n, char in enumerate(alphabet)}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_tokens([AddedToken(m, special=special, normalized=False) for m in markers])
    rust.add_special_tokens([AddedToken("<|im_start|>", special=True, normalized=False)])
    return Tokenizer(RustBackend(rust), {}, {"default": ""})


def markers_of(name: str) -> tuple[str, ...]:
    """Markers that are single tokens of this family's tokenizers."""
    family = next(family for family in FAMILIES if family.name == name)
    found = (*family.markers, *(family.thinking or ()))
    return tuple(marker for marker in dict.fromkeys(found) if not marker.endswith("="))


def signs_of(name: str) -> str:
    """A text that a chat template of this family has."""
    if name == GENERIC:
        return "<think></think>"
    family = next(family for family in FAMILIES if family.name == name)
    return "".join(family.signs) + "".join(family.thinking or ())
