"""Directories and options of models that pool: what is read, and damaged and hostile files."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config.model import ModelConfig, read_model_info
from engine.config.pooling import PoolingSpec, read_pooling
from engine.errors import ConfigError, ModelError
from engine.models.pooling import load_head

CONFIG = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 8}
DENSE = {
    "in_features": 8,
    "out_features": 4,
    "bias": True,
    "activation_function": "torch.nn.modules.activation.Tanh",
}
TYPES = {
    "": "sentence_transformers.models.Transformer",
    "1_Pooling": "sentence_transformers.models.Pooling",
    "2_Dense": "sentence_transformers.models.Dense",
    "3_Normalize": "sentence_transformers.models.Normalize",
}
FILES: dict[str, Any] = {
    "config.json": CONFIG,
    "modules.json": [
        {"idx": index, "name": str(index), "path": path, "type": kind}
        for index, (path, kind) in enumerate(TYPES.items())
    ],
    "sentence_bert_config.json": {"max_seq_length": 16, "do_lower_case": True},
    "1_Pooling/config.json": {"word_embedding_dimension": 8, "pooling_mode_cls_token": True},
    "2_Dense/config.json": DENSE,
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}},
}


def write(root: Path, files: dict[str, Any]) -> Path:
    """Write JSON files, or texts as they are."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def read(root: Path, **options: Any) -> PoolingSpec | None:
    return read_pooling(read_model_info(root), ModelConfig(model=str(root), **options))


