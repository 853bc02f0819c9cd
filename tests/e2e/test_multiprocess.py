"""The model in the box with its core elsewhere: the same outputs and errors as with it here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine import LLM, AsyncLLMEngine, EngineArgs, RequestError, SamplingParams
from engine.assets import BOX_MODEL

PROMPTS = ["A list comprehension", "def f(x):", "Once upon a time", "The", "for i in"] * 2
ELSEWHERE: dict[str, Any] = {"multiprocess": True, "num_threads": 1}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.8, seed=5, max_tokens=24, top_p=0.9),
    "stop strings": SamplingParams(temperature=0.8, seed=3, max_tokens=40, stop=[" the", "."]),
    "log-probabilities": SamplingParams(temperature=0.0, max_tokens=6, logprobs=3),
    "of the prompt": SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1),
    "several": SamplingParams(n=3, temperature=0.9, seed=1, max_tokens=8),
}


@pytest.fixture(scope="module")
def here() -> Iterator[LLM]:
    with LLM(BOX_MODEL, num_threads=1) as llm:
        yield llm


def results(llm: LLM, params: SamplingParams) -> list[Any]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(o.prompt, o.prompt_token_ids, o.outputs, o.prompt_logprobs) for o in outputs]


def test_outputs_and_errors_are_those_of_a_core_in_this_process(here: LLM) -> None:
    with LLM(BOX_MODEL, **ELSEWHERE) as llm:
        for params in PARAMS.values():
            assert results(llm, params) == results(here, params)
        for wrong in ([1 << 30], [], "x" * 100_000):
            told = []
            for each in (here, llm):
                with pytest.raises(RequestError) as caught:
                    each.generate([wrong], use_tqdm=False)  # type: ignore[list-item]
                told.append((type(caught.value), str(caught.value)))
            assert told[0] == told[1]
        assert llm.reset_prefix_cache() is True


@pytest.mark.behaviour(126)
def test_a_hundred_at_once_with_the_core_in_a_process() -> None:
    greedy, options = PARAMS["greedy"], {"dtype": "float32", "num_threads": 1}  # in any company
    with LLM(BOX_MODEL, **options) as here:
        outputs = here.generate(PROMPTS, greedy, use_tqdm=False)
    wanted = {p: o.outputs[0].text for p, o in zip(PROMPTS, outputs, strict=True)}

    async def one(engine: AsyncLLMEngine, number: int) -> str:
        text = ""
        async for output in engine.generate(PROMPTS[number % 10], greedy, str(number)):
            text = output.outputs[0].text
        return text

    async def run() -> None:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(multiprocess=True, **options))
        for _ in range(2):
            tasks = [asyncio.create_task(one(engine, n)) for n in range(100)]
            await asyncio.sleep(0.05)
            for task in tasks[::7]:
                task.cancel()
            texts = await asyncio.gather(*tasks, return_exceptions=True)
            for number, text in enumerate(texts):
                if not isinstance(text, asyncio.CancelledError):
                    assert text == wanted[PROMPTS[number % 10]]
        await asyncio.to_thread(engine.shutdown)

    asyncio.run(run())


def test_the_front_end_of_a_core_elsewhere_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from engine import LLM\n"
        "from engine.assets import BOX_MODEL\n"
        "if __name__ == '__main__':\n"
        "    with LLM(BOX_MODEL, multiprocess=True, num_threads=1) as llm:\n"
        "        assert llm.generate('The', use_tqdm=False)[0].finished\n"
        "    assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
