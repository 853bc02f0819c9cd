"""Tokenizers of GGUF files: ids, texts, special tokens, templates and errors for damaged files."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import made_tokenizers as made
from support.gguf_tokenizers import differences, many_texts, write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.assets import BOX_MODEL
from engine.config.model import ModelConfig, read_model_info
from engine.errors import ModelError
from engine.gguf.header import GgufHeader, read_gguf
from engine.gguf.pretokenizers import RULES
from engine.gguf.vocabulary import write_tokenizer
from engine.text.tokenizer import load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
Metadata = dict[str, Any]


def byte_level(pre: str = "gpt-2", more: tuple[str, ...] = (), kind: int = CONTROL) -> Metadata:
    """Metadata with a token for each byte, and ``more`` tokens of one type."""
    tokens = [*LETTERS, "he", "llo", "hello", *more]
    types = [NORMAL] * (len(tokens) - len(more)) + [kind] * len(more)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": ["h e"],
    }


def sentence_piece(*more: str, kind: int = USER_DEFINED) -> Metadata:
    """Metadata of a SentencePiece tokenizer, with ``more`` tokens of one type."""
    tokens = ["<unk>", "<s>", "</s>", *made.BYTES, "\u2581a", "ab", "ba", "\u2581", "a", "b"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6, *[kind] * len(more)]
    scores = [0.0] * 259 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0] + [-1000.0] * len(more)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *more],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
    }


def written(metadata: Metadata, root: Path) -> Path:
    root.mkdir(exist_ok=True)
    write_tokenizer(GgufHeader(Path("model.gguf"), metadata, {}), root)
    return root


def derived(metadata: Metadata, root: Path) -> Tokenizer:
    return Tokenizer.from_file(str(written(metadata, root) / "tokenizer.json"))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    tokens: list[str] = tokenizer.encode(text).tokens
    return tokens


def llama_2() -> Tokenizer:
    tokenizer = made.replaced_spaces()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gemma() -> Tokenizer:
    tokenizer = made.replaced_spaces()
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def qwen() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    # Converters mark these as control tokens.
    tokenizer.add_tokens([AddedToken("<|fim_prefix|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def digits() -> Tokenizer:
    tokenizer = made.byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


ORIGINALS: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "gpt2": (made.byte_level, "gpt-2"),
    "qwen": (qwen, "qwen2"),
    "smollm": (digits, "smollm"),
    "llama": (llama_2, "llama"),
    "gemma": (gemma, "gemma3"),
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


@pytest.mark.parametrize("name", ORIGINALS)
def test_ids_and_texts_are_those_of_the_original(name: str, tmp_path: Path) -> None:
    make, pre = ORIGINALS[name]
    source = made.save(tmp_path / "source", make(), {"chat_template.jinja": TEMPLATE})
    assert differences_after_a_round(source, pre, tmp_path) == []


def test_the_model_in_the_package_keeps_its_ids(tmp_path: Path) -> None:
    assert differences_after_a_round(BOX_MODEL, "gpt-2", tmp_path) == []


def differences_after_a_round(source: Path, pre: str, root: Path) -> list[str]:
    """Where a tokenizer differs after it was written into a GGUF file and read from there."""
    header = read_gguf(write_gguf(source, root / "model.gguf", pre, vocab_size=5000))
    target = root / "derived"
    target.mkdir()
    write_tokenizer(header, target)
    original, ours = (
        Tokenizer.from_file(str(each / "tokenizer.json")) for each in (source, target)
    )
    names = [token.content for token in original.get_added_tokens_decoder().values()]
    return differences(original, ours, many_texts(2000, names), 2000)


@pytest.mark.parametrize("name", ORIGINALS)
def test_chats_are_rendered_as_by_the_original(name: str, tmp_path: Path) -> None:
    make, pre = ORIGINALS[name]
    source = made.save(tmp_path / "source", make(), {"chat_template.jinja": TEMPLATE})
    target = made.save(tmp_path / "derived", make())  # config.json, which others write
    write_tokenizer(read_gguf(write_gguf(source, tmp_path / "model.gguf", pre)), target)
    chat = [{"role": "user", "content": "Hi \u00e9"}]
    original, ours = (load_tokenizer(ModelConfig(model=str(each))) for each in (source, target))
    assert ours.apply_chat_template(chat) == original.apply_chat_template(chat)
    assert ours.eos_token_id == original.eos_token_id
    assert [ours.token_bytes(number) for number in range(300)] == [
        original.token_bytes(number) for number in range(300)
    ]


@pytest.mark.parametrize("pre", [name for name, rule in RULES.items() if rule.parts])
def test_every_rule_keeps_all_characters(pre: str, tmp_path: Path) -> None:
    tokenizer = derived(byte_level(pre), tmp_path)
    for text in many_texts(250):
        known = "".join(char for char in text if char != "\ufffd")
        wanted = tokenizer.normalizer.normalize_str(known) if RULES[pre].is_composed else known
        assert tokenizer.decode(tokenizer.encode(known).ids) == wanted


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "I'M 12345 x", ["I", "'M", "\u0120", "123", "45", "\u0120x"]),
        ("qwen2", "ab12\n\n c", ["ab", "1", "2", "\u010a\u010a", "\u0120c"]),
        ("smollm", "v10 ok", ["v", "1", "0", "\u0120ok"]),
        ("gpt-2", "v10 ok", ["v", "10", "\u0120ok"]),
        ("gpt-4o", "camelCase's", ["camel", "Case's"]),
        ("tekken", "camelCase12", ["camel", "Case", "1", "2"]),
        ("deepseek-llm", "x=12\ny", ["x", "=", "1", "2", "\u010a", "y"]),
        ("deepseek-v3", "1234 .x", ["123", "4", "\u0120.", "x"]),
        ("falcon", "a1234..", ["a", "123", "4", ".."]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("superbpe", "1234567", ["1", "234", "567"]),
        ("bloom", "a, b", ["a", ",", "\u0120b"]),
        ("qwen35", "\u0939\u093f1", ["\u00e0\u00a4\u00b9\u00e0\u00a4\u00bf", "1"]),
    ],
)
def test_text_is_split_by_the_rule_of_its_name(
    pre: str, text: str, pieces: list[str], tmp_path: Path
) -> None:
    tokenizer = derived(byte_level(pre), tmp_path)
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_whole_pieces_need_no_merges_only_under_some_names(tmp_path: Path) -> None:
    assert tokens_of(derived(byte_level("llama-bpe"), tmp_path), "hello") == ["hello"]
    assert tokens_of(derived(byte_level("qwen2"), tmp_path), "hello") == ["he", "l", "l", "o"]


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({}, ["<s>", "a"]),
        ({"add_bos_token": False}, ["a"]),
        ({"add_eos_token": True}, ["<s>", "a", "</s>"]),
    ],
)
def test_bos_and_eos_are_put_around_prompts(
    flags: dict[str, bool], tokens: list[str], tmp_path: Path
) -> None:
    metadata = byte_level("llama-bpe", ("<s>", "</s>"))
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata |= {"tokenizer.ggml.bos_token_id": count - 2, "tokenizer.ggml.eos_token_id": count - 1}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in flags.items()}
    assert tokens_of(derived(metadata, tmp_path), "a") == tokens


def test_a_sentence_piece_tokenizer_ranks_tokens_by_score(tmp_path: Path) -> None:
    tokenizer = derived(sentence_piece(), tmp_path)
    assert tokens_of(tokenizer, "ab") == ["<s>", "\u2581a", "b"]
    assert tokens_of(tokenizer, "bab\u00e9") == ["<s>", "\u2581", "b", "ab", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode(" a  b\u00e9").ids) == " a  b\u00e9"
    metadata = sentence_piece() | {"tokenizer.ggml.add_space_prefix": False}
    assert tokens_of(derived(metadata, tmp_path), "ab ab") == ["<s>", "ab", "\u2581a", "b"]
    assert tokens_of(derived(metadata, tmp_path), "bab") == ["<s>", "b", "ab"]


def test_merges_in_a_file_are_preferred_to_scores(tmp_path: Path) -> None:
    metadata = sentence_piece() | {"tokenizer.ggml.merges": ["a b", "\u2581 a"]}
    assert tokens_of(derived(metadata, tmp_path), "ab") == ["<s>", "\u2581", "ab"]


def test_runs_of_spaces_are_found_although_converters_write_them_as_spaces(tmp_path: Path) -> None:
    metadata = sentence_piece("  ", "   ") | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = derived(metadata, tmp_path)
    assert tokens_of(tokenizer, "a   a") == ["<s>", "a", "\u2581\u2581\u2581", "a"]
    assert tokenizer.decode(tokenizer.encode("a   a").ids) == "a   a"


def test_ids_that_pad_the_table_are_no_tokens(tmp_path: Path) -> None:
    count = len(byte_level()["tokenizer.ggml.tokens"])
    padding = (f"[PAD{count}]", "", f"[PAD{count + 2}]")
    tokenizer = derived(byte_level("gpt-2", padding, UNUSED), tmp_path)
    assert tokenizer.decode([count, count + 1, count + 2]) == ""
    assert tokenizer.get_vocab_size() == count
    assert len(tokens_of(tokenizer, padding[0])) == len(padding[0])


def test_control_tokens_are_not_shown_and_user_defined_ones_are(tmp_path: Path) -> None:
    for kind, shown in ((CONTROL, ""), (USER_DEFINED, "<x>")):
        tokenizer = derived(byte_level("gpt-2", ("<x>",), kind), tmp_path)
        assert tokens_of(tokenizer, "a<x>b") == ["a", "<x>", "b"]
        assert tokenizer.decode(tokenizer.encode("<x>").ids) == shown
    for token in ("<|fim_prefix|>", "<\uff5cUser\uff5c>", "<unused7>"):  # shown by their models
        tokenizer = derived(byte_level("gpt-2", (token,)), tmp_path)
        assert tokenizer.decode(tokenizer.encode(token).ids) == token


def test_special_tokens_of_phi_3_drop_the_spaces_after_them(tmp_path: Path) -> None:
    metadata = sentence_piece("<|user|>", kind=CONTROL)
    assert tokens_of(derived(metadata, tmp_path), "<|user|> a")[2:] == ["\u2581", "\u2581a"]
    metadata["general.architecture"] = "phi3"
    assert tokens_of(derived(metadata, tmp_path), "<|user|> a")[2:] == ["\u2581a"]


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (("<|im_end|>", "<|im_start|>"), {"<|im_end|>"}),
        (("<|end|>", "<|user|>"), {"<|end|>"}),
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
        (("<|eot_id|>", "<|eom_id|>", "</s>"), {"<|eot_id|>", "<|eom_id|>", "</s>"}),
        (("<b>", "<i>"), set()),
    ],
)
def test_tokens_that_end_a_text_are_known_by_their_text(
    tokens: tuple[str, ...], ends: set[str], tmp_path: Path
) -> None:
    made.save(tmp_path, made.byte_level())  # config.json, which others write
    metadata = byte_level("gpt-2", tokens)
    written(metadata, tmp_path)
    texts = metadata["tokenizer.ggml.tokens"]
    assert {texts[number] for number in read_model_info(tmp_path).eos_token_ids} == ends


def test_named_tokens_end_a_text_and_a_struck_out_text_does_not(tmp_path: Path) -> None:
    made.save(tmp_path, made.byte_level())
    metadata = byte_level("gpt-2", ("</s>", "<x>", "<y>", "<z>"), USER_DEFINED)
    count = len(metadata["tokenizer.ggml.tokens"])
    for place, name in enumerate(("eos", "eot", "eom")):
        metadata[f"tokenizer.ggml.{name}_token_id"] = count - 1 - place
    written(metadata, tmp_path)
    assert read_model_info(tmp_path).eos_token_ids == (count - 1, count - 2, count - 3)


def test_chat_templates_have_their_names(tmp_path: Path) -> None:
    made.save(tmp_path, made.byte_level())
    metadata = byte_level() | {
        "tokenizer.chat_template": "usual {{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools {{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    written(metadata, tmp_path)
    tokenizer = load_tokenizer(ModelConfig(model=str(tmp_path)))
    chat = [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(chat) == "usual x"
    assert tokenizer.apply_chat_template(chat, chat_template="tool_use") == "tools x"
    assert tokenizer.apply_chat_template(chat, tools=[{}]) == "tools x"


def test_sampling_values_are_recommended(tmp_path: Path) -> None:
    sampling = {"temp": 0.800000011920929, "top_k": 40, "top_p": 0.949999988079071, "mirostat": 1}
    metadata = byte_level() | {f"general.sampling.{key}": value for key, value in sampling.items()}
    content = json.loads((written(metadata, tmp_path) / "generation_config.json").read_text())
    assert content == {"temperature": 0.8, "top_k": 40, "top_p": 0.95}


DAMAGES: list[tuple[str, Metadata, str]] = [
    ("model", {"tokenizer.ggml.model": None}, "is missing, must be a string"),
    ("model", {"tokenizer.ggml.model": "bert"}, "'bert', which is not supported; known: gpt2"),
    ("model", {"tokenizer.ggml.model": ["gpt2"]}, "must be a string"),
    ("pre", {"tokenizer.ggml.pre": None}, "is missing"),
    ("pre", {"tokenizer.ggml.pre": "new-kind"}, "'new-kind', which is unknown.*qwen2"),
    ("pre", {"tokenizer.ggml.pre": ["qwen2"]}, "which is unknown"),
    ("tokens", {"tokenizer.ggml.tokens": None}, "is missing, must be a list of strings"),
    ("tokens", {"tokenizer.ggml.tokens": []}, "is empty"),
    ("tokens", {"tokenizer.ggml.tokens": np.arange(300)}, "must be a list of strings"),
    ("token_type", {"tokenizer.ggml.token_type": np.ones(7, np.int32)}, "has 7 values.*has 259"),
    ("token_type", {"tokenizer.ggml.token_type": ["a"] * 259}, "must be a list of numbers"),
    ("token_type", {"tokenizer.ggml.token_type": np.full(259, 9)}, "is 9 for token 0"),
    ("token_type", {"tokenizer.ggml.token_type": np.full(259, np.nan)}, "is nan for token 0"),
    ("merges", {"tokenizer.ggml.merges": None}, "is missing"),
    ("merges", {"tokenizer.ggml.merges": ["he"]}, "must be two tokens with a space between"),
    ("merges", {"tokenizer.ggml.merges": [" "]}, "must be two tokens with a space between"),
    ("merges", {"tokenizer.ggml.merges": ["h e", "h xy"]}, "merge 1, but 'xy' is no token"),
    ("merges", {"tokenizer.ggml.merges": ["x y"]}, "merge 0, but 'xy' is no token"),
    ("eos_token_id", {"tokenizer.ggml.eos_token_id": 259}, "is 259, must be .* one of 259 tokens"),
    ("bos_token_id", {"tokenizer.ggml.bos_token_id": -1}, "is -1, must be"),
    ("eot_token_id", {"tokenizer.ggml.eot_token_id": True}, "is True, must be"),
    ("padding_token_id", {"tokenizer.ggml.padding_token_id": "0"}, "is '0', must be"),
    ("add_bos_token", {"tokenizer.ggml.add_bos_token": 1}, "is 1, must be true or false"),
    ("add_bos_token", {"tokenizer.ggml.add_bos_token": True}, "but bos_token_id names no token"),
]


@pytest.mark.parametrize(("key", "damage", "why"), DAMAGES)
def test_damaged_metadata_are_named(key: str, damage: Metadata, why: str, tmp_path: Path) -> None:
    metadata = {name: value for name, value in (byte_level() | damage).items() if value is not None}
    with pytest.raises(ModelError, match=f"(?s)model.gguf: tokenizer.ggml.{key} .*{why}|{why}"):
        written(metadata, tmp_path)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3, must be a string"),
        ({"tokenizer.chat_template.rag": ["x"]}, "tokenizer.chat_template.rag is"),
        ({"general.sampling.temp": "hot"}, "general.sampling.temp is 'hot', must be a number"),
        ({"general.sampling.top_p": float("nan")}, "general.sampling.top_p is nan"),
    ],
)
def test_other_damaged_metadata_are_named(damage: Metadata, why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=why):
        written(byte_level() | damage, tmp_path)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ({"tokenizer.ggml.scores": None}, "scores rank no token above another"),
        ({"tokenizer.ggml.scores": np.full(265, -1000.0)}, "scores rank no token above another"),
        ({"tokenizer.ggml.scores": np.zeros(3)}, "scores has 3 values"),
        ({"tokenizer.ggml.scores": np.full(265, np.inf)}, "scores is inf for token 0"),
        ({"tokenizer.ggml.add_space_prefix": "yes"}, "add_space_prefix is 'yes'"),
    ],
)
def test_damaged_scores_are_named(damage: Metadata, why: str, tmp_path: Path) -> None:
    metadata = sentence_piece() | damage
    with pytest.raises(ModelError, match=why):
        written({key: value for key, value in metadata.items() if value is not None}, tmp_path)


def test_a_token_that_is_there_twice_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokens has 'hello' as token 258 and 259"):
        written(byte_level("gpt-2", ("hello",)), tmp_path)
    tokens = ["<x>"] * 1_000_000
    metadata = byte_level() | {"tokenizer.ggml.tokens": tokens}
    del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(ModelError, match=r"tokens has '<x>' as token 0 and 1"):
        written(metadata, tmp_path)


@pytest.mark.parametrize("text", ["a" * 2000, "b"])
def test_tokens_too_long_to_be_merged_are_refused(text: str, tmp_path: Path) -> None:
    more = [text] if len(text) > 1 else [f"{number:0>1000}" for number in range(5000)]
    metadata = sentence_piece(*more, kind=NORMAL)
    with pytest.raises(ModelError, match="characters, at most"):
        written(metadata, tmp_path)


def test_any_metadata_give_a_tokenizer_or_an_error(tmp_path: Path) -> None:
    draw = random.Random(5)
    values: list[Callable[[], Any]] = [
        lambda: None,
        lambda: draw.randrange(-5, 400),
        lambda: draw.choice(["", "gpt2", "llama", "gemma4", "default", "\ufffd", "{{"]),
        lambda: draw.random() < 0.5,
        lambda: [
            draw.choice(["a", "b", "a b", " ", "", "[PAD3]"]) for _ in range(draw.randrange(9))
        ],
        lambda: np.array([draw.randrange(9) for _ in range(265)], np.int32),
        lambda: np.array([draw.random() for _ in range(259)], np.float32),
    ]
    num_made = 0
    for _ in range(400):
        metadata = draw.choice([byte_level, sentence_piece])()
        for key in draw.sample([*metadata, "tokenizer.ggml.bos_token_id"], draw.randint(1, 2)):
            metadata[key] = draw.choice(values)()
        try:
            tokenizer = derived(metadata, tmp_path)
        except ModelError:
            continue
        num_made += 1
        tokenizer.decode(tokenizer.encode("hello \u00e9").ids)
    assert num_made > 20
