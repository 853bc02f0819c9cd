"""Perplexity and KL divergence of ``tools/perplexity.py``, on log-probabilities that are known."""

import math
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from figures import value_of
from perplexity import Divergence, Perplexity


def test_perplexity_of_even_guesses_is_their_number() -> None:
    windows = {"a": [1, 2, 3], "b": [4, 0]}
    found = Perplexity(windows)
    for name, window in windows.items():
        found.add(name, torch.zeros(len(window) - 1, 5).log_softmax(-1))
    assert found.value == pytest.approx(5.0)


def test_perplexity_counts_the_token_after_each_position() -> None:
    found = Perplexity({"a": [2, 0, 1]})
    found.add("a", torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.125, 0.625]]).log())
    assert found.value == pytest.approx(4.0)


def test_divergence_is_from_the_reference() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.75, 0.25]]).log()
    ours = torch.tensor([[0.25, 0.75], [0.75, 0.25]]).log()
    found = Divergence({"a": reference})
    found.add("a", ours)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    figures = found.figures()
    assert figures["mean_kl"] == pytest.approx(expected / 2)
    assert figures["largest_kl"] == pytest.approx(expected)


def test_options_are_json_or_strings() -> None:
    assert value_of("quantization=int4") == ("quantization", "int4")
    assert value_of("max_num_seqs=4") == ("max_num_seqs", 4)
