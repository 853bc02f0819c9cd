"""Bfloat16 as near to float32 as transformers' own, in every way to compute a text; and repeatable.

A short form of `tools/precision.py`: every family, 1.1 at most for the mean KL divergence and the
mean error of logits, over as many positions as keep their ratio steady.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from e2e.general_models import GENERAL_CASES, make_general_model
from e2e.test_equality import NATIVE
from e2e.tiny_models import CASES, VOCAB, make_tiny_model
from support.fingerprint import LENGTHS, of_a_fresh_process
from support.precision import (
    BAR,
    NUM_BINS,
    Distance,
    Shown,
    compare,
    measure,
    quantile_of_bins,
    random_texts,
)
from support.watched import BLOCK, WAYS, watch

from engine.config.model import read_model_info
from kernels.cpu.prepare import prepare

NUM_TEXTS, LENGTH = 9, 80
PLAIN = {"num_threads": 1, "dtype": "bfloat16"}
OTHERS = ["chunks", "decode", "cached", "preempted", "whole"]  # ways, each beside "batched"


def make(name: str, directory: Path, dtype: torch.dtype) -> Path:
    return (make_tiny_model if name in CASES else make_general_model)(name, directory, dtype)


@pytest.fixture(scope="session")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of models that are stored in bfloat16."""
    return tmp_path_factory.mktemp("bfloat16")


# Where a router chooses other experts the error is a hundred times that elsewhere, and a few such
# places make up the sums: here it must not be certain that the bar is missed. The campaign's
# positions suffice for the bar itself.
ROUTED = {"mixtral", "mixtral-window", "qwen3-moe", "qwen3-moe-mixed", "olmoe", "gpt-oss-sinks"} | {
    "deepseek-v2",
    "deepseek-v3",
}


OTHER_HEADS = {"mistral-window", "qwen3", "qwen3-moe-mixed", "phi3-longrope"}


def cases() -> list[object]:
    """Each family and, in turn, one of the ways next to a batch; variants of a family are slow, and
    so are most that transformers computes itself, and those for whose heads attention would be
    compiled anew."""
    made = []
    for index, name in enumerate([*CASES, *GENERAL_CASES]):
        is_short = name in [*NATIVE, "starcoder2-window"] and name not in OTHER_HEADS
        marks = [] if is_short else [pytest.mark.slow]
        made.append(pytest.param(name, OTHERS[index % len(OTHERS)], marks=marks))
    return made


@pytest.mark.parametrize(("name", "way"), cases())
def test_bfloat16_is_as_near_to_float32_as_that_of_transformers(
    halved: Path, name: str, way: str, seed: int
) -> None:
    path = make(name, halved, torch.bfloat16)
    length = min(LENGTH, read_model_info(path).max_position_embeddings)
    texts = random_texts(seed, NUM_TEXTS * LENGTH // length, length, VOCAB)
    for ratio in measure(path, texts, VOCAB, ["batched", way], **PLAIN):
        assert ratio.num_positions >= len(texts) * (length // 2 - 8)
        # With windows, the same number of blocks is another pool: a block holds fewer layers, and
        # blocks that have left the windows are free.
        has_window = "sliding_window" in {**CASES, **GENERAL_CASES}[name][1]
        is_tight = ratio.way == "preempted" and length > 2 * BLOCK
        assert (ratio.num_preemptions > 0) == is_tight or has_window
        for value, (least, _) in zip(ratio.values[:2], ratio.intervals[:2], strict=True):
            assert (least if name in ROUTED else value) <= BAR, f"{name}: {ratio}"


def test_kernels_are_prepared_while_transformers_loads_a_bfloat16_model() -> None:
    """It sets torch's default type for the whole process meanwhile."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        prepare()
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt-neox", marks=pytest.mark.slow)])
def test_float32_is_exact_in_every_way(tmp_path: Path, name: str, seed: int) -> None:
    """What shows that the ways compute the texts that they say."""
    path = make(name, tmp_path, torch.bfloat16)
    texts = random_texts(seed, 3, 50, VOCAB)
    for ratio in measure(path, texts, VOCAB, **(PLAIN | {"dtype": "float32"})):
        assert ratio.values.kl < 1e-4 and ratio.values.mean < 1e-3, ratio


def test_every_position_is_shown_once_and_preempted_ones_again(tmp_path: Path, seed: int) -> None:
    path = make("llama", tmp_path, torch.float32)
    texts = random_texts(seed, 8, 60, VOCAB)
    for way in WAYS:
        seen: dict[str, list[int]] = {}

        def show(name, positions, logits, seen=seen) -> None:
            assert logits.shape == (len(positions), VOCAB)
            seen.setdefault(name, []).extend(positions)

        watch(path, texts, WAYS[way], show, num_threads=1)
        first = 16 if way == "cached" else 0  # a whole block of the 30 tokens
        for name in texts:
            assert set(seen[name]) == set(range(first, 59)), way
            assert len(seen[name]) == 59 - first or way == "preempted", way


def test_distances_are_what_they_say() -> None:
    exact = torch.tensor([[0.0, 0.0], [0.0, 1.0]])
    far = Distance()
    far.add("a", exact + torch.tensor([[0.5, 0.5], [0.0, 0.25]]), exact)
    p = torch.sigmoid(torch.tensor([1.0, 1.25], dtype=torch.float64))
    kl = p[0] * (p[0] / p[1]).log() + (1 - p[0]) * ((1 - p[0]) / (1 - p[1])).log()
    figures = far.figures()
    assert figures.kl == pytest.approx(float(kl) / 2)
    assert figures.mean == pytest.approx((0.5 + 0.5 + 0.25) / 4)
    assert figures.high == pytest.approx(0.5, rel=0.01)
    near = Distance()
    near.add("a", exact + 0.25, exact)
    assert compare("whole", far, near).values.mean == pytest.approx(1.25)
    with pytest.raises(ValueError, match="a: logits that are no numbers"):
        far.add("a", exact * torch.nan, exact)


def test_a_position_that_is_computed_again_counts_once() -> None:
    exact, ours, theirs = {"a": torch.zeros(3, 4)}, Distance(), Distance()
    shown = Shown((ours, theirs), exact, {"a": torch.ones(3, 4, dtype=torch.bfloat16)})
    for at, off in (([0, 2], 3.0), ([2], 0.5), ([2], 0.5)):
        shown("a", at, torch.full((len(at), 4), off))
    shown.finish()
    assert ours.num_positions == theirs.num_positions == 2
    assert ours.figures().mean == pytest.approx((3.0 + 0.5) / 2)
    assert theirs.figures().mean == pytest.approx(1.0)


def test_the_quantile_of_bins_is_that_of_the_values(seed: int) -> None:
    exact = torch.zeros(100, 500)
    off = torch.randn(100, 500, generator=torch.Generator().manual_seed(seed)).exp()
    gathered = Distance()
    gathered.add("a", off, exact)
    for share in (0.5, 0.999):
        right = float(off.flatten().double().quantile(share))
        assert quantile_of_bins(np.arange(NUM_BINS), gathered.bins["a"], share) == pytest.approx(
            right, rel=0.01
        )


@pytest.mark.parametrize(
    "name",
    ["gemma2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "gpt-neox"))],
)
def test_two_processes_give_the_same_to_the_last_bit(halved: Path, name: str) -> None:
    """Whatever is chosen at a start, by trial or by what else runs, no result may hang on it."""
    path = make(name, halved, torch.bfloat16)
    one, other = (of_a_fresh_process(path, PLAIN) for _ in range(2))
    assert len(one) == len(LENGTHS)
    assert one == other
