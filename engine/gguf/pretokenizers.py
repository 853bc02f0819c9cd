"""Rules by which byte-level BPE tokenizers split text before they merge bytes, by name.

A GGUF file has only the name of its rule, ``tokenizer.ggml.pre``. The patterns here are those in
the tokenizer.json of the models that the names stand for, since the models were trained with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

Part = dict[str, Any]
"""One pre-tokenizer in the format of tokenizer.json."""


@dataclass(frozen=True)
class Rule:
    """How the tokenizers with one ``tokenizer.ggml.pre`` prepare a text."""

    parts: tuple[Part, ...]
    """Pre-tokenizers. Each one splits the pieces that the one before it yields."""
    is_composed: bool = False
    """Text is converted to the Unicode form NFC first."""
    ignores_merges: bool = False
    """A piece that is in the vocabulary becomes one token, even if no merges lead to it."""
    adds_bos: bool = False
    """Prompts begin with the BOS token unless ``add_bos_token`` in the file is false."""


def split(*patterns: str) -> tuple[Part, ...]:
    """Pre-tokenizers that split by one pattern after the other, then write bytes as letters."""
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in patterns
    ]
    return (*splits, byte_level(use_regex=False))


def byte_level(use_regex: bool = True) -> Part:
    """A pre-tokenizer that writes bytes as letters, by default after a split by GPT-2's pattern."""
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def digits(individual_digits: bool = True) -> Part:
    """A pre-tokenizer that separates digits from text, by default each digit from the others."""
    return {"type": "Digits", "individual_digits": individual_digits}


SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}"
QWEN2 = rf"{SUFFIX}|{WORD}|\p{{N}}|{SIGNS}"
LLAMA3 = rf"{SUFFIX}|{WORD}|\p{{N}}{{1,3}}|{SIGNS}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def cased(suffix: str, numbers: str) -> str:
    """The pattern of tokenizers that split words where lower case is followed by upper case.

    suffix: what a word may end with; numbers: the pattern of a piece of digits."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    first = r"[^\r\n\p{L}\p{N}]?"
    signs = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}"
    return (
        f"{first}{upper}*{lower}+{suffix}|{first}{upper}+{lower}*{suffix}|{numbers}|{signs}"
    )  # fmt: skip


O200K = cased(f"{SUFFIX}?", r"\p{N}{1,3}")
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
HAN_OR_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
CODE_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
DEEPSEEK3 = rf"{CODE_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{BLANKS}"
LATIN_GREEK_CYRILLIC = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-"
    "\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-"
    "\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-"
    "\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-"
    "\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-"
    "\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-"
    "\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-"
    "\U000118df\U0001e900-\U0001e943]"
)
BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{HAN_OR_KANA}"
)
LONG_BLANKS = "".join(rf"|\s{{{num}}}(?!\S)" for num in ("512", "256", "128", "64", "32", "16"))

gpt2 = Rule((byte_level(),))
gpt_neox = replace(gpt2, is_composed=True)
starcoder = Rule((digits(), byte_level()))
llama3 = Rule(split(LLAMA3), ignores_merges=True, adds_bos=True)
cl100k = Rule(split(LLAMA3))
qwen2 = Rule(split(QWEN2))
qwen2_composed = replace(qwen2, is_composed=True)
o200k = Rule(split(O200K), ignores_merges=True)
deepseek3 = Rule(split(r"\p{N}{1,3}", HAN_OR_KANA, DEEPSEEK3))
bloom = Rule(split(BLOOM))
bailing = Rule(
    split(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )
)
grouped = Rule(split(r"\d{1,3}(?=(?:\d{3})*\b)", O200K))

RULES: Mapping[str, Rule] = {
    "default": Rule(split(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"), gpt2
    ),
    "granite-docling": gpt2,
    **dict.fromkeys(("mpt", "olmo"), gpt_neox),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), starcoder
    ),
    "command-r": replace(starcoder, is_composed=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        llama3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), cl100k),
    **dict.fromkeys(("glm4", "glm5"), replace(cl100k, ignores_merges=True)),
    "minicpm5": Rule(
        split(r"\p{N}{1,3}", rf"{SUFFIX}|{WORD}|\p{{N}}+|{SIGNS}"), ignores_merges=True
    ),
    "jais-2": Rule(
        split(
            rf"{SUFFIX}|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
            rf"{LONG_BLANKS}|\s{{8}}(?!\S)|\s{{4}}(?!\S)|\s{{1,2}}(?!\S)|\s{{1}}"
        )
    ),
    **dict.fromkeys(("qwen2", "megrez", "f2llmv2"), qwen2_composed),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "solar-open", "grok-2"), qwen2
    ),
    "qwen35": Rule(
        split(
            rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{BLANKS}"
        ),
        is_composed=True,
    ),
    "ufakzeka": Rule(split(rf"{WORD}|\p{{N}}|{SIGNS}")),
    "seed-coder": Rule(split(rf"{SUFFIX}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{BLANKS}")),
    "laguna": Rule(split(r"[^\n]+|[\n]+", QWEN2)),
    "exaone-moe": Rule(
        split(
            rf"{SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), bailing),
    **dict.fromkeys(("gpt-4o", "o200k", "llama4", "kanana2", "talkie", "minimax-m2"), o200k),
    "tekken": Rule(split(cased("", r"\p{N}")), ignores_merges=True, adds_bos=True),
    "youtu": Rule(split(YOUTU, cased(f"{SUFFIX}?", r"\p{N}")), ignores_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), grouped),
    "superbpe": Rule(split(r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "deepseek-llm": Rule(
        (
            *split(
                "[\r\n]",
                rf"\s?{LATIN_GREEK_CYRILLIC}+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                CJK,
            )[:-1],
            digits(),
            byte_level(use_regex=False),
        )
    ),
    "deepseek-coder": Rule(
        (
            *split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK)[:-1],
            digits(),
            byte_level(use_regex=False),
        )
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), deepseek3),
    "spark2_5": Rule(
        split(
            r"\p{N}{1,3}",
            HAN_OR_KANA,
            rf"{CODE_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), bloom),
    "viking": Rule((*bloom.parts[:-1], digits(), byte_level(use_regex=False))),
    "falcon": Rule(
        (
            {"type": "Punctuation", "behavior": "Contiguous"},
            byte_level(),
            digits(individual_digits=False),
            *split("[0-9][0-9][0-9]")[:-1],
        )
    ),
    "gemma4": Rule((), adds_bos=True),
    "sarvam-moe": Rule(()),
}
"""The known rules by name. A rule without parts stands for tokenizers that write a space as a
letter instead of bytes, as SentencePiece does."""
