"""Our reading of tokenizer files against transformers': same ids, same text, same chats."""

import random
from pathlib import Path
from typing import Any

import pytest
from support import made_tokenizers as made
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.processors import TemplateProcessing

from engine.config.model import ModelConfig
from engine.errors import ModelError, RequestError, RequestTypeError
from engine.text.tokenizer import RustBackend, Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello",
    " a leading space",
    "two  spaces, a tab\tand\nnew\n\nlines ",
    "café 日本語 😀 👍🏽 кириллица \u200b",
    "<s>special</s> tokens <unk> and <|im_start|>user",
    "The quick brown fox" * 20,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What is <b>café</b>? "},
    {"role": "assistant", "content": "A café."},
    {"role": "user", "content": "Thanks 😀"},
]
LLAMA_2 = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}\
{% set messages = messages[1:] %}{% endif %}{{ bos_token }}{% for m in messages %}
    {% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
    {% if m['role'] == 'user' %}{{ '[INST] ' + m['content'].strip() + ' [/INST]' }}
    {%- else %}{{ ' ' + m['content'] + eos_token }}{% endif %}
{% endfor %}"""
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
WITH_TOOLS = """{%- set ns = namespace(count=0) %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}
    {% generation %}{{ ns.count }}: {{ m | tojson }}{% endgeneration %}
{%- endfor %}
{{ strftime_now('%Y') }}{{ custom | default('none') }}{{ unk_token }}"""
TEMPLATES = {"llama_2": LLAMA_2, "chatml": CHATML, "with_tools": WITH_TOOLS}


def load(root: Path) -> Tokenizer:
    return load_tokenizer(ModelConfig(model=str(root)))


def reference(root: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(root, local_files_only=True)


def with_bos(tokenizer: RustTokenizer) -> RustTokenizer:
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bos and eos asked": {"add_bos_token": True, "add_eos_token": True},
    "bos refused": {"add_bos_token": False},
    "tokens as objects": {
        "eos_token": {"content": "</s>", "lstrip": False, "__type": "AddedToken"},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    },
    "tokens named here only": {
        "pad_token": "<pad>",
        "added_tokens_decoder": {
            "9000": {"content": "<|im_start|>", "special": True},
            "9001": {"content": "plain added", "special": False},
        },
    },
    "split special": {"split_special_tokens": True},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", made.MAKERS)
def test_ids_equal_those_of_transformers(tmp_path: Path, kind: str, config: str) -> None:
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        **CONFIGS[config],
    }
    root = made.save(tmp_path, made.MAKERS[kind](), {"tokenizer_config.json": options})
    ours, theirs = load(root), reference(root)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"], text
        bare = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == bare
        for skip in (True, False):
            assert ours.decode(bare, skip) == theirs.decode(bare, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_post_processor_of_the_file_is_kept(tmp_path: Path) -> None:
    root = made.save(tmp_path, with_bos(made.byte_level()))
    assert load(root).encode("Hello") == reference(root)("Hello")["input_ids"]
    assert load(root).encode("Hello")[0] == 1


def test_special_tokens_map_of_older_directories(tmp_path: Path) -> None:
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}},
    }
    root = made.save(tmp_path, made.byte_level(), files)
    ours, theirs = load(root), reference(root)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_chats_equal_those_of_transformers(tmp_path: Path, name: str, generation: bool) -> None:
    root = made.save(tmp_path, made.byte_level(), {"chat_template.jinja": TEMPLATES[name]})
    thinking = [*CHAT, {"role": "assistant", "content": "x", "reasoning": "hm"}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"é": [1, None]}}}]
    for messages in (CHAT, thinking):
        for variables in ({}, {"tools": tools, "custom": "<&>"}):
            ours = load(root).apply_chat_template(
                messages, add_generation_prompt=generation, **variables
            )
            assert ours == reference(root).apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, **variables
            )


@pytest.mark.parametrize("style", ["string", "list", "folder"])
def test_named_templates(tmp_path: Path, style: str) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files: dict[str, Any] = {"tokenizer_config.json": config}
    if style == "string":
        config["chat_template"] = "default"
    elif style == "list":
        config["chat_template"] = [
            {"name": "default", "template": "default"},
            {"name": "tool_use", "template": "tools"},
        ]
    else:
        files["chat_template.jinja"] = "default"
        files["additional_chat_templates/tool_use.jinja"] = "tools"
    root = made.save(tmp_path, made.byte_level(), files)
    ours, theirs = load(root), reference(root)
    for tools in (None, [{"name": "f"}]):
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
        assert ours.apply_chat_template(CHAT, tools=tools) == expected
    assert ours.apply_chat_template(CHAT, chat_template="{{ messages|length }}") == "4"


def test_template_refuses(tmp_path: Path) -> None:
    root = made.save(tmp_path, made.byte_level(), {"chat_template.jinja": LLAMA_2})
    with pytest.raises(RequestError, match="roles must alternate"):
        load(root).apply_chat_template([CHAT[1], CHAT[1]])
    with pytest.raises(RequestError, match="a message must be"):
        load(root).apply_chat_template(["hello"])  # type: ignore[list-item]


def test_template_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    root = made.save(tmp_path, made.byte_level())
    for attack in ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(RequestError):
            load(root).apply_chat_template(CHAT, chat_template=attack)


def test_no_template_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="set chat_template"):
        load(made.save(tmp_path, made.byte_level())).apply_chat_template(CHAT)


def test_damaged_or_missing_files(tmp_path: Path) -> None:
    root = made.save(tmp_path / "damaged", made.byte_level())
    (root / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="damaged"):
        load(root)
    (root / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="skip_tokenizer_init"):
        load(root)
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(ModelConfig(model=str(root), tokenizer=str(tmp_path / "nowhere")))


def test_sentencepiece_models(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")  # transformers reads its models with it
    (tmp_path / "text").write_text("\n".join(made.TEXT * 5), encoding="utf-8")
    root = made.save(tmp_path / "model", made.metaspace())
    (root / "tokenizer.json").unlink()
    sentencepiece.SentencePieceTrainer.Train(
        input=str(tmp_path / "text"),
        model_prefix=str(root / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    ours, theirs = load(root), reference(root)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.eos_token_id == theirs.eos_token_id is not None


def test_transformers_converts_what_has_no_tokenizer_json(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocab = {token: index for index, token in enumerate(["<|endoftext|>", "a", "b", "ab", "Ġ"])}
    root = made.save(
        tmp_path,
        made.byte_level(),
        {
            "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
            "vocab.json": vocab,
            "merges.txt": "#version: 0.2\na b\n",
        },
    )
    (root / "tokenizer.json").unlink()
    with caplog.at_level("INFO", logger="engine"):
        tokenizer = load(root)
    assert tokenizer.encode("ab a") == [3, 4, 1]
    assert "transformers" in caplog.text


def test_a_fault_of_the_library_is_an_error_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises what is no ``Exception`` then, which would end a server's thread."""

    class Panic(BaseException):
        pass

    def encode(*_: object) -> list[int]:
        raise Panic("index out of bounds")

    tokenizer = Tokenizer(RustBackend(made.metaspace()), {}, {})
    monkeypatch.setattr(tokenizer.backend, "encode", encode)
    with pytest.raises(RequestError, match=r"'x' cannot be tokenised: index out of bounds"):
        tokenizer.encode("x")


@pytest.mark.parametrize("kind", made.MAKERS)
def test_texts_have_the_same_ids_together_and_alone(kind: str, seed: int) -> None:
    """Also as the library gives them that is asked for one text."""
    dice, rust = random.Random(seed), made.MAKERS[kind]()
    alphabet = "ab  \n\t.,:()é日本😀\u0301\u200b<s></s>0123"
    texts = ["", *("".join(dice.choices(alphabet, k=dice.randint(1, 80))) for _ in range(200))]
    tokenizer = Tokenizer(RustBackend(rust), {}, {})
    alone = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_all(texts) == alone
    assert [rust.encode(text).ids for text in texts] == alone
    bare = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert [rust.encode(text, add_special_tokens=False).ids for text in texts] == bare


@pytest.mark.parametrize("wrong", [("a", "b"), ["a", "b"], ["a"], b"a", None, 5])
def test_a_pair_or_list_of_texts_is_no_text(wrong: Any) -> None:
    tokenizer = Tokenizer(RustBackend(made.metaspace()), {}, {})
    with pytest.raises(RequestTypeError, match="cannot be tokenised"):
        tokenizer.encode(wrong)
