"""Decides whether a model pools, and reads how from its directory. Loads no torch."""

from __future__ import annotations

import logging
import string
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from engine.config.model import ModelConfig, ModelInfo
from engine.config.pooler import Activation, PoolerOptions, PoolingMode, pooler_options
from engine.config.pooling.describe import describe
from engine.config.pooling.heads import (
    CLASSIFIER,
    LATE_INTERACTION,
    TOKEN_CLASSIFIER,
    activation_of_scores,
    classifier,
    hidden_size,
    is_encoder,
    labels,
    token_classifier,
)
from engine.config.pooling.sentence_files import (
    MODULES,
    SCORES,
    SENTENCE,
    TOKENS,
    SentenceFiles,
    read_sentence_files,
    stated_length,
)
from engine.config.pooling.spec import HeadLayer, LayerKind, PooledTask, PoolingSpec
from engine.errors import ConfigError, ModelError

logger = logging.getLogger("engine.config")

__all__ = [
    "HeadLayer",
    "LayerKind",
    "PooledTask",
    "PoolingSpec",
    "is_bidirectional",
    "read_pooling",
]

REWARD_MODEL = "ForRewardModel"
POOLED = (CLASSIFIER, TOKEN_CLASSIFIER, REWARD_MODEL, "ForProcessRewardModel", LATE_INTERACTION)
"""Endings of architectures that have no output layer for tokens."""
RERANKER_TOKENS = ("no", "yes")


def read_pooling(info: ModelInfo, config: ModelConfig, *, logs: bool = True) -> PoolingSpec | None:
    """Read how the results of a model are computed; ``None`` if it generates text.

    logs: log what was read and what was assumed. Raises ``ModelError`` for directories that are
    damaged or have modules that are not supported, and ``ConfigError`` for options that do not
    fit."""
    options = pooler_options(config.pooler_config)
    if config.runner == "generate":
        _check_generates(info, config)
        return None
    if not _pools(info, config):
        if config.pooler_config is not None:
            raise ConfigError(
                f'pooler_config is given, and {_name(info)} generates text: set runner="pooling", '
                "or leave pooler_config out"
            )
        return None
    try:
        return _read(info, config, options, logs=logs)
    except ConfigError:  # of which ``ModelError`` is a kind
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{info.path} has a damaged file, or one in an unknown form, among those that say how "
            f"the model pools: {type(error).__name__}: {error}"
        ) from error


def _read(
    info: ModelInfo, config: ModelConfig, options: PoolerOptions, *, logs: bool
) -> PoolingSpec:
    hidden, tokenizer = hidden_size(info), Path(config.tokenizer or info.path).expanduser()
    files = read_sentence_files(info, hidden, tokenizer)
    reader = _Directory(info, config, options, hidden, files)
    spec = _spec(reader.read(), info, options, files, tokenizer)
    if logs:
        logger.info("%s pools: %s", info.name, describe(spec, reader.assumed))
    return spec


def is_bidirectional(info: ModelInfo) -> bool:
    """Whether tokens see later tokens: in encoders, and in decoders whose config.json says so."""
    hf = info.hf
    causal = hf.get("is_causal", True) and not hf.get("use_bidirectional_attention", False)
    return is_encoder(info) or not causal


def _name(info: ModelInfo) -> str:
    return info.architecture or info.model_type


def _pools(info: ModelInfo, config: ModelConfig) -> bool:
    if config.runner == "pooling" or config.convert in ("embed", "classify"):
        return True
    name = info.architecture
    if name.endswith(POOLED) or (info.path / MODULES).is_file():
        return True
    return is_encoder(info) or (name.endswith("Model") and not name.endswith("LMHeadModel"))


def _check_generates(info: ModelInfo, config: ModelConfig) -> None:
    for name, value in (("convert", config.convert), ("pooler_config", config.pooler_config)):
        if value not in ("auto", "none", None):
            raise ConfigError(
                f"{name} is {value!r:.80} and runner is 'generate': leave one of them out"
            )
    if info.architecture.endswith(POOLED) or is_encoder(info):
        raise ConfigError(
            f"runner is 'generate', and {info.architecture} has no output layer for tokens: leave "
            "runner out"
        )


class _Pipeline(NamedTuple):
    """From hidden states to results; see the fields of ``PoolingSpec``."""

    task: PooledTask
    mode: PoolingMode
    layers: tuple[HeadLayer, ...]
    activation: Activation
    is_activated: bool
    labels: tuple[str, ...] = ()


