"""The classifiers of Hugging Face architectures: where they pool, and which layers they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.config.model import ModelInfo
from engine.config.pooler import Activation, PoolingMode
from engine.config.pooling.spec import ACTIVATIONS, HeadLayer
from engine.errors import ModelError

CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
LATE_INTERACTION = "HF_ColBERT"
"""The architecture of Stanford's ColBERT, which is BERT with a linear layer after it."""
ROBERTA = ("Roberta", "XLMRoberta", "Camembert", "MPNet")
BERT = {"Bert": "bert", "New": "new", "Gte": "gte", "NomicBert": "nomic_bert"}
"""Families whose pooler is a module of the model, by its name in checkpoints."""
ENCODERS = (*BERT, *ROBERTA, "ModernBert")
"""Families whose tokens see later tokens too."""


class Classifier(NamedTuple):
    """Layers from hidden states to scores."""

    mode: PoolingMode
    layers: tuple[HeadLayer, ...]


def family_of(info: ModelInfo) -> str:
    """The name of an architecture without what it was made for: ``Bert`` for ``BertModel``."""
    name = "Bert" if info.architecture == LATE_INTERACTION else info.architecture
    return name.partition("For")[0] if "For" in name else name.removesuffix("Model")


def is_encoder(info: ModelInfo) -> bool:
    """Whether a model's family is one of encoders."""
    return family_of(info) in ENCODERS


def hidden_size(info: ModelInfo) -> int:
    """Numbers of a hidden state. Raises ``ModelError`` if config.json has none."""
    for key in ("hidden_size", "n_embd", "d_model", "dim"):
        value = info.hf.get(key)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ModelError(
                    f"{info.path / 'config.json'} is damaged: {key} is {value!r:.80}, must be a "
                    "whole number of at least 1"
                )
            return value
    raise ModelError(f"{info.path / 'config.json'} lacks 'hidden_size', which pooling needs")


def labels(info: ModelInfo) -> tuple[str, ...]:
    """The names of a classifier's classes, in order. Raises ``ModelError`` if they are damaged."""
    names = info.hf.get("id2label")
    file = info.path / "config.json"
    if names is None:
        num = info.hf.get("num_labels", 2)  # transformers leaves two unnamed labels out
        if type(num) is not int or num < 1:
            raise ModelError(f"{file} is damaged: num_labels is {num!r:.80}, must be at least 1")
        return tuple(f"LABEL_{index}" for index in range(num))
    try:
        by_index = {int(index): str(name) for index, name in names.items()}
        return tuple(by_index[index] for index in range(max(1, len(by_index))))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file} is damaged: id2label is {names!r:.80}, must name the labels 0, 1, ..."
        ) from error


def classifier(info: ModelInfo, hidden: int, num: int) -> Classifier:
    """The classifier of a text. hidden: numbers of a hidden state; num: of scores."""
    family = family_of(info)
    if family in BERT:
        names = tuple(f"{root}pooler.dense" for root in (f"{BERT[family]}.", "bert.", ""))
        pooler = _linear(names, hidden, hidden, "tanh")
        return Classifier("cls", (pooler, _linear(("classifier",), hidden, num)))
    if family in ROBERTA:
        dense = _linear(("classifier.dense",), hidden, hidden, "tanh")
        return Classifier("cls", (dense, _linear(("classifier.out_proj",), hidden, num)))
    if family == "ModernBert":
        return _modern(info, hidden, num)
    score = _linear(("score",), hidden, num, bias=None)
    return Classifier("last", (score,))


def token_classifier(info: ModelInfo, hidden: int, num: int) -> Classifier:
    """The classifier of each token."""
    family = family_of(info)
    if family == "ModernBert":
        return _modern(info, hidden, num)
    names = ("classifier",) if is_encoder(info) else ("score",)
    return Classifier("last", (_linear(names, hidden, num, bias=None),))


def _modern(info: ModelInfo, hidden: int, num: int) -> Classifier:
    hf, file = info.hf, info.path / "config.json"
    mode = hf.get("classifier_pooling", "cls")
    if mode not in ("cls", "mean"):
        raise ModelError(f"{file} has classifier_pooling {mode!r:.80}; supported are cls and mean")
    has_bias = bool(hf.get("classifier_bias", False))
    function = _function(info, hf.get("classifier_activation", "gelu"))
    dense = _linear(("head.dense",), hidden, hidden, function, bias=has_bias)
    norm = HeadLayer(
        kind="layer_norm",
        names=("head.norm",),
        in_features=hidden,
        out_features=hidden,
        bias=bool(hf.get("norm_bias", False)),
        eps=float(hf.get("norm_eps", 1e-5)),
    )
    return Classifier(mode, (dense, norm, _linear(("classifier",), hidden, num)))


def _linear(
    names: tuple[str, ...],
    in_features: int,
    out_features: int,
    function: str = "identity",
    *,
    bias: bool | None = True,
) -> HeadLayer:
    return HeadLayer(
        kind="linear",
        names=names,
        in_features=in_features,
        out_features=out_features,
        function=function,
        bias=bias,
    )


def _function(info: ModelInfo, name: object) -> str:
    function = ACTIVATIONS.get(str(name).lower())
    if function is None:
        raise ModelError(
            f"{info.path / 'config.json'} has classifier_activation {name!r:.80}; supported are "
            f"{', '.join(ACTIVATIONS)}"
        )
    return function


SCORE_FUNCTIONS: dict[str, Activation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
}
"""Functions after scores, by the last name of their paths."""


def activation_of_scores(info: ModelInfo, stated: str | None, num: int) -> tuple[Activation, str]:
    """The function after a classifier's scores, and where it was found.

    stated: its path in a file of sentence-transformers; num: number of scores."""
    own = info.hf.get("sentence_transformers")
    if stated is None and isinstance(own, Mapping):
        stated = own.get("activation_fn")
    if stated is None:
        stated = info.hf.get("sbert_ce_default_activation_function")
    if stated is not None:
        name = str(stated).rpartition(".")[2]
        if name not in SCORE_FUNCTIONS:
            raise ModelError(
                f"{info.path} has the function {stated!r:.120} after its scores; supported are "
                f"{', '.join(SCORE_FUNCTIONS)}"
            )
        return SCORE_FUNCTIONS[name], "stated by sentence-transformers"
    problem: Any = info.hf.get("problem_type")
    if problem == "regression":
        return "none", "problem_type is regression"
    if problem == "multi_label_classification":
        return "sigmoid", "problem_type is multi_label_classification"
    return ("sigmoid" if num == 1 else "softmax"), "assumed from the number of labels"