def modules(*kinds: str, path: str = "") -> list[dict[str, Any]]:
    first = {"type": TYPES[""], "path": ""}
    return [first, *({"type": f"x.{kind}", "path": path or f"1_{kind}"} for kind in kinds)]


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, 20),
        ({"max_seq_length": 16}, 16),
        ({"max_seq_length": 16, "tokenizer_args": {"model_max_length": 12}}, 12),
        ({"max_seq_length": 16, "processing_kwargs": {"text": {"max_length": 8}}}, 8),
    ],
)
def test_texts_are_cut_where_sentence_transformers_cuts_them(
    config: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    own = {"sentence_bert_config.json": config, "tokenizer_config.json": {"model_max_length": 20}}
    spec = read(write(tmp_path, {**FILES, **own}))
    assert spec is not None and spec.max_seq_length == longest


@pytest.mark.parametrize(
    ("settings", "num"),
    [
        ({}, len(string.punctuation)),
        ({"skiplist_words": ["a", "b"]}, 2),
        ({"skiplist_words": []}, 0),
    ],
)
def test_files_of_pylate_skip_punctuation(
    settings: dict[str, Any], num: int, tmp_path: Path
) -> None:
    files = {"modules.json": modules("Dense", path="2_Dense")}
    files["config_sentence_transformers.json"] = {"model_type": "ColBERT", **settings}
    spec = read(write(tmp_path, {**FILES, **files}))
    assert spec is not None and (spec.task, spec.is_activated) == ("token_embed", True)
    assert len(spec.skipped_tokens) == num


def test_what_was_read_and_what_was_assumed_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = read(write(tmp_path / "a", FILES))
    assert spec is not None and (spec.max_seq_length, spec.lower_case) == (16, True)
    assert (
        "task embed, cls pooling, linear 8 x 4 tanh, then normalize, prompts query (default none), "
        "texts are cut at 16 tokens, texts in lower case"
    ) in caplog.text
    assert "assumed" not in caplog.text
    read(write(tmp_path / "b", {"config.json": CONFIG}))
    assert "assumed: mean pooling; embeddings are not normalised" in caplog.text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"modules.json": "[{"}, "modules.json is damaged"),
        ({"modules.json": {}}, "modules.json is damaged: expected a list of modules"),
        ({"modules.json": []}, "begins with 'nothing', and only 'Transformer'"),
        ({"modules.json": [{"path": ""}]}, "type and path of a module must be strings"),
        ({"modules.json": [{"type": "a.CLIPModel", "path": ""}]}, "begins with 'CLIPModel'"),
        (
            {"modules.json": [{"type": TYPES[""], "path": "0_Transformer"}]},
            "the transformer in the folder '0_Transformer': move the files",
        ),
        ({"modules.json": modules("Pooling", path="../x")}, "'../x', which is not inside"),
        ({"modules.json": modules("Pooling", path="/etc")}, "'/etc', which is not inside"),
        ({"modules.json": modules("Pooling", path="a\\..\\..")}, "which is not inside"),
        ({"modules.json": modules("Pooling", "CNN")}, "a module of type 'CNN', which is not"),
        ({"modules.json": modules("Pooling", "Pooling")}, "pools what sentence_embedding"),
        ({"modules.json": modules("Normalize")}, "Normalize reads 'sentence_embedding'"),
        ({"modules.json": modules("Pooling", path="5_Pooling")}, "config.json is missing"),
        ({"1_Pooling/config.json": {"pooling_mode": ["cls", "mean"]}}, "pools by .'cls', 'mean'"),
        ({"1_Pooling/config.json": {"pooling_mode": "weightedmean"}}, "pools by 'weightedmean'"),
        (
            {"1_Pooling/config.json": {"pooling_mode": "mean", "embedding_dimension": 9}},
            "has embedding_dimension 9, and its input has 8 numbers",
        ),
        (
            {"1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False}},
            "include_prompt false",
        ),
        ({"2_Dense/config.json": {**DENSE, "in_features": 7}}, "has in_features 7, and its input"),
        ({"2_Dense/config.json": {**DENSE, "out_features": "4"}}, "out_features is '4', must be"),
        (
            {"2_Dense/config.json": {**DENSE, "activation_function": "my.own.Function"}},
            "activation_function 'my.own.Function'; supported are identity, tanh",
        ),
        ({"sentence_bert_config.json": {"max_seq_length": -1}}, "max_seq_length is -1, must be"),
        (
            {"sentence_bert_config.json": {"processing_kwargs": {"text": {"max_length": 0.5}}}},
            "processing_kwargs.text.max_length is 0.5, must be",
        ),
        (
            {"sentence_bert_config.json": {"transformer_task": "fill-mask"}},
            "transformer_task 'fill-mask'; supported are feature-extraction",
        ),
        (
            {"sentence_bert_config.json": {"modality_config": {"text": {}, "message": {}}}},
            "renders texts by the chat template",
        ),
        (
            {"config_sentence_transformers.json": {"prompts": {"query": 5}}},
            "prompts is {'query': 5}, must be texts by name",
        ),
        (
            {"config_sentence_transformers.json": {"default_prompt_name": "query"}},
            "default_prompt_name 'query', which is not among its prompts: none",
        ),
        ({"config_sentence_transformers.json": {"truncate_dim": 5}}, "4 numbers, fewer than the 5"),
        ({"config.json": {**CONFIG, "hidden_size": 0}}, "hidden_size is 0, must be"),
        ({"config.json": {"architectures": ["BertModel"]}}, "lacks 'hidden_size'"),
        (
            {"config.json": {**CONFIG, "matryoshka_dimensions": [0]}},
            "matryoshka_dimensions is .0., must be",
        ),
    ],
)
def test_damaged_and_hostile_files_are_refused(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, {**FILES, **changed})
    with pytest.raises((ModelError, ConfigError), match=message) as caught:
        read(tmp_path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Qwen2ForRewardModel"]}, "needs code from the model's directory"),
        ({"id2label": {"1": "a"}}, "id2label is {'1': 'a'}, must name the labels 0, 1"),
        ({"num_labels": 0}, "num_labels is 0, must be at least 1"),
        ({"architectures": ["NomicBertForTokenClassification"], "id2label": 5}, "id2label is 5"),
        ({"sentence_transformers": {"activation_fn": "my.Own"}}, "'my.Own' after its scores"),
    ],
)
def test_damaged_classifiers_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    made = {**CONFIG, "architectures": ["BertForSequenceClassification"], **config}
    with pytest.raises(ModelError, match=message):
        read(write(tmp_path, {"config.json": made}))


# Weights of modules


