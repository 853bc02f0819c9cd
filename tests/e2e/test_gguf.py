"""GGUF files of every family and type give the tensors and tokens of their dequantised twins.

The files are written as llama.cpp's conversion script writes them, so they have its order of rows,
its names and its metadata. The twin is a model directory, which transformers reads."""

from __future__ import annotations

import numpy as np
import pytest
from e2e.gguf_models import FAMILIES, GENERAL, WIDE_FAMILIES, GgufModels, Kind
from e2e.references import Reference, compare, engine_for, generate, prompts, run
from e2e.tiny_models import reference
from support.made_gguf import KINDS

from engine.models.gguf_weights import GgufCheckpoint

USUAL = ("gemma", "command-r-plus", "olmo3-yarn", "glm4", "gpt-oss", "stablelm-parallel")
HALVES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture(scope="module")
def gguf_models(tmp_path_factory: pytest.TempPathFactory) -> GgufModels:
    return GgufModels(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def name_here(name: str) -> tuple[str, int | None]:
    """The name that the reader gives to a tensor of a twin, and the number of its expert."""
    if ".experts." not in name:
        return name, None
    before, after = name.split(".experts.")
    expert, half, _ = after.split(".")
    before = before.replace("block_sparse_moe", "mlp")
    return f"{before}.experts.{HALVES.get(half, half)}.weight", int(expert)


def assert_same_tensors(gguf_models: GgufModels, name: str, kind: Kind) -> None:
    model = gguf_models.get(name, kind)
    with GgufCheckpoint(model.file) as checkpoint:
        seen = set()
        for theirs, values in model.made.twin.items():
            ours, expert = name_here(theirs.replace("block_sparse_moe.gate", "mlp.gate"))
            seen.add(ours)
            found = checkpoint.tensor(ours)
            if expert is not None:
                found = found[expert]
            assert np.array_equal(found.numpy(), values), theirs
        assert seen == set(checkpoint.tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_tensors_of_each_family(name: str, gguf_models: GgufModels) -> None:
    assert_same_tensors(gguf_models, name, Kind.F32)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", WIDE_FAMILIES)
def test_tensors_of_each_type(name: str, kind: Kind, gguf_models: GgufModels) -> None:
    assert_same_tensors(gguf_models, name, kind)


def assert_same_tokens(gguf_models: GgufModels, name: str, kind: Kind, tally) -> None:
    model = gguf_models.get(name, kind)
    theirs = reference(model.twin)
    made = prompts(shortest=70 if "phi3" in name else 2)[2:5]
    answers = [generate(theirs, ids, 8) for ids in made]
    right = Reference(made, [each[0] for each in answers], [each[1] for each in answers])
    with engine_for(str(model.file), dtype="float32") as engine:
        tokens, _ = run(engine, made, 8)
    compare(right, tokens, tally)


@pytest.mark.parametrize("name", [each for each in FAMILIES if each not in WIDE_FAMILIES])
def test_tokens_of_each_family(name: str, gguf_models: GgufModels, tally) -> None:
    assert_same_tokens(gguf_models, name, Kind.F32, tally)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            id=f"{name}-{kind.name}",
            marks=[pytest.mark.slow] * (name not in USUAL or kind is not Kind.Q8_0),
        )
        for name in GENERAL
        for kind in (Kind.F32, Kind.Q8_0)
    ],
)
def test_tokens_of_families_that_transformers_computes(
    name: str, kind: Kind, gguf_models: GgufModels, tally
) -> None:
    assert_same_tokens(gguf_models, name, kind, tally)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(
            name,
            kind,
            id=f"{name}-{kind.name}",
            marks=[pytest.mark.slow] * ((row + column) % len(WIDE_FAMILIES) > 0),
        )
        for row, name in enumerate(WIDE_FAMILIES)
        for column, kind in enumerate(KINDS)
    ],
)
def test_tokens_of_each_type(name: str, kind: Kind, gguf_models: GgufModels, tally) -> None:
    assert_same_tokens(gguf_models, name, kind, tally)
