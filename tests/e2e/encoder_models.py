"""Random tiny encoders of every native family, in several shapes, made by transformers itself."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from e2e.paged import PagedRun
from e2e.tiny_models import Case, randomised
from transformers import PreTrainedModel

from engine.config.model import ModelConfig, read_model_info
from engine.models.load import load_model
from engine.models.model import Model

VOCAB = 300
LONGEST = 120
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
}
NEAR, FULL = "sliding_attention", "full_attention"
CASES: dict[str, Case] = {
    "bert": Case("Bert", {}),
    "bert-relu": Case("Bert", {"hidden_act": "relu", "type_vocab_size": 3}),
    "bert-masked": Case("Bert:ForMaskedLM", {"hidden_act": "gelu_new"}),
    "roberta": Case("Roberta", {}),
    "roberta-classifier": Case(
        "Roberta:ForSequenceClassification", {"pad_token_id": 3, "type_vocab_size": 1}
    ),
    "xlm-roberta": Case("XLMRoberta", {"layer_norm_eps": 1e-5}),
    "xlm-roberta-tokens": Case("XLMRoberta:ForTokenClassification", {"hidden_act": "silu"}),
    "mpnet": Case("MPNet", {}),
    "mpnet-classifier": Case("MPNet:ForSequenceClassification", {"hidden_act": "relu"}),
    "modernbert": Case("ModernBert", {"local_attention": 16}),
    "modernbert-biased": Case(
        "ModernBert:ForSequenceClassification",
        {
            "local_attention": 10,
            "layer_types": [NEAR, FULL, NEAR],
            "attention_bias": True,
            "mlp_bias": True,
            "norm_bias": True,
        },
    ),
    "nomic": Case("NomicBert", {}),
    "nomic-masked": Case("NomicBert:ForMaskedLM", {"type_vocab_size": 1}),
    "gte": Case("Gte", {}),
    "gte-classifier": Case("Gte:ForSequenceClassification", {"type_vocab_size": 2}),
}
"""Families by the prefix of their classes' names, and the rest of the name after a colon."""


def config_of(case: Case) -> transformers.PreTrainedConfig:
    made = getattr(transformers, case.family.partition(":")[0] + "Config")
    return made(**BASE | case.options)


def model_of(case: Case) -> type[PreTrainedModel]:
    family, _, head = case.family.partition(":")
    made: type[PreTrainedModel] = getattr(transformers, family + (head or "Model"))
    return made


def make_encoder(name: str, root: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model of a case of ``CASES``; returns its directory."""
    path = root / f"{name}-{dtype}".replace("torch.", "")
    if not path.exists():
        case = CASES[name]
        model = model_of(case)(config_of(case))
        randomised(model, zlib.crc32(name.encode())).to(dtype).save_pretrained(path)
    return path


def reference(path: Path) -> torch.nn.Module:
    """What transformers makes of the encoder of a directory, in float32."""
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    made = getattr(transformers, architecture)
    whole = made.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return whole.base_model.eval()


def hidden_of(
    model: torch.nn.Module, tokens: Sequence[int], types: Sequence[int] | None = None
) -> torch.Tensor:
    """Hidden states [T, H] of one text."""
    given = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), **given).last_hidden_state[0]
    return found


def load(path: Path, **options: Any) -> Model:
    """Load the encoder of a directory, in float32 unless told otherwise."""
    config = ModelConfig(model=str(path), **{"dtype": "float32", **options})
    return load_model(config, read_model_info(path), device="cpu", max_model_len=LONGEST)


def texts_of(seed: int, lengths: Sequence[int] = (1, 7, 40, LONGEST, 33)) -> dict[str, list[int]]:
    """Random texts; their tokens are none of those that stand for padding."""
    rng = random.Random(seed)
    return {f"{n} tokens": rng.choices(range(5, VOCAB), k=n) for n in lengths}


def embed_tokens(
    model: Model,
    texts: Mapping[str, Sequence[int]],
    types: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """Hidden states [T, H] of each text, all computed in one step."""
    run = PagedRun(model, seed=seed)
    order = sorted(texts, key=lambda name: len(texts[name]) > 1)  # single tokens first
    for name in order:
        run.grow(name, len(texts[name]))
    batch = run.batch(order, texts)
    if types is not None:
        batch.token_types = torch.tensor([kind for name in order for kind in types[name]])
    parts = model.forward(batch, run.kv).last.split([len(texts[name]) for name in order])
    return dict(zip(order, parts, strict=True))