class _Directory:
    """Reads the pipeline of one model."""

    def __init__(
        self,
        info: ModelInfo,
        config: ModelConfig,
        options: PoolerOptions,
        hidden: int,
        files: SentenceFiles | None,
    ) -> None:
        self._info = info
        self._config = config
        self._options = options
        self._hidden = hidden
        self._files = files
        self.assumed: list[str] = []
        """What no file states, in words."""

    def read(self) -> _Pipeline:
        info, convert = self._info, self._config.convert
        name = info.architecture
        if name.endswith(("ForRewardModel", "ForProcessRewardModel")):
            raise ModelError(
                f"{name} needs code from the model's directory, which is not supported; reward "
                f"models with the architecture *{CLASSIFIER} are"
            )
        if convert == "embed":
            return self._embed()
        tokens = self._tokens()
        if tokens or convert == "classify":
            return self._classify(tokens)
        if self._files is not None:
            return self._from_files(self._files)
        if name.endswith((CLASSIFIER, TOKEN_CLASSIFIER)):
            return self._classify(None)
        if name == LATE_INTERACTION:
            return self._late_interaction()
        if convert == "none" and not name.endswith("Model"):
            raise ConfigError(
                f"convert is 'none' and runner is 'pooling', and {_name(info)} generates text: "
                "set convert to 'embed' or 'classify'"
            )
        return self._embed()

    def _from_files(self, files: SentenceFiles) -> _Pipeline:
        if files.result == SCORES and not files.layers:
            return self._classify(None)
        if files.result == SCORES:
            return self._scores(files.mode or "last", files.layers)
        if files.mode is None and files.result != TOKENS:
            raise ModelError(f"{self._info.path / MODULES} has no module that pools")
        return _Pipeline(
            task="token_embed" if files.result == TOKENS else "embed",
            mode=files.mode or "last",
            layers=files.layers,
            activation="normalize",
            is_activated=files.is_normalized,
        )

    def _embed(self) -> _Pipeline:
        if self._files is not None and self._files.result != SCORES:
            return self._from_files(self._files)
        mode: PoolingMode = "mean" if is_bidirectional(self._info) else "last"
        if self._options.mode is None:
            self.assumed.append(f"{mode} pooling")
        if self._options.is_activated is None:
            self.assumed.append("embeddings are not normalised")
        return _Pipeline(
            task="embed",
            mode=mode,
            layers=(),
            activation="normalize",
            is_activated=False,
        )

    def _tokens(self) -> tuple[str, ...] | None:
        """The tokens whose logits are the scores."""
        given = self._options.classifier_from_token
        if given is None:
            given = self._info.hf.get("classifier_from_token")
        if given is None and self._is_reranker and self._config.convert == "classify":
            given = RERANKER_TOKENS
        if given is None:
            return None
        if not isinstance(given, list | tuple) or not all(isinstance(t, str) for t in given):
            raise ModelError(
                f"{self._info.path / 'config.json'} is damaged: classifier_from_token is "
                f"{given!r:.80}, must be a list of tokens"
            )
        return tuple(given)

    @property
    def _is_reranker(self) -> bool:
        return bool(self._info.hf.get("is_original_qwen3_reranker"))

    def _classify(self, tokens: tuple[str, ...] | None) -> _Pipeline:
        info = self._info
        if tokens is not None:
            return self._scores("last", (self._logits(tokens),))
        if self._files is not None and self._files.result == SCORES and self._files.layers:
            return self._from_files(self._files)
        names = labels(info)
        if info.architecture.endswith(TOKEN_CLASSIFIER):
            found = token_classifier(info, self._hidden, len(names))
            scores = self._scores(found.mode, found.layers)
            return scores._replace(task="token_classify", labels=names)
        if not info.architecture.endswith(CLASSIFIER):
            raise ConfigError(
                f"convert is 'classify', and {_name(info)} has no classifier: name the tokens "
                'whose logits are the scores, as in pooler_config={"classifier_from_token": '
                '["no", "yes"], "method": "from_2_way_softmax"}'
            )
        found = classifier(info, self._hidden, len(names))
        return self._scores(found.mode, found.layers)._replace(labels=names)

    def _logits(self, tokens: tuple[str, ...]) -> HeadLayer:
        method = self._options.method or self._info.hf.get("method")
        if method is None:
            method = "from_2_way_softmax" if self._is_reranker else "no_post_processing"
            self.assumed.append(f"method {method}")
        for key, plain in (("final_logit_softcapping", None), ("logits_scaling", 1)):
            if self._info.hf.get(key, plain) not in (None, plain):
                raise ModelError(
                    f"{_name(self._info)} changes its logits ({key} in config.json), and scores by "
                    "tokens support only logits that are products of the last hidden state"
                )
        is_difference = method == "from_2_way_softmax"
        if is_difference and len(tokens) != 2:
            raise ConfigError(
                f"classifier_from_token has {len(tokens)} tokens, and from_2_way_softmax needs "
                'two: the one for no, then the one for yes, as in ["no", "yes"]'
            )
        return HeadLayer(
            kind="logits",
            in_features=self._hidden,
            out_features=1 if is_difference else len(tokens),
            tokens=tokens,
            is_difference=is_difference,
        )

    def _scores(self, mode: PoolingMode, layers: tuple[HeadLayer, ...]) -> _Pipeline:
        stated = None if self._files is None else self._files.activation
        num = layers[-1].out_features
        activation, source = activation_of_scores(self._info, stated, num)
        self.assumed.append(f"{activation} after the scores ({source})")
        names = labels(self._info) if num > 1 else ()
        return _Pipeline(
            task="classify",
            mode=mode,
            layers=layers,
            activation=activation,
            is_activated=True,
            labels=names if len(names) == num else (),
        )

    def _late_interaction(self) -> _Pipeline:
        logger.warning(
            "%s: what artifact.metadata says of texts has no effect here: put the markers of "
            "queries and documents in front yourself; queries are not filled up with masks",
            self._info.name,
        )
        size = self._info.hf.get("dim", 128)
        if type(size) is not int or size < 1:
            raise ModelError(
                f"{self._info.path / 'config.json'} is damaged: dim is {size!r:.80}, must be a "
                "whole number"
            )
        layer = HeadLayer(
            kind="linear",
            names=("linear",),
            in_features=self._hidden,
            out_features=size,
            bias=False,
        )
        return _Pipeline(
            task="token_embed",
            mode="last",
            layers=(layer,),
            activation="normalize",
            is_activated=True,
        )


