"""`batch_invariant`: a request's tokens and log-probabilities, to the last bit, hang on nothing but
the request: not on its batch, how its prompt is cut, what is cached, or whether it was preempted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.references import engine_for
from e2e.test_precision import make
from e2e.tiny_models import VOCAB
from support.fingerprint import Answers, answers, prompts

from engine.errors import ConfigError

FAMILIES = ["llama", "gemma2", "mistral-window", "qwen3-moe", "granite"]
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
BATCHES: dict[str, dict[str, Any]] = {
    "batched": {"max_num_batched_tokens": 101, "enable_prefix_caching": False},
    "one by one in chunks of 7": {**ALONE, "max_num_batched_tokens": 7},
    "token by token": {**ALONE, "max_num_batched_tokens": 1},
    "from the cache": {},
    "preempted": {"num_kv_blocks": 30, "enable_prefix_caching": False},
}


def asked() -> dict[str, list[int]]:
    return {str(index): ids[:90] for index, ids in enumerate(prompts(VOCAB))}


def computed(path: Path, how: str, options: dict[str, Any]) -> Answers:
    """All requests at once, in one of ``BATCHES``; from the cache: in another order before."""
    with engine_for(str(path), **{**BATCHES[how], **options}) as engine:
        requests = asked()
        if how == "from the cache":
            answers(engine, dict(reversed(requests.items())))
        found = answers(engine, requests)
        stats = engine.stats()
        assert (stats.num_preemptions > 0) == (how == "preempted")
        return found


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_request_gives_the_same_bits_in_whatever_company(
    tmp_path: Path, name: str, dtype: str
) -> None:
    """`property/test_company.py` has the model in the box, in every run of the tests, and
    `contract/test_cpu_attention_bits.py` windows and caps."""
    path = make(name, tmp_path, torch.bfloat16)
    options = {"dtype": dtype, "device": "cpu"}
    with engine_for(str(path), **ALONE, **options) as engine:
        alone = {key: answers(engine, {key: ids})[key] for key, ids in asked().items()}
    different = {how: computed(path, how, options) != alone for how in BATCHES}
    assert not any(different.values()), different


def test_only_what_can_keep_the_promise_makes_it(tmp_path: Path) -> None:
    path = make("gpt-neox", tmp_path, torch.bfloat16)
    with pytest.raises(ConfigError, match="native family, and GPTNeoXForCausalLM"):
        engine_for(str(path), batch_invariant=True, device="cpu")
