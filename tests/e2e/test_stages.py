"""Stages of a pipeline, one after the other, compute what one worker with all layers does."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.paged import PagedRun
from e2e.test_recorded_ranks import placed
from e2e.test_slices import LONGEST, NEW, TOKENS
from e2e.tiny_models import CASES, VOCAB, Case, TinyModels, config_of
from support.rank_threads import run_ranks

from engine.config.model import ModelConfig, read_model_info
from engine.layers.batch import ForwardBatch
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model, native_spec
from engine.models.sharding import DecoderSlice, Shard
from engine.models.stages import Pipeline, sizes_of
from engine.models.targets import targets
from engine.parallel.collectives import Alone, Collectives
from kernels.cpu.recording import Recorder, Recording
from kernels.meta import AttentionMeta

CLASS = {"architectures": ["LlamaForCausalLM"]}
Split = tuple[int, ...]


class StagedRun:
    """Sequences of a model whose stages are computed one after the other."""

    def __init__(self, stages: Sequence[NativeDecoder]) -> None:
        self._runs = [PagedRun(model) for model in stages]

    def step(self, chunks: Mapping[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """See ``PagedRun``."""
        order = sorted(chunks, key=lambda name: len(chunks[name]) > 1)
        stream = None
        for run in self._runs:
            for name in order:
                run.grow(name, len(chunks[name]))
            batch = run.batch(order, chunks)
            if stream is not None:
                batch.stream = stream
                batch.input_ids = torch.full_like(batch.input_ids, -1)  # not read
            stream = run.model.forward(batch, run.kv).last.clone()
        assert stream is not None
        logits = self._runs[-1].model.logits(stream)
        return dict(zip(order, logits.split([len(chunks[name]) for name in order]), strict=True))


def load(
    path: str | os.PathLike, ranks: Collectives, pipeline: Pipeline | None = None, **options: Any
) -> NativeDecoder:
    config = ModelConfig(model=str(path), **{"dtype": "float32", **options})
    model = load_model(
        config,
        read_model_info(path),
        device="cpu",
        max_model_len=LONGEST,
        collectives=ranks,
        pipeline=pipeline,
    )
    assert isinstance(model, NativeDecoder)
    return model


def stages_of(
    path: str | os.PathLike, ranks: Collectives, split: Split, **options: Any
) -> list[NativeDecoder]:
    size = len(split)
    return [load(path, ranks, Pipeline(i, size, split), **options) for i in range(size)]


def answer(run: PagedRun | StagedRun, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt in chunks, next to decodes of another one, and greedy tokens after it."""
    found = [run.step({"b": prompt[:5]})["b"]]
    for first in range(0, len(prompt), 9):
        step = run.step({"a": prompt[first : first + 9], "b": prompt[first : first + 1]})
        found += [step["a"], step["b"]]
    tokens = [int(found[-2][-1].argmax())]
    for _ in range(NEW - 1):
        step = run.step({"a": tokens[-1:], "b": tokens[-1:]})
        tokens.append(int(step["a"][-1].argmax()))
        found += [step["a"], step["b"]]
    return torch.cat(found), tokens


def compare(
    path: str | os.PathLike, splits: Sequence[Split], seed: int, size: int = 1, **options: Any
) -> None:
    """Compare stages with all layers. size: number of ranks that compute each."""
    prompt = random.Random(seed).choices(range(VOCAB), k=TOKENS)

    def answers(ranks: Collectives) -> list[tuple[torch.Tensor, list[int]]]:
        runs: list[PagedRun | StagedRun] = [PagedRun(load(path, ranks, **options))]
        for split in splits:
            runs.append(StagedRun(stages_of(path, ranks, split, **options)))
        return [answer(run, prompt) for run in runs]

    found = answers(Alone()) if size == 1 else run_ranks(size, answers)[0]
    for nth, (logits, tokens) in enumerate(found):
        error = (logits - found[0][0]).abs().max()
        assert torch.equal(logits, found[0][0]), f"run {nth} of {splits} is off by {error:.2e}"
        assert tokens == found[0][1]


def splits_of(path: str | os.PathLike) -> list[Split]:
    """Divisions of a model into two and three stages."""
    spec = native_spec(read_model_info(path))
    assert spec is not None
    num = len(spec.layers)
    return [(1, num - 1), *([(num - 2, 1, 1)] if num > 2 else [])]


FEW = {"llama", "llama-mha-tied-biased", "gemma2", "lfm2", "jamba-moe"}
"""Families that differ in what stages have; the others are slow."""
EVERY = [pytest.param(name, marks=() if name in FEW else [pytest.mark.slow]) for name in CASES]


