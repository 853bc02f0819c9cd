"""Adapters on quantised bases: the tokens of the model that the base's numbers stand for, with the
adapter merged into it. The adapter itself is not quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from e2e.gguf_models import GgufModels, Kind
from e2e.quantized_models import awq, fp8, gptq, packed, write_model
from e2e.references import Reference, compare, engine_for, generate, prompts
from e2e.test_quantized import AWQ, BLOCKS, FP8, GPTQ, compressed, integers, keep_gates, keep_head
from e2e.tiny_models import CASES, reference
from support.adapted import Adapted, merged_model, random_adapter, run

from engine import SamplingParams

NUM_NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)


class Base(NamedTuple):
    """A model on disk, and what transformers makes of its numbers."""

    path: Path
    model: Any


def quantised(
    name: str, write: Any, stated: dict[str, Any], keep: Callable[[str], bool] = keep_head
) -> Callable[[Path], Base]:
    def make(root: Path) -> Base:
        written = write_model(root / "base", CASES[name], write, stated, keep=keep)
        return Base(written.path, written.reference)

    return make


def in_gguf(name: str, kind: Kind) -> Callable[[Path], Base]:
    def make(root: Path) -> Base:
        made = GgufModels(root).get(name, kind)
        return Base(made.file, reference(made.twin))

    return make


BASES: dict[str, Callable[[Path], Base]] = {
    "awq": quantised("llama", awq(32), AWQ),
    "gptq": quantised("qwen3-next", gptq(4, 32), GPTQ, keep_gates),
    "gptq-desc-act": quantised("llama", gptq(4, 32, desc_act=True), {**GPTQ, "desc_act": True}),
    "fp8": quantised("llama", fp8("tensor"), FP8),
    "fp8-blocks": quantised("qwen3", fp8("block", scale_name="weight_scale_inv"), BLOCKS),
    "int4": quantised("llama", packed(4, 32), compressed("pack-quantized", integers(4, "group"))),
    "gguf-f32": in_gguf("llama", Kind.F32),  # its rows of queries and keys have another order
    "gguf-q8_0": in_gguf("llama", Kind.Q8_0),
    "gguf-q4_k": in_gguf("wide-llama", Kind.Q4_K),
}
ALWAYS = ("awq", "gptq", "fp8", "gguf-q8_0")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ALWAYS)) for name in BASES],
)
def test_quantised_bases(
    name: str, tmp_path: Path, tally: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base, made = BASES[name](tmp_path), prompts(2)[2:5:2]
    adapters = [None, random_adapter(base.model, tmp_path / "one", seed=5)]
    requests = [Adapted(ids, adapter, GREEDY) for ids in made for adapter in adapters]
    with engine_for(str(base.path), enable_lora=True, dtype="float32") as engine:
        tokens = run(engine, requests)
    assert tokens[::2] != tokens[1::2]
    for number, adapter in enumerate(adapters):
        model = merged_model(base.model, adapter)
        own, margins = zip(*(generate(model, ids, NUM_NEW) for ids in made), strict=True)
        compare(Reference(made, list(own), list(margins)), tokens[number::2], tally)
