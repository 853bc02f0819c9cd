"""Pairs of texts for cross-encoders: ids, types and truncation equal transformers'; lower case."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from engine.config.model import ModelConfig
from engine.config.pooling import PoolingSpec
from engine.errors import RequestError
from engine.text.pairs import encode_pairs
from engine.text.tokenizer import load_tokenizer

WORDS = [chr(97 + number) * 2 for number in range(20)] + ["a", "b"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEMPLATES = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "ending": ("$A [SEP]", "$A $B [SEP]"),
}


def made(root: Path, template: str, **options: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words with the special tokens of a template, saved with a config.json."""
    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    rust = RustTokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    rust.normalizer = normalizers.Sequence([normalizers.NFC()])
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing(
        *TEMPLATES[template], [("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "sep_token": "[SEP]"}
    names["model_input_names"] = ["input_ids", "token_type_ids"]
    fast = PreTrainedTokenizerFast(tokenizer_object=rust, **names, **options)
    fast.save_pretrained(str(root))
    (root / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    return fast


def spec(**fields: object) -> PoolingSpec:
    values = {"task": "classify", "mode": "cls", "hidden_size": 4, "activation": "none"}
    return PoolingSpec(**{**values, "is_activated": True, **fields})


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_pairs_are_tokenised_and_cut_as_by_transformers(
    template: str, side: str, tmp_path: Path
) -> None:
    theirs = made(tmp_path, template, truncation_side=side)
    ours = load_tokenizer(ModelConfig(model=str(tmp_path)))
    seed = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
    print(f"METRONOME_SEED={seed}")
    rng = random.Random(seed)
    for _ in range(100):
        pairs = [
            tuple(" ".join(rng.choices(WORDS, k=rng.randint(0, 12))) for _ in range(2))
            for _ in range(3)
        ]
        most = rng.choice([None, 5, 6, 9, 12, 18])
        encoded = theirs(
            [list(pair) for pair in pairs],
            truncation=most is not None and "longest_first",
            max_length=most,
            return_token_type_ids=True,
        )
        found = encode_pairs(ours, spec(), pairs, most)
        assert [each.token_ids for each in found] == encoded["input_ids"]
        for each, types in zip(found, encoded["token_type_ids"], strict=True):
            num = len(types) if each.second is None else each.second
            assert types == [0] * num + [1] * (len(types) - num)


def test_the_default_prompt_is_put_in_front_of_the_first_text(tmp_path: Path) -> None:
    made(tmp_path, "bert")
    tokenizer = load_tokenizer(ModelConfig(model=str(tmp_path)))
    prompted = spec(prompts={"query": "aa "}, default_prompt_name="query")
    plain = encode_pairs(tokenizer, spec(), [("aa bb", "cc")], None)
    assert encode_pairs(tokenizer, prompted, [("bb", "cc")], None) == plain


def test_a_limit_without_room_for_texts_is_refused(tmp_path: Path) -> None:
    made(tmp_path, "bert")
    tokenizer = load_tokenizer(ModelConfig(model=str(tmp_path)))
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 3, must be above 3"):
        encode_pairs(tokenizer, spec(), [("aa", "bb")], 3)
    with pytest.raises(RequestError, match="must be a str without lone surrogates"):
        encode_pairs(tokenizer, spec(), [("aa", "bb"), ("aa", "\ud800")], None)


def test_texts_are_converted_to_lower_case_if_the_directory_says_so(tmp_path: Path) -> None:
    made(tmp_path, "bert")
    before = load_tokenizer(ModelConfig(model=str(tmp_path)))
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    after = load_tokenizer(ModelConfig(model=str(tmp_path)))
    assert after.encode("AA bb [SEP]") == before.encode("aa bb [SEP]") != before.encode("AA bb")
