"""A request's tokens and log-probabilities on a CPU do not depend on its company, at the default:
`tools/invariance.py` is the long form."""

from pathlib import Path

import pytest
import torch
from e2e.tiny_models import make_tiny_model
from support.company import Company, differences

from engine.assets import BOX_MODEL

LONG = ("llama", "mistral-window", "gemma2")


@pytest.mark.parametrize(
    "name", ["box", *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_answers_are_those_given_alone(name: str, tmp_path: Path, seed: int) -> None:
    path = BOX_MODEL if name == "box" else make_tiny_model(name, tmp_path, torch.bfloat16)
    for num, wrong in differences(Company(str(path), 16, seed=seed)):
        assert num and not wrong, wrong