def _spec(
    found: _Pipeline,
    info: ModelInfo,
    options: PoolerOptions,
    files: SentenceFiles | None,
    tokenizer: Path,
) -> PoolingSpec:
    """Join what was read, with the options in place of what the directory says."""
    is_by_token = found.task in ("token_embed", "token_classify")
    if options.mode is not None and is_by_token:
        raise ConfigError(
            f"pooler_config has the pooling type {options.mode.upper()}, and the model "
            "computes a result for each token: leave it out"
        )
    texts = files
    if texts is None and isinstance(info.hf.get("sentence_transformers"), Mapping):
        texts = SentenceFiles(SCORES, max_seq_length=stated_length(info, tokenizer))
    if texts is None and info.architecture == LATE_INTERACTION:
        texts = SentenceFiles(TOKENS, skipped_tokens=tuple(string.punctuation))
    if texts is None:
        texts = SentenceFiles(TOKENS if is_by_token else SENTENCE)
    sizes = _sizes(info, options)
    if options.is_by_token and not is_by_token:
        found = _of_tokens(found)
    activated = options.is_activated
    spec = PoolingSpec(
        task=found.task,
        mode=options.mode or found.mode,
        layers=found.layers,
        hidden_size=hidden_size(info),
        activation=found.activation,
        is_activated=found.is_activated if activated is None else activated,
        logit_mean=options.mean or 0.0,
        logit_sigma=options.logit_sigma or 1.0,
        dimensions=options.dimensions or texts.dimensions,
        is_matryoshka=_is_matryoshka(info, options, texts, sizes),
        matryoshka_dimensions=sizes,
        prompts=texts.prompts,
        default_prompt_name=texts.default_prompt_name,
        max_seq_length=texts.max_seq_length,
        lower_case=texts.lower_case,
        labels=found.labels,
        skipped_tokens=texts.skipped_tokens,
        similarity=texts.similarity or ("maxsim" if found.task == "token_embed" else None),
    )
    _check_dimensions(spec, options)
    return spec


def _of_tokens(found: _Pipeline) -> _Pipeline:
    """The pipeline for results of tokens, of a model for results of texts. Embeddings of tokens are
    hidden states, since the layers were made for texts."""
    if found.task == "embed":
        return found._replace(task="token_embed", layers=(), is_activated=False)
    return found._replace(task="token_classify")


def _sizes(info: ModelInfo, options: PoolerOptions) -> tuple[int, ...]:
    """The dimensions that embeddings may have."""
    if options.matryoshka_dimensions is not None:
        return tuple(options.matryoshka_dimensions)
    sizes = info.hf.get("matryoshka_dimensions") or ()
    if not isinstance(sizes, list | tuple) or not all(type(s) is int and s > 0 for s in sizes):
        raise ModelError(
            f"{info.path / 'config.json'} is damaged: matryoshka_dimensions is {sizes!r:.80}, must "
            "be whole numbers"
        )
    return tuple(sizes)


def _is_matryoshka(
    info: ModelInfo, options: PoolerOptions, files: SentenceFiles, sizes: tuple[int, ...]
) -> bool:
    if options.is_matryoshka is not None:
        return options.is_matryoshka
    return bool(sizes or info.hf.get("is_matryoshka") or files.dimensions)


def _check_dimensions(spec: PoolingSpec, options: PoolerOptions) -> None:
    if options.dimensions is not None and not spec.is_matryoshka:
        raise ConfigError(
            f"pooler_config has dimensions {options.dimensions}, and the model's directory does "
            "not say that its embeddings can be shortened: set is_matryoshka too if they can"
        )
    if spec.dimensions is not None and spec.dimensions > spec.width:
        raise ConfigError(
            f"embeddings have {spec.width} numbers, fewer than the {spec.dimensions} of dimensions"
        )
