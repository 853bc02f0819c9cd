"""What is read from model directories, and the layers after pooling, equal sentence-transformers
and transformers in float32.

The hidden states come from the reference, so that a difference is one of pooling, layers or
functions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.sentence_models import (
    as_colbert,
    as_version_3,
    random_model,
    save_base,
    save_sentences,
)
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from torch import nn

from engine.config.model import ModelConfig, read_model_info
from engine.config.pooling import PoolingSpec, read_pooling
from engine.models.pooling import Head, load_head
from engine.text.pairs import encode_pairs
from engine.text.tokenizer import load_tokenizer

TEXTS = ["the cat sits on a mat", "stock prices fell", "dog", "I runs fast , Cat . you"]
PAIRS = [("the cat", "a mat on the dog"), ("prices", "fell"), ("you", "the cat sits fast today")]
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 2e-6}


def head_of(root: Path, **options: Any) -> Head:
    """The head of a directory, as a worker loads it."""
    info, config = read_model_info(root), ModelConfig(model=str(root), **options)
    spec = read_pooling(info, config)
    assert spec is not None
    return load_head(spec, info, config, "cpu")


def pool(spec: PoolingSpec, hidden: Sequence[torch.Tensor]) -> torch.Tensor:
    """The vector of each text. hidden: [tokens, H] of each."""
    modes = {"cls": lambda each: each[0], "last": lambda each: each[-1]}
    make = modes.get(spec.mode, lambda each: each.mean(0))
    return torch.stack([make(each) for each in hidden])


def hidden_states(model: Any, ids: Sequence[list[int]], seconds: Sequence[int | None] = ()) -> Any:
    """The last hidden states of each sequence, computed alone. seconds: index of the first token of
    type 1."""
    states = []
    for place, each in enumerate(ids):
        kwargs: dict[str, Any] = {}
        second = seconds[place] if seconds else None
        if second is not None and getattr(model.config, "type_vocab_size", 0) > 1:
            types = [0] * second + [1] * (len(each) - second)
            kwargs["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            states.append(model(torch.tensor([each]), **kwargs).last_hidden_state[0])
    return states


def embedded(root: Path, texts: Sequence[str], **options: Any) -> torch.Tensor:
    """Embeddings of texts by our reading of a directory."""
    head, tokenizer = head_of(root, **options), load_tokenizer(ModelConfig(model=str(root)))
    model = SentenceTransformer(str(root), device="cpu").transformers_model
    hidden = hidden_states(model, [tokenizer.encode(text) for text in texts])
    return head.activate(head(pool(head.spec, hidden)))


HEADS: dict[str, tuple[str, list[nn.Module]]] = {
    "mean": ("Bert", [Pooling(32, "mean")]),
    "cls-normalized": ("Bert", [Pooling(32, "cls"), Normalize()]),
    "last": ("Qwen3", [Pooling(32, "lasttoken"), Normalize()]),
    "dense": (
        "Qwen3",
        [
            Pooling(32, "mean"),
            Dense(32, 48, bias=False, activation_function=nn.Identity()),
            Dense(48, 16, bias=False, activation_function=nn.Identity()),
            Normalize(),
        ],
    ),
    "all": (
        "Bert",
        [
            Pooling(32, "mean"),
            Normalize(),
            Dense(32, 20, activation_function=nn.GELU()),
            LayerNorm(20),
            Dense(20, 20),
        ],
    ),
}


@pytest.mark.parametrize("is_former", [False, True], ids=["version 6", "version 3"])
@pytest.mark.parametrize("name", HEADS)
def test_embeddings_equal_those_of_sentence_transformers(
    name: str, is_former: bool, tmp_path: Path
) -> None:
    family, modules = HEADS[name]
    prompts = {"query": "query : ", "passage": "passage : "}
    root = save_sentences(
        tmp_path, family, modules, transformer={"max_seq_length": 40}, prompts=prompts
    )
    if is_former:
        as_version_3(root, max_seq_length=40)
    theirs = SentenceTransformer(str(root), device="cpu")
    want = theirs.encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(embedded(root, TEXTS), want, **CLOSE)
    spec = head_of(root).spec
    assert spec.width == want.shape[1] == theirs.get_embedding_dimension()
    assert spec.max_seq_length == 40 == theirs.max_seq_length
    assert {key: text for key, text in spec.prompts.items() if text} == prompts
    assert spec.similarity == "cosine"


def test_residual_layers_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    modules = [
        Pooling(32, "mean"),
        Dense(32, 32, use_residual=True),
        Dense(32, 8, use_residual=True, activation_function=nn.SiLU()),
    ]
    root = save_sentences(tmp_path, "Bert", modules)
    want = SentenceTransformer(str(root), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(embedded(root, TEXTS), want, **CLOSE)


def test_texts_in_lower_case_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    root = save_sentences(tmp_path, "Bert", [Pooling(32, "mean")])
    as_version_3(root, max_seq_length=64, do_lower_case=True)
    theirs = SentenceTransformer(str(root), device="cpu")
    texts = ["The CAT sits", "Dog [MASK] Cat"]
    torch.testing.assert_close(
        embedded(root, texts), theirs.encode(texts, convert_to_tensor=True), **CLOSE
    )


def test_shortened_embeddings_are_normalised_after_the_cut(tmp_path: Path) -> None:
    root = save_sentences(tmp_path, "Bert", [Pooling(32, "mean"), Normalize()], truncate_dim=12)
    theirs = SentenceTransformer(str(root), device="cpu")
    want = theirs.encode(TEXTS, convert_to_tensor=True, normalize_embeddings=True)
    assert want.shape[1] == 12
    torch.testing.assert_close(embedded(root, TEXTS), want, **CLOSE)
    head = head_of(root)
    assert head.spec.is_matryoshka
    short = head.activate(torch.randn(2, 32), dimensions=5)
    torch.testing.assert_close(short.norm(dim=1), torch.ones(2))


@pytest.mark.parametrize(
    ("family", "ending", "mode"),
    [("Bert", "Model", "mean"), ("Qwen3", "ForCausalLM", "last"), ("Qwen3", "Model", "last")],
)
def test_plain_directories_are_read_as_by_sentence_transformers(
    family: str, ending: str, mode: str, tmp_path: Path
) -> None:
    root = save_base(tmp_path, random_model(family, ending))
    head = head_of(root, runner="pooling")
    assert (head.spec.task, head.spec.mode, head.spec.is_activated) == ("embed", mode, False)
    if (family, ending) != ("Qwen3", "Model"):  # of which sentence-transformers takes the mean
        want = SentenceTransformer(str(root), device="cpu").encode(TEXTS, convert_to_tensor=True)
        torch.testing.assert_close(embedded(root, TEXTS, runner="pooling"), want, **CLOSE)


# Cross-encoders


def scores(root: Path, model: Any, pairs: Sequence[tuple[str, str]], **options: Any) -> Any:
    """Scores of pairs by our reading of a directory, without and with the last function."""
    head, tokenizer = head_of(root, **options), load_tokenizer(ModelConfig(model=str(root)))
    encoded = encode_pairs(tokenizer, head.spec, pairs, head.spec.max_seq_length)
    ids, seconds = zip(*encoded, strict=True)
    values = head(pool(head.spec, hidden_states(model, ids, seconds)))
    return values, head.activate(values, use_activation=True)


CLASSIFIERS: list[tuple[str, dict[str, Any]]] = [
    ("Bert", {"num_labels": 1}),
    ("Roberta", {"num_labels": 3}),
    ("XLMRoberta", {"num_labels": 1}),
    ("MPNet", {"num_labels": 2}),
    ("ModernBert", {"num_labels": 1}),
    ("ModernBert", {"num_labels": 3, "classifier_pooling": "mean", "classifier_bias": True}),
    ("Gte", {"num_labels": 2}),
    ("NomicBert", {"num_labels": 1}),
    ("Qwen3", {"num_labels": 1}),
    ("Llama", {"num_labels": 4}),
]


@pytest.mark.parametrize(("family", "options"), CLASSIFIERS)
def test_scores_equal_those_of_cross_encoders(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = random_model(family, "ForSequenceClassification", **options)
    root = save_base(tmp_path, model)
    theirs = CrossEncoder(str(root), device="cpu")
    values, activated = scores(root, model.base_model, PAIRS)
    want = theirs.predict(PAIRS, convert_to_tensor=True, activation_fn=nn.Identity())
    torch.testing.assert_close(values, want.reshape(values.shape), **CLOSE)
    last = torch.sigmoid(values) if options["num_labels"] == 1 else values.softmax(1)
    torch.testing.assert_close(activated, last)
    if options["num_labels"] == 1:
        torch.testing.assert_close(activated[:, 0], theirs.predict(PAIRS, convert_to_tensor=True))
    # The same, saved again by sentence-transformers, whose files name the function.
    theirs.activation_fn = nn.Identity()
    theirs.save_pretrained(str(tmp_path / "again"))
    head = head_of(tmp_path / "again")
    torch.testing.assert_close(head.activate(values), values)
    assert head.spec.layers == head_of(root).spec.layers
    assert head.spec.max_seq_length == theirs.max_seq_length


def test_types_of_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Whose class and files decide whether a model gets any."""
    model = random_model("Bert", "ForSequenceClassification", num_labels=1)
    save_base(tmp_path, model, model_input_names=["input_ids", "attention_mask"])
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["model_input_names"]
    found = []
    for name in ("TokenizersBackend", "BertTokenizer"):
        file.write_text(json.dumps({**config, "tokenizer_class": name}))
        theirs = CrossEncoder(str(tmp_path), device="cpu")
        _, activated = scores(tmp_path, model.base_model, PAIRS)
        want = theirs.predict(PAIRS, convert_to_tensor=True)
        torch.testing.assert_close(activated[:, 0], want, **CLOSE)
        found.append(want)
    assert not torch.equal(*found)


