"""Tokenizers written into GGUF files as llama.cpp's converter writes them, and texts to try."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter, SpecialVocab, TokenType
from tokenizers import Tokenizer

SPACE = "\u2581"
SPACED = ("llama", "gemma2", "gemma3")
LOOKS_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
PIECES = (
    *(
        "the quick brown fox",
        "It's",
        "WE'LL",
        "don't",
        "I'M",
        "\u017f's",
        "x",
        "HTTPServer",
        "camelCase",
    ),
    *(
        "Füchse",
        "naïve café",
        "e\u0301te\u0301",
        "A\u030angstrom",
        "\ufb01 ligature",
        "\u2167 \u00bd \u00b2 \u32bf",
    ),
    *(
        "Ελληνικά",
        "кириллица",
        "日本語のテキスト",
        "中文\uff0c标点。",
        "한국어",
        "\u1112\u1161\u11ab",
    ),
    *(
        "हिन्दी",
        "தமிழ்",
        "ภาษาไทย",
        "العَرَبِيَّة",
        "עִבְרִית",
        "\U0001d518\U0001d52b",
        "\U00010437\U0001044a",
    ),
    *(
        "😀",
        "👍🏽",
        "👨‍👩‍👧",
        "🏳️‍🌈",
        "🇩🇪",
        "✅",
        "\u200b",
        "\ufeff",
        "\u00ad",
        "\x00",
        "\x7f",
        "İstanbul",
    ),
    *("1", "12", "1234567", "3.14159e-10", "0x1F", "٣٤٥", "\uff11\uff12"),
    *(
        "def f(x):\n    return x**2  # a\n",
        "if (a<=b) { c->d[i++] += 1; }",
        "</div>",
        "\\n",
        "$\\alpha$",
    ),
    *(
        "http://a.b/c?d=e&f",
        "SELECT *\nFROM t;",
        "...",
        "!!!",
        "—",
        "“q”",
        "#hash",
        "@at",
        "a_b_c",
        "```py\n",
    ),
    *(
        " ",
        "  ",
        "   ",
        " " * 17,
        " " * 40,
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "\t\t\t",
        "\u3000",
        "\u00a0",
        "\u2028",
    ),
    *(SPACE, SPACE * 2, "Ġ", "<0x0A>", "<", ">", "|", "[", "]"),
)


def many_texts(count: int, tokens: Sequence[str] = (), seed: int = 1) -> list[str]:
    """Texts of mixed scripts, emoji, code and spaces. Every third has some of ``tokens`` in it."""
    draw = random.Random(seed)
    texts = ["", *PIECES, *tokens[:200]]
    while len(texts) < count:
        parts = [draw.choice(PIECES) for _ in range(draw.randint(1, 12))]
        if tokens and len(texts) % 3 == 0:
            parts.insert(draw.randrange(len(parts) + 1), draw.choice(tokens))
        if len(texts) % 5 == 0:
            parts.append("".join(chr(draw.choice(RANGES)(draw)) for _ in range(draw.randint(1, 8))))
        texts.append(draw.choice(("", " ")).join(parts))
    return texts[:count]


RANGES = [
    lambda draw: draw.randrange(0x20, 0x7F),
    lambda draw: draw.randrange(0xA0, 0x590),
    lambda draw: draw.randrange(0x900, 0x1200),
    lambda draw: draw.randrange(0x2000, 0x2C00),
    lambda draw: draw.randrange(0x4E00, 0xA000),
    lambda draw: draw.randrange(0x1F300, 0x1FAFF),
    lambda draw: draw.randrange(0x10000, 0x11000),
]


def write_gguf(root: Path, file: Path, pre: str, vocab_size: int = 0) -> Path:
    """Write the tokenizer of a model directory into a GGUF file without weights.

    pre: the name of its pre-tokenizer; for tokenizers that write spaces as letters, the model's
    architecture, one of ``SPACED``. vocab_size: rows of the embedding table, if there are more than
    tokens."""
    is_spaced = pre in SPACED
    writer = GGUFWriter(file, pre if is_spaced else "llama")
    tokenizer = Tokenizer.from_file(str(root / "tokenizer.json"))
    texts, types = texts_and_types(tokenizer, is_spaced, vocab_size)
    writer.add_tokenizer_model("llama" if is_spaced else "gpt2")
    writer.add_tokenizer_pre("default" if is_spaced else pre)
    writer.add_token_list(texts)
    if is_spaced:
        writer.add_token_scores(scores(tokenizer, len(texts)))
        has_prefix = "Prepend" in json.dumps(json.loads(tokenizer.to_str())["normalizer"])
        writer.add_add_space_prefix(has_prefix)
    writer.add_token_types(types)
    special = SpecialVocab(root, load_merges=not is_spaced, n_vocab=len(texts))
    special.add_to_gguf(writer, quiet=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def texts_and_types(
    tokenizer: Tokenizer, is_spaced: bool, vocab_size: int
) -> tuple[list[str], list[int]]:
    """The text and the type of each id, as the converter chooses them."""
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    count = max(vocab_size, max(vocabulary.values()) + 1)
    texts = [f"[PAD{number}]" for number in range(count)]
    types = [int(TokenType.UNUSED)] * count
    unknown = json.loads(tokenizer.to_str())["model"].get("unk_token")
    for text, number in vocabulary.items():
        texts[number] = text
        types[number] = int(TokenType.NORMAL)
        if is_spaced and len(text) == 6 and text.startswith("<0x"):
            types[number] = int(TokenType.BYTE)
        if number in added:
            if added[number].special or looks_special(text):
                types[number] = int(TokenType.CONTROL)
            else:
                types[number] = int(TokenType.USER_DEFINED)
                texts[number] = text.replace(SPACE, " ")
        if is_spaced and text == unknown:
            types[number] = int(TokenType.UNKNOWN)
    return texts, types


def looks_special(text: str) -> bool:
    """Whether the converter makes a control token of a token that is not special."""
    edges = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return text in LOOKS_SPECIAL or any(text.startswith(a) and text.endswith(b) for a, b in edges)


def scores(tokenizer: Tokenizer, count: int) -> list[float]:
    """The scores of a SentencePiece model whose pieces are merged in the order of ``tokenizer``."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    ranks: dict[str, int] = {}
    for left, right in content["merges"]:
        ranks.setdefault(left + right, len(ranks))
    found = [-1000.0] * count
    for text, number in content["vocab"].items():
        found[number] = -float(ranks.get(text, len(ranks) + number))
    for number in tokenizer.get_added_tokens_decoder():
        found[number] = -1000.0
    return found


def differences(
    original: Tokenizer, derived: Tokenizer, texts: Sequence[str], count: int
) -> list[str]:
    """Where two tokenizers differ: ids of texts, and texts of ``count`` lists of any ids."""
    draw = random.Random(7)
    found = []
    # Some tokenizer.json leave BOS to tokenizer_config.json.
    ways = (False, True) if original.encode("").ids else (False,)
    for text in texts:
        for special in ways:
            want, got = (
                each.encode(text, add_special_tokens=special).ids for each in (original, derived)
            )
            if want != got:
                found.append(f"{text!r:.200} has ids {got[:40]}, not {want[:40]}")
                break
    most = original.get_vocab_size() + 50
    for number in range(count):
        ids = [draw.randrange(most) for _ in range(draw.randint(1, 12))]
        if number % 2:  # bytes come early in a vocabulary
            ids = [draw.randrange(400) for _ in ids]
        for skip in (False, True):
            want, got = (each.decode(ids, skip_special_tokens=skip) for each in (original, derived))
            if want != got:
                found.append(
                    f"ids {ids} with skip_special_tokens={skip} give {got!r}, not {want!r}"
                )
                break
    return found
