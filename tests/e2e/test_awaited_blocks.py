"""Requests that wait until another engine has stored the blocks of their prompts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from e2e.general_models import model_and_reference
from e2e.references import engine_for, run
from e2e.tiny_models import TinyModels

from engine import LLMEngine
from engine.core.replay import replay
from engine.errors import RequestError
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from policylab.sim.recorded import resimulate

PROMPT = [(n * 7) % 281 + 3 for n in range(101)]
OTHER = [(n * 11) % 281 + 3 for n in range(60)]
NUM_NEW, BLOCK = 6, 8
LONG = 600.0  # seconds; no test waits so long
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("mistral-window", "qwen3.5")]


def waiting(name: str, prompt: list[int], seconds: object) -> AddRequest:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
    kv = {"await_blocks": seconds}
    return AddRequest(name, prompt, params, 0, time.monotonic(), NUM_NEW, kv_transfer_params=kv)


class Outputs:
    """Steps an engine's core and collects tokens and numbers of cached tokens."""

    def __init__(self, engine: LLMEngine) -> None:
        self.client = engine.session.client
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for batch in self.client.step():
                tokens, counts = iter(batch.token_ids), batch.counts
                for row, name in enumerate(batch.request_ids):
                    num = 1 if counts is None else counts[row]
                    self.tokens.setdefault(name, []).extend(next(tokens) for _ in range(num))
                for each in batch.started:
                    self.cached[batch.request_ids[each.index]] = each.num_cached_tokens

    def drain(self) -> None:
        while self.client.has_unfinished():
            self.step()

    def counters(self) -> dict[str, int]:
        stats = self.client.stats()
        assert stats is not None
        return {name: n for name, n in stats.counters.items() if name.startswith("kv load.")}

    def waits(self) -> dict[str, Any]:
        stats = self.client.stats()
        assert stats is not None
        return dict(stats.waiting_by_cause)


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", *SLOW])
def test_a_prompt_is_loaded_when_another_engine_has_stored_it(
    family: str,
    tiny_models: TinyModels,
    tmp_path: Path,
    store_options: dict[str, Any],
) -> None:
    path = str(model_and_reference(family, tiny_models, tmp_path / "m")[0])
    log = tmp_path / "steps"
    with engine_for(path, **store_options, step_log=str(log)) as engine:
        outputs = Outputs(engine)
        outputs.client.add(waiting("a", PROMPT, LONG))
        outputs.client.add(waiting("in vain", OTHER, 0.02))
        outputs.step(3)
        assert "kv lookup" in outputs.waits()
        while outputs.client.num_unfinished() > 1:
            outputs.step()
        with engine_for(path, **store_options) as other:
            first, _ = run(other, [PROMPT, OTHER], NUM_NEW)
        outputs.drain()
        counters = outputs.counters()
    assert outputs.tokens == {"a": first[0], "in vain": first[1]}
    assert outputs.cached == {"a": (len(PROMPT) - 1) // BLOCK * BLOCK, "in vain": 0}
    assert counters["kv load.awaited"] == counters["kv load.awaited_in_vain"] == 1
    outcome = replay(log)
    assert outcome.difference is None and outcome.num_steps > 5
    assert resimulate(log)[0].difference is None


def test_a_wait_can_be_aborted_and_delays_nobody(
    tiny_models: TinyModels, tmp_path: Path, store_options: dict[str, Any]
) -> None:
    path = str(model_and_reference("llama", tiny_models, tmp_path / "m")[0])
    with engine_for(path, **store_options) as engine:
        outputs = Outputs(engine)
        outputs.client.add(waiting("a", PROMPT, LONG))
        outputs.client.add(waiting("none", OTHER, 0))
        outputs.client.add(waiting("again", OTHER, LONG))  # the pool will have its blocks
        while outputs.client.num_unfinished() > 1:
            outputs.step()
        assert outputs.tokens["none"] == outputs.tokens["again"] and len(outputs.tokens) == 2
        outputs.client.abort(["a"])
        outputs.drain()
        assert not outputs.waits()


@pytest.mark.parametrize("seconds", ["1", -1, float("nan"), 1e9, True, [2.0]])
def test_a_wrong_time_to_wait_is_refused(
    seconds: object, tiny_models: TinyModels, tmp_path: Path, store_options: dict[str, Any]
) -> None:
    path = str(model_and_reference("llama", tiny_models, tmp_path / "m")[0])
    with engine_for(path, **store_options) as engine:
        with pytest.raises(RequestError, match=r"await_blocks in .* is .*0\.\.3600"):
            engine.session.client.add(waiting("a", PROMPT, seconds))
        assert len(run(engine, [OTHER], NUM_NEW)[0][0]) == NUM_NEW


def test_without_stores_nothing_can_be_awaited(tiny_models: TinyModels, tmp_path: Path) -> None:
    path = str(model_and_reference("llama", tiny_models, tmp_path / "m")[0])
    with (
        engine_for(path) as engine,
        pytest.raises(RequestError, match="needs the capability 'kv_transfer'"),
    ):
        engine.session.client.add(waiting("a", PROMPT, 1.0))