def weights(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {f"linear.{name}": torch.zeros(shape) for name, shape in shapes.items()}


def load(root: Path, **options: Any) -> Any:
    info, config = read_model_info(root), ModelConfig(model=str(root), **options)
    spec = read_pooling(info, config)
    assert spec is not None
    return load_head(spec, info, config, "cpu")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (weights(weight=(4, 8)), "has no tensor linear.bias"),
        (weights(bias=(4,)), "has no tensor linear.weight"),
        (weights(weight=(8, 4), bias=(4,)), r"is \[8, 4\], must be \[4, 8\] by the configuration"),
        (weights(weight=(4, 8), bias=(5,)), r"linear.bias in .* is \[5\], must be \[4\]"),
        ({"linear.weight": torch.zeros(4, 8, dtype=torch.int8)}, "is of type I8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    write(tmp_path, FILES)
    save_file(tensors, str(tmp_path / "2_Dense" / "model.safetensors"))
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_weights_that_are_missing_pickled_or_damaged_are_refused(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    with pytest.raises(ModelError, match=r"2_Dense has no \*\.safetensors files"):
        load(tmp_path)
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="2_Dense has only pickled weights, which can run code"):
        load(tmp_path)
    (tmp_path / "2_Dense" / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ModelError, match="is damaged or truncated"):
        load(tmp_path)


def test_dummy_weights_need_no_files_and_are_the_same_for_a_seed(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    first, again, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    vectors = torch.randn(3, 8)
    assert torch.equal(first(vectors), again(vectors))
    assert not torch.equal(first(vectors), other(vectors))


def test_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    head, vectors = load(tmp_path, load_format="dummy"), torch.randn(37, 8)
    together = head.activate(head(vectors))
    alone = torch.cat([head.activate(head(each[None])) for each in vectors])
    assert torch.equal(together, alone)


# Options

GENERATES = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 8}


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("Qwen3ForCausalLM", None),
        ("GPT2LMHeadModel", None),
        ("T5ForConditionalGeneration", None),
        ("Qwen3Model", "embed"),
        ("BertModel", "embed"),
        ("BertForMaskedLM", "embed"),
        ("Qwen3ForSequenceClassification", "classify"),
        ("RobertaForTokenClassification", "token_classify"),
        ("HF_ColBERT", "token_embed"),
    ],
)
def test_the_architecture_decides_whether_a_model_pools(
    architecture: str, task: str | None, tmp_path: Path
) -> None:
    write(tmp_path, {"config.json": {**CONFIG, "architectures": [architecture]}})
    spec = read(tmp_path)
    assert task == (None if spec is None else spec.task)
    embeds = read(tmp_path, convert="embed")
    assert embeds is not None and (embeds.task, embeds.layers) == ("embed", ())


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({}, "last"),
        ({"is_causal": False}, "mean"),
        ({"use_bidirectional_attention": True}, "mean"),
    ],
)
def test_decoders_that_look_both_ways_pool_by_the_mean(
    config: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    write(tmp_path, {"config.json": {**GENERATES, **config}})
    spec = read(tmp_path, runner="pooling")
    assert spec is not None and spec.mode == mode


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"runner": "generate", "convert": "embed"}, "convert is 'embed' and runner is 'generate'"),
        ({"runner": "generate", "pooler_config": {}}, "pooler_config is .* runner is 'generate'"),
        ({"pooler_config": {"dimensions": 4}}, 'generates text: set runner="pooling"'),
        ({"runner": "pooling", "convert": "none"}, "convert is 'none' .* generates text"),
        ({"convert": "classify"}, "has no classifier: name the tokens"),
        (
            {
                "convert": "classify",
                "pooler_config": {
                    "classifier_from_token": ["yes"],
                    "method": "from_2_way_softmax",
                },
            },
            "has 1 tokens, and from_2_way_softmax needs two",
        ),
        ({"pooler_config": {"poling_type": "CLS"}}, "unknown key 'poling_type'.*'pooling_type'"),
        ({"pooler_config": {"pooling_type": "MEEN"}}, "'MEEN', must be one of: LAST.*'MEAN'"),
        ({"pooler_config": {"pooling_type": 5}}, r"pooler_config\['pooling_type'\] is 5 \(int\)"),
        ({"pooler_config": {"dimensions": 0}}, r"\['dimensions'\] is 0, must be at least 1"),
        ({"pooler_config": {"step_tag_id": 3}}, "'step_tag_id', which has no effect here"),
        ({"pooler_config": {"classifier_from_token": []}}, "must be a list of tokens"),
        ({"pooler_config": {"method": "softmax"}}, "'softmax', must be one of: from_2_way"),
        ({"pooler_config": {"logit_sigma": 0.0}}, r"\['logit_sigma'\] is 0.0, must be above 0"),
        (
            {"runner": "pooling", "pooler_config": {"dimensions": 4}},
            "dimensions 4, and the model's directory does not say",
        ),
        (
            {"runner": "pooling", "pooler_config": {"dimensions": 9, "is_matryoshka": True}},
            "embeddings have 8 numbers, fewer than the 9",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, {"config.json": GENERATES})
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **options)


