"""Results of whole requests equal sentence-transformers' in float32: tokens, prompts, cuts, hidden
states, pooling, layers and functions, for directories that it saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.sentence_models import as_colbert, as_version_3, random_model, save_base, save_sentences
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.multi_vector_encoder import MultiVectorEncoder
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from engine import LLM
from engine.errors import RequestError

LONG = " ".join(["the cat sits on a mat , dog runs fast"] * 9)
TEXTS = ["the CAT sits on a mat", "stock prices fell", "", "I runs fast , Cat . you", LONG]
PAIRS = [("the cat", "a mat on the dog"), ("prices", LONG), (LONG, LONG), ("you", "the Cat sits")]
NEAR = 1e-5


def engine_of(root: Path, **options: Any) -> LLM:
    return LLM(model=str(root), dtype="float32", num_kv_blocks=40, max_num_seqs=8, **options)


def assert_near(ours: Sequence[Any], theirs: Any) -> None:
    """All numbers differ by at most ``NEAR``."""
    want = np.asarray(theirs, dtype=np.float32)
    np.testing.assert_allclose(np.asarray(ours, dtype=np.float32), want, rtol=0, atol=NEAR)


FAMILIES: dict[str, tuple[str, list[nn.Module]]] = {
    "bert": ("Bert", [Pooling(32, "mean"), Normalize()]),
    "mpnet": ("MPNet", [Pooling(32, "cls"), Dense(32, 20), Normalize()]),
    "xlm-roberta": ("XLMRoberta", [Pooling(32, "mean")]),
    "modernbert": ("ModernBert", [Pooling(32, "mean"), Normalize()]),
    "qwen3": ("Qwen3", [Pooling(32, "lasttoken"), Normalize()]),
    "llama-mean": ("Llama", [Pooling(32, "mean"), Dense(32, 20), Normalize()]),
    "gemma3": (
        "Gemma3Text",
        [
            Pooling(32, "mean"),
            Dense(32, 48, bias=False, activation_function=nn.Identity()),
            Dense(48, 16, bias=False, activation_function=nn.Identity()),
            Normalize(),
        ],
    ),
}


@pytest.mark.parametrize("is_former", [False, True], ids=["version 6", "version 3"])
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_those_of_sentence_transformers(
    name: str, is_former: bool, tmp_path: Path
) -> None:
    family, modules = FAMILIES[name]
    root = save_sentences(
        tmp_path,
        family,
        modules,
        transformer={"max_seq_length": 40},
        prompts={"query": "query : ", "document": "passage : "},
        default_prompt_name="document",
    )
    if is_former:
        as_version_3(root, max_seq_length=40, do_lower_case=True)
    theirs, ours = SentenceTransformer(str(root), device="cpu"), engine_of(root)
    for prompt in (None, "query"):
        want = theirs.encode(TEXTS, prompt_name=prompt)
        outputs = ours.embed(TEXTS, use_tqdm=False, prompt_name=prompt)
        assert_near([output.outputs.embedding for output in outputs], want)
        assert len(outputs[-1].prompt_token_ids) == 40


CLASSIFIERS = ["Bert", "Roberta", "MPNet", "ModernBert", "Gte", "NomicBert", "Qwen3"]


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_scores_equal_those_of_cross_encoders(family: str, tmp_path: Path) -> None:
    model = random_model(family, "ForSequenceClassification", num_labels=1)
    theirs = CrossEncoder(str(save_base(tmp_path / "plain", model)), device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    want = theirs.predict(PAIRS)
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    plain, saved = engine_of(tmp_path / "plain"), engine_of(tmp_path / "saved")
    cut = plain.score(firsts, seconds, use_tqdm=False, truncate_prompt_tokens=64)
    for outputs in (cut, saved.score(firsts, seconds, use_tqdm=False)):
        assert_near([output.outputs.score for output in outputs], want)
    with pytest.raises(RequestError, match="too long"):
        plain.score(firsts, seconds, use_tqdm=False)


def test_probabilities_equal_those_of_cross_encoders(tmp_path: Path) -> None:
    model = random_model("Roberta", "ForSequenceClassification", num_labels=3)
    root = save_base(tmp_path, model)
    theirs = CrossEncoder(str(root), device="cpu")
    texts = TEXTS[:-1]
    want = theirs.predict([[text, "dog"] for text in texts], apply_softmax=True)
    assert want.shape == (len(texts), 3)
    ours = engine_of(root)
    with torch.inference_mode():
        tokenizer = theirs.tokenizer
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    found = ours.classify(texts, use_tqdm=False)
    assert_near([each.outputs.probs for each in found], torch.stack(logits).softmax(1))


def test_rerankers_by_tokens_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", random_model("Qwen3", "ForCausalLM"))
    first = Transformer(str(base), transformer_task="text-generation")
    ids = first.tokenizer.convert_tokens_to_ids(["yes", "no"])
    theirs = CrossEncoder(modules=[first, LogitScore(*ids)], device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    outputs = engine_of(tmp_path / "saved").score(firsts, seconds, use_tqdm=False)
    assert_near([output.outputs.score for output in outputs], theirs.predict(PAIRS))


def test_late_interaction_equals_that_of_sentence_transformers(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", random_model("Bert"))
    dense = Dense(
        *(32, 12),
        bias=False,
        activation_function=nn.Identity(),
        module_input_name="token_embeddings",
    )
    modules = [Transformer(str(base)), dense, MultiVectorMask()]
    modules.append(Normalize(module_input_name="token_embeddings"))
    theirs = MultiVectorEncoder(modules=modules, device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    ours, texts = engine_of(tmp_path / "saved"), TEXTS[:-1]
    colbert = engine_of(as_colbert(tmp_path, dense)).encode(texts, use_tqdm=False)
    for output, want in zip(
        ours.encode(texts, use_tqdm=False), theirs.encode_document(texts), strict=True
    ):
        assert_near(output.outputs.data, want)
    for one, other in zip(ours.encode(texts, use_tqdm=False), colbert, strict=True):
        assert_near(one.outputs.data, other.outputs.data)
    queries, documents = theirs.encode_query(texts), theirs.encode_document(texts[::-1])
    scores = ours.score(texts, texts[::-1], use_tqdm=False)
    want = theirs.similarity_pairwise(queries, documents)
    np.testing.assert_allclose([each.outputs.score for each in scores], want, atol=1e-4)


def test_late_interaction_skips_the_tokens_that_sentence_transformers_skips(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", random_model("Bert"))
    modules = [Transformer(str(base), max_seq_length=20), MultiVectorMask([",", ".", "nowhere"])]
    theirs = MultiVectorEncoder(modules=modules, device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    ours = engine_of(tmp_path / "saved")
    documents = ["the cat , a dog .", ". , .", "the mat", LONG]
    queries = theirs.encode_query([", the dog ."] * len(documents))
    want = theirs.similarity_pairwise(queries, theirs.encode_document(documents))
    scores = ours.score(", the dog .", documents, use_tqdm=False)
    np.testing.assert_allclose([each.outputs.score for each in scores], want, rtol=1e-5)