@pytest.mark.parametrize("name", EVERY)
def test_stages_compute_what_one_worker_does(tiny_models: TinyModels, name: str, seed: int) -> None:
    path = tiny_models.path(name)
    compare(path, splits_of(path), seed)


@pytest.mark.parametrize("name", ["llama", pytest.param("jamba-moe", marks=pytest.mark.slow)])
def test_ranks_compute_stages(tiny_models: TinyModels, name: str, seed: int) -> None:
    path = tiny_models.path(name)
    compare(path, splits_of(path)[:1], seed, size=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"dtype": "bfloat16"}),
        ("llama-mha-tied-biased", {"quantization": "int8"}),
        ("olmo2", {"load_format": "dummy", "dtype": "bfloat16"}),
        *(
            pytest.param(name, options, marks=pytest.mark.slow)
            for name, options in (
                ("gemma2", {"quantization": "int4", "dtype": "bfloat16"}),
                ("qwen3.5", {"quantization": "int8", "dtype": "bfloat16"}),
                ("granite-hybrid", {"dtype": "bfloat16"}),
            )
        ),
    ],
    ids=str,
)
def test_numbers_of_stages_are_rounded_as_those_of_one_worker(
    tiny_models: TinyModels, name: str, options: dict[str, str], seed: int
) -> None:
    path = tiny_models.path(name)
    compare(path, splits_of(path), seed, **options)


@pytest.mark.parametrize("name", ["llama", "llama-mha-tied-biased", "nemotron-h-moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_tensor_is_in_one_stage_but_a_tied_table(
    tiny_models: TinyModels, name: str, ranks: int
) -> None:
    spec = native_spec(read_model_info(tiny_models.path(name)))
    assert spec is not None
    every = [one.name for one in targets(spec)]
    stages = [Pipeline(index, 3).stage(spec, lambda target: 1.0) for index in range(3)]
    found = [
        [one.name for one in DecoderSlice(spec, Shard(0, ranks), only=stage).targets()]
        for stage in stages
    ]
    assert [index for stage in stages for index in stage.layers] == list(range(len(spec.layers)))
    assert sorted([one for part in found for one in part]) == sorted(every + ["embed"] * spec.tied)
    assert "embed" in found[0] and found[2][-1] == "norm"
    layers, ends = sizes_of(spec, lambda target: 1.0)
    assert sum(layers) + sum(ends) == len(every) + spec.tied


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", pytest.param("mamba2", marks=pytest.mark.slow)]
)
def test_replayed_steps_of_stages_compute_the_same(
    tiny_models: TinyModels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later stages do not write to the vectors that they are given."""
    path, num_replayed, launch = tiny_models.path(name), [0], Recording.launch

    def seen(self: Recording, meta: AttentionMeta) -> None:
        num_replayed[0] += 1
        launch(self, meta)

    monkeypatch.setattr(Recording, "launch", seen)

    def outputs(stages: list[NativeDecoder], records: bool) -> list[torch.Tensor]:
        runs = [PagedRun(model) for model in stages]
        recorders = [Recorder(1 << 22) if records else None for _ in stages]
        first: list[ForwardBatch | None] = [None] * len(stages)
        found, order, entering = [], ["a", "b"], torch.empty(0)
        for step in range(8):
            stream = None
            for nth, run in enumerate(runs):
                for sequence in order:
                    run.grow(sequence, 1)
                batch = placed(run.batch(order, {one: [20 + step] for one in order}), first[nth])
                first[nth] = first[nth] or batch
                batch.stream, batch.recorder = stream, recorders[nth]
                batch.output = "logits" if run.model.stage.is_last else None
                hidden = run.model.forward(batch, run.kv)
                if stream is not None:
                    assert torch.equal(stream, entering), "a step has written to its input"
                entering = hidden.last.clone()
                stream = entering.clone()
            found.append(
                run.model.logits(entering) if hidden.output is None else hidden.output.clone()
            )
        assert num_replayed[0] == len(stages) * 6 * records
        return found

    alone = outputs([load(path, Alone())], False)
    for records in (False, True):
        staged = outputs(stages_of(path, Alone(), splits_of(path)[1]), records)
        assert all(map(torch.equal, staged, alone))


def test_stages_between_the_ends_have_more_layers_if_these_are_packed(tmp_path: Path) -> None:
    """Embedding and output layer are as large as some layers, and as more of them in 4 bits."""
    config = config_of(Case("Llama", {"num_hidden_layers": 16, "vocab_size": 1200}))
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | CLASS))
    made_up = {"load_format": "dummy", "dtype": "bfloat16"}
    num_layers = [
        len(load(tmp_path, Alone(), Pipeline(1, 3), **made_up, **narrow).blocks)
        for narrow in ({}, {"quantization": "int4"})
    ]
    assert 16 // 3 < num_layers[0] < num_layers[1]