@pytest.mark.parametrize(
    ("key", "value", "activation"),
    [
        ("problem_type", "regression", "none"),
        ("problem_type", "multi_label_classification", "sigmoid"),
        ("problem_type", "single_label_classification", "softmax"),
        ("sbert_ce_default_activation_function", "torch.nn.modules.linear.Identity", "none"),
        ("sentence_transformers", {"activation_fn": "torch.nn.modules.activation.Tanh"}, "tanh"),
    ],
)
def test_the_function_after_scores_is_that_of_config_json(
    key: str, value: Any, activation: str, tmp_path: Path
) -> None:
    save_base(tmp_path, random_model("Bert", "ForSequenceClassification", num_labels=3))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    spec = head_of(tmp_path).spec
    assert (spec.task, spec.activation, spec.is_activated) == ("classify", activation, True)
    assert spec.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    raw = head_of(tmp_path, pooler_config={"use_activation": False, "logit_bias": 2.0})
    torch.testing.assert_close(raw.activate(torch.ones(1, 3)), -torch.ones(1, 3))


def test_a_reranker_of_modules_is_read_as_by_sentence_transformers(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", random_model("Bert"))
    dense = Dense(32, 1, activation_function=nn.Identity(), module_output_name="scores")
    theirs = CrossEncoder(modules=[Transformer(str(base)), Pooling(32, "cls"), dense], device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    _, activated = scores(tmp_path / "saved", theirs.transformers_model, PAIRS)
    want = theirs.predict(PAIRS, convert_to_tensor=True)
    torch.testing.assert_close(activated[:, 0], want, **CLOSE)


def test_scores_by_tokens_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    """The form of Qwen3-Reranker, whose directory is that of a model that generates."""
    base = save_base(tmp_path / "base", random_model("Qwen3", "ForCausalLM"))
    ids = load_tokenizer(ModelConfig(model=str(base))).encode("yes no", add_special_tokens=False)
    first = Transformer(str(base), transformer_task="text-generation")
    theirs = CrossEncoder(modules=[first, LogitScore(*ids)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    want = theirs.predict(PAIRS, convert_to_tensor=True)
    model = theirs.transformers_model.base_model
    by_token = {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    plain: dict[str, Any] = {"convert": "classify", "pooler_config": by_token}
    for root, options in ((tmp_path / "saved", {}), (base, plain)):
        _, activated = scores(root, model, PAIRS, **options)
        torch.testing.assert_close(activated[:, 0], want, **CLOSE)
    both = {"classifier_from_token": ["no", "yes"]}
    _, probs = scores(base, model, PAIRS, convert="classify", pooler_config=both)
    torch.testing.assert_close(probs[:, 1], want, **CLOSE)


@pytest.mark.parametrize("family", ["Bert", "Roberta", "ModernBert", "Qwen3"])
def test_scores_of_tokens_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = random_model(family, "ForTokenClassification", num_labels=5)
    root = save_base(tmp_path, model)
    head, ids = head_of(root), [2, 7, 8, 9, 3]
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    values = head(hidden_states(model.base_model, [ids])[0])
    torch.testing.assert_close(values, want, **CLOSE)
    torch.testing.assert_close(head.activate(values), want.softmax(1), **CLOSE)
    assert head.spec.tasks == ("token_classify",)


# An embedding of each token


@pytest.mark.parametrize("form", ["version 6", "PyLate", "ColBERT"])
def test_embeddings_of_tokens_equal_those_of_multi_vector_encoders(
    form: str, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", random_model("Bert"))
    torch.manual_seed(1)
    dense = Dense(
        *(32, 12),
        bias=False,
        activation_function=nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [Transformer(str(base)), dense, MultiVectorMask()]
    modules.append(Normalize(module_input_name="token_embeddings"))
    theirs = MultiVectorEncoder(modules=modules, device="cpu")
    root = tmp_path / "saved"
    theirs.save_pretrained(str(root))
    if form == "PyLate":
        entries = json.loads((root / "modules.json").read_text())[:2]
        entries[1]["type"] = "pylate.models.Dense.Dense"
        (root / "modules.json").write_text(json.dumps(entries))
        settings = {"model_type": "ColBERT", "skiplist_words": []}
        (root / "config_sentence_transformers.json").write_text(json.dumps(settings))
    if form == "ColBERT":
        root = as_colbert(tmp_path, dense)
    want = theirs.encode_document(TEXTS)
    head, tokenizer = head_of(root), load_tokenizer(ModelConfig(model=str(base)))
    hidden = hidden_states(theirs.transformers_model, [tokenizer.encode(text) for text in TEXTS])
    assert (head.spec.task, head.spec.similarity) == ("token_embed", "maxsim")
    for each, wanted in zip(hidden, want, strict=True):
        torch.testing.assert_close(head.activate(head(each)), wanted, **CLOSE)
