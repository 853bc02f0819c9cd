"""Ranks that each compute a part of a model as a GPU does, kernels interpreted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from e2e.paged import PagedRun
from e2e.test_forward import tokens_of
from e2e.test_slices import load
from e2e.tiny_models import TinyModels
from support.rank_threads import run_ranks

from engine.parallel.collectives import Alone, Collectives
from kernels.bodies import CPU_TENSORS

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _as_a_gpu() -> Iterator[None]:
    CPU_TENSORS.go_to_triton(True)
    yield
    CPU_TENSORS.go_to_triton(False)


class InTurns:
    """``Collectives`` of threads of which one computes at a time, as the interpreter needs."""

    def __init__(self, ranks: Collectives, turn: threading.Lock) -> None:
        self.rank, self.size = ranks.rank, ranks.size
        self._ranks, self._turn = ranks, turn

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._turn.release()
        try:
            return self._ranks.all_reduce(x)
        finally:
            self._turn.acquire()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._turn.release()
        try:
            return self._ranks.all_gather(x)
        finally:
            self._turn.acquire()

    def barrier(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        pass


@pytest.mark.parametrize(
    "name", ["llama-mha-tied-biased", "olmo2", "qwen3-moe", "qwen3-next", "granite-hybrid", "jamba"]
)
def test_ranks_compute_what_one_does(tmp_path: Path, name: str, seed: int) -> None:
    tokens, path, turn = tokens_of(seed, 6), TinyModels(tmp_path).path(name), threading.Lock()

    def logits(ranks: Collectives) -> torch.Tensor:
        model = load(path, ranks)
        model.group_experts()
        return PagedRun(model).prefill("a", tokens, 5)

    def in_turns(ranks: Collectives) -> torch.Tensor:
        with turn:
            return logits(InTurns(ranks, turn))

    alone = logits(Alone())
    for one in run_ranks(2, in_turns):
        error = (one - alone).abs().max() / alone.abs().max()
        assert error < 1e-5, f"off by {error:.2e} of the largest logit"