def test_a_model_that_cannot_generate_says_so(tmp_path: Path) -> None:
    write(tmp_path, {"config.json": CONFIG})
    with pytest.raises(ConfigError, match="runner is 'generate', and BertModel has no output"):
        read(tmp_path, runner="generate")
    with pytest.raises(ConfigError, match="pooling type MEAN, and the model computes a result"):
        write(tmp_path, {"config.json": {**CONFIG, "architectures": ["HF_ColBERT"]}})
        read(tmp_path, pooler_config={"pooling_type": "MEAN"})


def test_options_replace_what_the_directory_says(tmp_path: Path) -> None:
    write(tmp_path, FILES)
    chosen = {
        "pooling_type": "mean",
        "normalize": False,
        "matryoshka_dimensions": [2, 4],
        "dimensions": 2,
    }
    spec = read(tmp_path, pooler_config=chosen)
    assert spec is not None
    assert (spec.mode, spec.is_activated, spec.dimensions) == ("mean", False, 2)
    assert (spec.is_matryoshka, spec.matryoshka_dimensions) == (True, (2, 4))
    by_token = read(tmp_path, pooler_config={"tok_pooling_type": "ALL"})
    assert by_token is not None and (by_token.task, by_token.layers) == ("token_embed", ())


def test_scores_by_tokens_need_tokens_and_plain_logits(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "convert": "classify",
        "pooler_config": {"classifier_from_token": ["no", "yes"]},
    }
    write(tmp_path, {"config.json": {**GENERATES, "final_logit_softcapping": 30.0}})
    with pytest.raises(ModelError, match=r"changes its logits \(final_logit_softcapping"):
        read(tmp_path, **options)
    write(tmp_path, {"config.json": {**GENERATES, "is_original_qwen3_reranker": True}})
    spec = read(tmp_path, convert="classify")
    assert spec is not None and spec.layers[0].tokens == ("no", "yes")
    assert (spec.width, spec.activation) == (1, "sigmoid")
    both = read(tmp_path, convert="classify", pooler_config={"method": "no_post_processing"})
    assert both is not None and (both.width, both.activation) == (2, "softmax")


# Random damage

WHOLE: dict[str, Any] = {
    **FILES,
    "config.json": {
        **CONFIG,
        "id2label": {"0": "a", "1": "b"},
        "problem_type": "regression",
        "sentence_transformers": {"activation_fn": "torch.nn.Identity"},
        "matryoshka_dimensions": [4],
        "classifier_pooling": "mean",
        "classifier_activation": "gelu",
        "norm_eps": 1e-5,
    },
    "sentence_bert_config.json": {
        "max_seq_length": 16,
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {}},
        "processing_kwargs": {"text": {"max_length": 9}},
    },
    "tokenizer_config.json": {"model_max_length": 30},
    "config_sentence_transformers.json": {
        "prompts": {"query": "q"},
        "default_prompt_name": "query",
        "query_prefix": "Q",
        "truncate_dim": 2,
        "model_type": "SentenceTransformer",
        "activation_fn": "torch.nn.Sigmoid",
        "skiplist_words": ["a"],
    },
}
JUNK = (None, True, 0, -1, 1.5, "", "x", [], ["a"], {}, {"a": 1}, 10**30, [None], "../..", [["a"]])
KINDS = ("Pooling", "Dense", "Normalize", "LayerNorm", "LogitScore", "MultiVectorMask")
ARCHITECTURES = (
    "BertModel",
    "BertForSequenceClassification",
    "ModernBertForSequenceClassification",
    "Qwen3ForTokenClassification",
    "HF_ColBERT",
)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value inside of another."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*above, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*above, key))


def test_random_damage_is_a_clear_error_or_harmless(tmp_path: Path) -> None:
    seed = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
    print(f"METRONOME_SEED={seed}")
    rng, num_read = random.Random(seed), 0
    for number in range(400):
        files = copy.deepcopy(WHOLE)
        files["config.json"]["architectures"] = [rng.choice(ARCHITECTURES)]
        if rng.random() < 0.5:
            chosen = rng.choices(KINDS, k=rng.randint(1, 4))
            files["modules.json"] = modules(*chosen, path="2_Dense")
        for _ in range(rng.randint(1, 2)):
            value = files[rng.choice(list(files))]
            *above, last = rng.choice(list(places(value)) or [(0,)])
            for key in above:
                value = value[key]
            if value:
                value[last] = copy.deepcopy(rng.choice(JUNK))
        options = rng.choice([{}, {"runner": "pooling"}, {"convert": "classify"}])
        root = write(tmp_path / str(number), files)
        try:
            num_read += read(root, **options) is not None
        except ConfigError as error:
            assert len(str(error)) < 700
    assert num_read
