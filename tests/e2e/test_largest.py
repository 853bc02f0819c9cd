"""Greedy tokens are taken from the output layer in one pass, and are those of its scores."""

from pathlib import Path

import pytest
import torch
from e2e.references import engine_for
from e2e.tiny_models import make_tiny_model
from support.fingerprint import prompts

from engine import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)


def tokens(engine, asked: dict[str, SamplingParams], ids: dict[str, list[int]]) -> dict[str, list]:
    for name, params in asked.items():
        engine.add_request(name, {"prompt_token_ids": ids[name]}, params)
    found: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "granite"])
def test_greedy_tokens_hang_on_no_scores_asked_for(tmp_path: Path, name: str) -> None:
    """Alone, beside a request that is drawn by chance, and where log-probabilities are wanted."""
    path = make_tiny_model(name, tmp_path, torch.bfloat16)
    ids = {str(index): list(given)[:40] for index, given in enumerate(prompts(100)[:6])}
    with engine_for(str(path), enable_prefix_caching=False) as engine:
        alone = tokens(engine, dict.fromkeys(ids, GREEDY), ids)
        scored = tokens(engine, dict.fromkeys(ids, SCORED), ids)
        mixed = tokens(engine, {**dict.fromkeys(ids, GREEDY), "0": DRAWN}, ids)
    assert alone == scored
    assert {name: alone[name] for name in ids if name != "0"} == {
        name: mixed[name] for name in ids if name != "0"
    }
