"""Pooled requests in a whole engine: next to failing ones, in a core of its own process that may be
killed, by priority, in a recorded run, and with LoRA adapters."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from e2e.sentence_models import random_model, save_base
from support.processes import ranks_of
from transformers import BertConfig, BertModel

from engine import LLM, AsyncLLMEngine, EngineDeadError, PoolingParams, RequestError
from engine.cli.main import main
from engine.config.args import EngineArgs
from engine.core.replay import replay
from engine.messages.pooling import PoolingOutput, PoolingRequestOutput
from engine.sched import Policy, Request, SchedView

VOCAB, LONGEST, POISON = 120, 48, 99


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT whose embedding of one token is not a number."""
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LONGEST,
    )
    model = BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[POISON] = float("nan")
    found = tmp_path_factory.mktemp("bert")
    model.save_pretrained(found)
    return found


def options(path: Path, **changes: Any) -> dict[str, Any]:
    return {"model": path, "dtype": "float32", "skip_tokenizer_init": True, **changes}


def expected(path: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = BertModel.from_pretrained(path, add_pooling_layer=False).eval()
    with torch.inference_mode():
        return [model(torch.tensor([p])).last_hidden_state[0].mean(0) for p in prompts]


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, POISON, n).tolist() for n in rng.integers(1, LONGEST + 1, count)]


def vector(output: PoolingRequestOutput[PoolingOutput]) -> torch.Tensor:
    return torch.from_numpy(output.outputs.data)


def test_a_text_that_is_not_a_number_fails_alone(path: Path) -> None:
    sound = prompts(9)
    given = [*sound[:4], [5, POISON, 6], *sound[4:]]
    with LLM(**options(path)) as llm:
        found = llm.encode(given, use_tqdm=False)
    assert "NaN" in (found[4].error or "")
    right = [*found[:4], *found[5:]]
    for output, reference in zip(right, expected(path, sound), strict=True):
        torch.testing.assert_close(vector(output), reference, atol=1e-5, rtol=0)


class Halves(Policy):
    """Offers half of the tokens that a prompt lacks."""

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        return (req.arrival_time,)

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        return max(1, num_tokens // 2)


def test_no_policy_cuts_a_text_whose_tokens_see_later_ones(path: Path) -> None:
    given = prompts(8, seed=7)
    with LLM(**options(path, scheduling_policy=Halves())) as llm:
        found = llm.encode(given, use_tqdm=False)
    for output, reference in zip(found, expected(path, given), strict=True):
        torch.testing.assert_close(vector(output), reference, atol=1e-5, rtol=0)


def test_a_recorded_run_replays(path: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps"
    with LLM(**options(path, step_log=log, max_num_seqs=3)) as llm:
        llm.encode(prompts(20), use_tqdm=False)
    outcome = replay(log)
    assert outcome.difference is None
    assert outcome.num_requests == 20


async def result(engine: AsyncLLMEngine, prompt: list[int], name: str, **more: Any) -> torch.Tensor:
    async for output in engine.encode(prompt, None, name, **more):
        return vector(output)
    raise AssertionError("no output")


def test_a_core_in_its_own_process_has_the_same_results_and_may_be_killed(path: Path) -> None:
    async def run() -> None:
        args = EngineArgs(**options(path, multiprocess=True))
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            given = prompts(12, seed=6)
            jobs = [result(engine, prompt, str(i)) for i, prompt in enumerate(given)]
            for found, reference in zip(
                await asyncio.gather(*jobs), expected(path, given), strict=True
            ):
                torch.testing.assert_close(found, reference, atol=1e-5, rtol=0)
            await engine.pause()  # what follows is in the core when it dies
            jobs = [asyncio.create_task(result(engine, given[0], f"k{i}")) for i in range(4)]
            while (stats := await engine.stats()) is None or stats.num_waiting < 4:
                await asyncio.sleep(0.01)
            os.kill(core_of(os.getpid()), signal.SIGKILL)
            ended = await asyncio.gather(*jobs, return_exceptions=True)
            assert all(isinstance(each, EngineDeadError) for each in ended), ended
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), 120))


def core_of(pid: int) -> int:
    """The process of the only core of this process."""
    (core,) = ranks_of(pid)
    return core


def test_better_priorities_go_first_and_deadlines_end_requests(path: Path) -> None:
    async def run() -> None:
        args = EngineArgs(**options(path, scheduling_policy="priority", max_num_seqs=1))
        engine = AsyncLLMEngine.from_engine_args(args)
        ended: list[str] = []

        async def one(name: str, **more: Any) -> None:
            await result(engine, [1, 2, 3], name, **more)
            ended.append(name)

        try:
            await engine.pause()
            jobs = [asyncio.create_task(one(f"{rank}", priority=rank)) for rank in (3, 1, 2, 0, 4)]
            while (stats := await engine.stats()) is None or stats.num_waiting < len(jobs):
                await asyncio.sleep(0.01)
            await engine.resume()
            await asyncio.gather(*jobs)
            assert ended == sorted(ended)
            async for output in engine.encode([1, 2], None, "late", timeout=1e-9):
                assert output.code == "deadline_exceeded"
        finally:
            engine.shutdown()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_mistakes_are_named(path: Path) -> None:
    with LLM(**options(path)) as llm:
        for call, words in (
            (lambda: llm.generate([[1, 2]], use_tqdm=False), "returns vectors or scores"),
            (lambda: llm.encode([[1] * (LONGEST + 1)], use_tqdm=False), f"{LONGEST}"),
            (
                lambda: llm.encode([[1]], PoolingParams(task="classify"), use_tqdm=False),
                "must be one of: embed, token_embed",
            ),
            (
                lambda: llm.embed(
                    [[1]], pooling_params=PoolingParams(dimensions=8), use_tqdm=False
                ),
                "was not trained for fewer than 32",
            ),
            (lambda: llm.encode([[VOCAB]], use_tqdm=False), "vocabulary"),
            (lambda: llm.encode([[]], use_tqdm=False), "empty"),
        ):
            with pytest.raises(RequestError) as caught:
                call()
            assert words in str(caught.value)
        assert len(llm.encode([[1, 2]], use_tqdm=False)) == 1


def test_commands_show_and_prepare_a_model_that_pools(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(save_base(tmp_path / "model", random_model("Bert")))
    assert main(["models", path]) == 0
    shown = capsys.readouterr().out
    assert "mean pooling" in shown and "yes, natively" in shown
    assert main(["prepare", path, "--dtype", "float32"]) == 0
    assert "kernels compiled" in capsys.readouterr().out
    assert main(["generate", "--model", path, "hi"]) == 2
    assert "generates no text" in capsys.readouterr().err
