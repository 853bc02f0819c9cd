"""Embeddings and scores equal sentence-transformers' whatever the engine does meanwhile: in any
company, cut into steps, in a small pool, in other processes, and in bfloat16."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.sentence_models import WORDS, random_model, save_base, save_sentences
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from engine import LLM

FAMILIES: dict[str, tuple[str, list[nn.Module]]] = {
    "bert": ("Bert", [Pooling(32, "mean"), Normalize()]),
    "modernbert": ("ModernBert", [Pooling(32, "cls"), Dense(32, 20)]),
    "qwen3": ("Qwen3", [Pooling(32, "lasttoken"), Normalize()]),
    "llama-mean": ("Llama", [Pooling(32, "mean"), Dense(32, 48), Normalize()]),
}
SMALL = {"max_num_batched_tokens": 80, "max_num_seqs": 3, "num_kv_blocks": 14}
SITUATIONS: dict[str, dict[str, Any]] = {
    "company": {"max_num_seqs": 16},
    "small": SMALL,
    "process": {"multiprocess": True, **SMALL},
    "processes": {"multiprocess": True, "data_parallel_size": 2},
}


def random_texts(num: int) -> list[str]:
    seed = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))
    print(f"METRONOME_SEED={seed}")
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=rng.randint(0, 70))) for _ in range(num)]
    return [*texts, *(text + " dog" for text in texts[: num // 4])]  # with common prefixes


def engine_of(root: Path, **options: Any) -> LLM:
    return LLM(model=str(root), **{"dtype": "float32", "num_kv_blocks": 80, **options})


def embeddings(engine: LLM, texts: list[str]) -> np.ndarray[Any, Any]:
    outputs = engine.embed(texts, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], dtype=np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_do_not_depend_on_what_the_engine_does(
    name: str, situation: str, tmp_path: Path
) -> None:
    family, modules = FAMILIES[name]
    root = save_sentences(tmp_path, family, modules, transformer={"max_seq_length": 60})
    texts = random_texts(60)
    want = SentenceTransformer(str(root), device="cpu").encode(texts)
    with engine_of(root, **SITUATIONS[situation]) as engine:
        for _ in range(2):  # the second time from the prefix cache, where results may use it
            np.testing.assert_allclose(embeddings(engine, texts), want, rtol=0, atol=1e-5)
        together = embeddings(engine, texts[:8])
        alone = np.concatenate([embeddings(engine, [text]) for text in texts[:8]])
    np.testing.assert_array_equal(together, alone)  # bit for bit


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_near_float32(name: str, tmp_path: Path) -> None:
    family, modules = FAMILIES[name]
    root = save_sentences(tmp_path, family, modules, transformer={"max_seq_length": 60})
    texts = random_texts(20)
    want = SentenceTransformer(str(root), device="cpu").encode(texts)
    found = embeddings(engine_of(root, dtype="bfloat16"), texts)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(want, axis=1)
    assert ((found * want).sum(1) / lengths).min() >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Qwen3"])
def test_scores_do_not_depend_on_what_the_engine_does(
    family: str, situation: str, tmp_path: Path
) -> None:
    model = random_model(family, "ForSequenceClassification", num_labels=1)
    theirs = CrossEncoder(str(save_base(tmp_path / "plain", model)), device="cpu")
    theirs.save_pretrained(str(tmp_path / "saved"))
    texts = random_texts(40)
    with engine_of(tmp_path / "saved", **SITUATIONS[situation]) as engine:
        outputs = engine.score(texts[0], texts, use_tqdm=False)
    want = theirs.predict([(texts[0], text) for text in texts])
    np.testing.assert_allclose([each.outputs.score for each in outputs], want, rtol=0, atol=1e-5)
