"""Models that read pictures on a GPU: the tokens of transformers. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from e2e.picture_cases import Seen, maker
from e2e.picture_situations import MIXED, SIZES, greedy, say
from e2e.references import Tally
from e2e.seeing_models import CASES

from engine import LLM

pytestmark = pytest.mark.gpu

MODES: dict[str, dict[str, Any]] = {
    "recorded": {},
    "chunks": {"max_num_batched_tokens": 24, "cudagraph_capture_sizes": [8, 24]},
    "call by call": {"enforce_eager": True, "async_scheduling": False},
    "core in a process": {"multiprocess": True},
}
CHUNKED = ("llava", "qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3")
MATRIX = [
    (name, mode)
    for name in CASES
    for mode in MODES
    if mode == "recorded" or (name in CHUNKED and (mode == "chunks" or name in CHUNKED[::4]))
]


@pytest.fixture
def tally() -> Tally:
    """A tie in a few tokens is no fault."""
    return Tally()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    return maker(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(autouse=True)
def _exact_convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By default torch computes convolutions of float32 with 10 bits after the point."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # in other processes
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(("name", "mode"), MATRIX)
def test_tokens_are_those_of_transformers(
    name: str, mode: str, seen: Callable[[str], Seen], tally: Tally
) -> None:
    """Twice: the second time, pictures have been encoded and prompts are cached."""
    model = seen(name)
    sizes = {**SIZES, "block_size": 16, "device": "cuda", "dtype": "float32", **MODES[mode]}
    with LLM(model.path, **sizes) as llm:
        for _ in range(2):
            for prompt, output in zip(MIXED, say(llm, model, MIXED, greedy()), strict=True):
                model.check(output, prompt, tally)
