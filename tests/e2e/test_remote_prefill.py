"""Prompts that another engine has computed, over TCP: the same tokens, whatever goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import model_and_reference
from e2e.references import WHOLE, engine_for, run
from e2e.tiny_models import TinyModels
from support.kv_stores import slow_profile
from support.remote_prefill import SECRET, counters, decode, is_idle, peers, prefill
from support.served import free_port

from engine import SamplingParams

NUM_NEW, BLOCK = 8, 8
PROMPTS = [[(n * k) % 281 + 3 for k in range(90 + 3 * n)] for n in (7, 11, 13)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, **WHOLE)


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    return {"cost_profile": slow_profile(tmp_path / "slow.json"), "max_model_len": 256}


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("mistral-window", "qwen3.5")]


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", *SLOW])
def test_tokens_are_the_same_as_with_one_engine(
    family: str, tiny_models: TinyModels, tmp_path: Path, options: dict[str, Any]
) -> None:
    path, port = str(model_and_reference(family, tiny_models, tmp_path / "m")[0]), free_port()
    with engine_for(path, **options) as alone:
        right, _ = run(alone, PROMPTS, NUM_NEW)
    producing = options | {"multiprocess": True, "kv_transfer_config": peers("producer", port)}
    consuming = options | {"multiprocess": True, "kv_transfer_config": peers("consumer")}
    with engine_for(path, **producing) as producer, engine_for(path, **consuming) as consumer:
        given = prefill(producer, PROMPTS)
        for prompt, each in zip(PROMPTS, given, strict=True):
            assert each["do_remote_prefill"] is True and each["do_remote_decode"] is False
            assert (each["remote_host"], each["remote_port"]) == ("127.0.0.1", port)
            assert len(each["remote_block_ids"]) == len(prompt) // BLOCK and each["tp_size"] == 1
        outs = decode(consumer, PROMPTS, given, GREEDY)
        assert [out.outputs[0].token_ids for out in outs] == right
        wholes = [(len(prompt) - 1) // BLOCK * BLOCK for prompt in PROMPTS]
        assert [out.num_cached_tokens for out in outs] == wholes
        print(counters(producer), counters(consumer))
        assert is_idle(producer) and is_idle(consumer)
