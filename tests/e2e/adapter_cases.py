"""Kinds of LoRA adapters on models of several families, made by peft, and what peft computes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from e2e.quantized_models import packed, write_model
from e2e.references import Reference, generate
from e2e.test_quantized import compressed, integers
from e2e.tiny_models import CASES, TinyModels
from support import adapter_files
from transformers import PreTrainedModel

Options = dict[str, Any]
NUM_NEW = 8
LINEARS = ["q_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "gate_up_proj", "down_proj"]
KINDS: dict[str, Options] = {
    "plain": {"target_modules": "all-linear"},
    "rslora": {"target_modules": LINEARS, "use_rslora": True, "r": 6},
    "patterns": {
        "target_modules": LINEARS,
        "rank_pattern": {"o_proj": 2, r".*\.1\.mlp\..*_proj": 7},
        "alpha_pattern": {"2.mlp.down_proj": 3, r"layers\.0\.self_attn\.\w+": 21},
    },
    "expression": {"target_modules": r".*\.(0|2)\.(self_attn\.(q|qkv|o)|mlp\.down)_proj"},
    "layers": {"target_modules": LINEARS, "layers_to_transform": [0, 2]},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "whole modules": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    "bias": {"target_modules": LINEARS, "lora_bias": True},
    "int8 base": {"target_modules": LINEARS, "use_dora": True},  # DoRA unpacks it once
}
FAMILIES = ("llama", "qwen3", "gemma3", "phi3")
EXPERTS: Options = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}
WITH_EXPERTS = ("mixtral", "qwen3-moe", "lfm2-moe", "qwen3-next")
HYBRIDS: dict[str, Options] = {
    "lfm2": {"target_modules": "all-linear"},
    "granite-hybrid": {"target_modules": "all-linear"},
    "falcon-h1": {"target_modules": ["in_proj", *LINEARS]},  # peft refuses out_proj
    "qwen3.5": {"target_modules": "all-linear"},
}
SIZES = {"gemma3": 4.0, "lfm2-moe": 1.0}  # that change every answer


class AdapterCase(NamedTuple):
    family: str
    kind: str
    options: Options

    def __str__(self) -> str:
        return f"{self.family}, {self.kind}"


def cases() -> Iterator[AdapterCase]:
    for kind, options in KINDS.items():
        for family in FAMILIES:
            yield AdapterCase(family, kind, options)
    for family in WITH_EXPERTS:
        yield AdapterCase(family, "experts", EXPERTS)
    for family, options in HYBRIDS.items():
        yield AdapterCase(family, "hybrid", options)


class Made(NamedTuple):
    """A base and an adapter on disk, and what transformers and peft compute with them."""

    base: Path
    adapter: Path
    plain: PreTrainedModel
    adapted: PreTrainedModel


def make(case: AdapterCase, models: TinyModels, root: Path) -> Made:
    """Write the adapter of a case and, if it is not one of ``CASES`` itself, its base."""
    if case.kind == "int8 base":
        stated = compressed("pack-quantized", integers(8, "channel"))
        written = write_model(root / "base", CASES[case.family], packed(8, -1), stated)
        base, plain = written.path, written.reference
    else:
        base, plain = models.path(case.family), models.reference(case.family)
    seed, size = len(str(case)), SIZES.get(case.family, 0.5)
    made = adapter_files.trained(copy.deepcopy(plain), seed, size, **case.options)
    adapter = adapter_files.save(made, root / "adapter")
    # A merge would change both embedding and output layer where they are tied, and needs biases.
    if plain.config.tie_word_embeddings or case.kind == "bias":
        return Made(base, adapter, plain, made.get_base_model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Made(base, adapter, plain, made.merge_and_unload())


class Answers(NamedTuple):
    """Greedy answers of transformers, and log-probabilities [tokens, V] of each."""

    reference: Reference
    logprobs: list[torch.Tensor]


def answers(model: PreTrainedModel, prompts: list[list[int]], num_new: int = NUM_NEW) -> Answers:
    tokens, margins, logprobs = [], [], []
    for ids in prompts:
        own, margin = generate(model, ids, num_new)
        tokens.append(own)
        margins.append(margin)
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *own[:-1]]]), use_cache=False).logits[0]
        logprobs.append(logits[len(ids) - 1 :].float().log_softmax(-1))
    return Answers(Reference(prompts, tokens, margins), logprobs)
