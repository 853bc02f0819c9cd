"""The special tokens of a GGUF file: named ones, those that end a text, and added tokens.

GGUF files do not name all tokens that end a text, and their converters mark tokens as special that
only look special. Such tokens are recognised by their text.
"""

from __future__ import annotations

from typing import Any

from gguf.constants import TokenType

from engine.gguf.token_metadata import SPACE, TokenMetadata

NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
"""Names of tokens in GGUF files, and the same tokens' names in tokenizer_config.json."""

ENDING = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>"),
        *("<|calls|>", "<|flush|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
        # These end a file in models that write code.
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|fim_repo|>", "<fim-repo>", "<REPO>"),
        *("<|repo_name|>", "<reponame>", "<|file_sep|>"),
    }
)
"""Tokens that end a text in every vocabulary that has them."""

QWEN_SHOWN = (
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
DEEPSEEK_SHOWN = (
    *("User", "Assistant", "fim hole", "fim begin", "fim end", "tool sep"),
    *("tool calls begin", "tool calls end", "tool call begin", "tool call end"),
    *("tool outputs begin", "tool outputs end", "tool output begin", "tool output end"),
)
GEMMA_SHOWN = ("<mask>", "<2mass>", "[@BOS@]")
SHOWN = frozenset(
    {
        *QWEN_SHOWN,
        *GEMMA_SHOWN,
        *(f"<\uff5c{name.replace(' ', SPACE)}\uff5c>" for name in DEEPSEEK_SHOWN),
    }
)
"""Tokens that are part of the text in the tokenizers of Qwen, DeepSeek and Gemma. Converters mark
them as control tokens, which are not shown."""


def end_ids(metadata: TokenMetadata, vocabulary: dict[str, int]) -> list[int]:
    """The ids that end a text, the one that the file names as EOS first."""
    named = [metadata.token_id(name) for name in ("eos", "eot", "eom")]
    found = [number for number in named if number is not None]
    found += sorted(vocabulary[text] for text in ENDING & vocabulary.keys())
    sentence_end = vocabulary.get("</s>")
    if sentence_end is not None and metadata.types[sentence_end] == TokenType.CONTROL:
        found.append(sentence_end)  # in Gemma it is the end of a struck-out text
    calls = {"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}
    if any(both <= vocabulary.keys() for both in calls) and "<|end|>" in vocabulary:
        # There it ends one of the messages of an answer.
        found = [number for number in found if number != vocabulary["<|end|>"]]
    return list(dict.fromkeys(found))


def added_tokens(
    metadata: TokenMetadata, vocabulary: dict[str, int], ends: list[int]
) -> list[dict[str, Any]]:
    """The tokens that are found in a text before it is split, in the format of tokenizer.json."""
    named = {metadata.token_id(name) for name in NAMED}
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    added = []
    for text, number in vocabulary.items():
        kind = metadata.types[number]
        is_control = kind in control or number in ends
        is_special = number in named or (is_control and not is_shown(text))
        if is_special or is_control or kind == TokenType.USER_DEFINED:
            added.append(
                {
                    "id": number,
                    "content": text,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": is_special and drops_spaces(metadata, text),
                    "normalized": False,
                    "special": is_special,
                }
            )
    return added


def is_shown(text: str) -> bool:
    """Whether a control token is part of the text in the model's own tokenizer."""
    return text in SHOWN or (text.startswith("<unused") and text.endswith(">"))


def drops_spaces(metadata: TokenMetadata, text: str) -> bool:
    """Whether a special token drops the spaces after it, which files do not say: Phi-3's do."""
    is_phi3 = metadata.architecture == "phi3" and metadata.kind == "llama"
    return is_phi3 and text not in ("<unk>", "<s>", "<|endoftext|>")
