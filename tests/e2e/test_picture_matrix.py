"""Every family that reads pictures answers as transformers does, in every situation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.picture_cases import Seen, maker
from e2e.picture_options import IN_PROCESSES, WITH_OPTIONS
from e2e.picture_situations import SITUATIONS, SIZES
from e2e.quantized_seeing import quantized_copy
from e2e.references import Tally
from e2e.seeing_models import CASES

from engine import LLM
from engine.errors import ModelError

IN_ONE_PROCESS = {**SITUATIONS, **WITH_OPTIONS}
ALL = {**IN_ONE_PROCESS, **IN_PROCESSES}
CELLS = [(name, what) for name in CASES for what in ALL]
SLOW = {"bfloat16", "small keys and values", "int8 weights", *IN_PROCESSES}
# In every run: each of the other situations with one family, so that each family has some.
QUICK = {
    (list(CASES)[index % len(CASES)], what)
    for index, what in enumerate(sorted(IN_ONE_PROCESS.keys() - SLOW))
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Seen]:
    return maker(tmp_path_factory.mktemp("seeing"))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        pytest.param(*cell, id=", ".join(cell), marks=[] if cell in QUICK else pytest.mark.slow)
        for cell in CELLS
    ],
)
def test_tokens_are_those_of_transformers(
    models: Callable[[str], Seen], name: str, what: str, tally: Tally, tmp_path: Path
) -> None:
    ALL[what](models(name), tally, tmp_path)


@pytest.mark.parametrize("kind", ["awq", "fp8"])
def test_a_quantized_encoder_is_refused(
    models: Callable[[str], Seen], kind: str, tmp_path: Path
) -> None:
    path, _ = quantized_copy(models("llava"), tmp_path, kind, lambda name: "vision_tower" in name)
    with pytest.raises(ModelError, match=r"encoder of pictures.* is quantized .*vision_tower"):
        LLM(path, **SIZES)
