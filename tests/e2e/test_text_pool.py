"""The model in the box with text processes: what users get is what they get without."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from e2e.box_engine import KINDS, PROMPTS, SIZES, greedy, run

from engine import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, RequestError, SamplingParams
from engine.errors import ConfigError

CORES = {"core here": {}, "core in a process": {"multiprocess": True}}


@pytest.fixture(scope="module", params=CORES, ids=str)
def where(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CORES[request.param]


@pytest.fixture(scope="module")
def pooled(where: dict[str, Any]) -> Iterator[LLM]:
    with LLM(**SIZES, **where, tokenizer_pool_size=2) as llm:
        yield llm


@pytest.fixture
def asked(llm_engine: LLMEngine) -> dict[str, SamplingParams]:
    """Requests of every kind, with a stop string that the model says."""
    outputs = run(llm_engine, {"x": greedy(max_tokens=40, output_kind="final")})["x"]
    stop = outputs[0].outputs[0].text[30:34]
    return {
        f"{kind} {number}": params
        for kind in KINDS
        for number, params in enumerate(
            [
                greedy(output_kind=kind),
                greedy(output_kind=kind, stop=[stop], max_tokens=100),
                greedy(output_kind=kind, logprobs=2, prompt_logprobs=1),
                SamplingParams(n=2, seed=5, output_kind=kind, max_tokens=20),
            ]
        )
    }


def seen(outputs: dict[str, Any]) -> dict[str, Any]:
    """What a request got in all, as it is read: pieces joined."""
    found = {}
    for name, several in outputs.items():
        last = {completion.index: completion for o in several for completion in o.outputs}
        texts: dict[int, str] = dict.fromkeys(last, "")
        tokens: dict[int, list[int]] = {index: [] for index in last}
        for output in several:
            for completion in output.outputs:
                joins = name.startswith("delta")
                texts[completion.index] = texts[completion.index] * joins + completion.text
                tokens[completion.index] = tokens[completion.index] * joins + completion.token_ids
        ends = {i: (c.finish_reason, c.stop_reason) for i, c in last.items()}
        found[name] = (several[-1].prompt_token_ids, texts, tokens, ends)
    return found


def test_outputs_are_the_same(
    llm_engine: LLMEngine, pooled: LLM, asked: dict[str, SamplingParams]
) -> None:
    expected = seen(run(llm_engine, asked))
    found = seen(run(pooled.llm_engine, asked))
    for name in asked:
        assert found[name] == expected[name], name


def test_lists_and_chats_are_the_same(llm_engine: LLMEngine, pooled: LLM) -> None:
    outputs = pooled.generate(PROMPTS * 5, greedy(), use_tqdm=False)
    expected = run(llm_engine, {str(i): greedy(output_kind="final") for i in range(4)})
    for i, output in enumerate(outputs):
        (alone,) = expected[str(i % 4)]
        assert output.outputs == alone.outputs
        assert (output.prompt, output.prompt_token_ids) == (alone.prompt, alone.prompt_token_ids)
    with pytest.raises(RequestError, match="max_model_len is 512"):
        pooled.generate("x " * 2000)
    with pytest.raises(RequestError, match="chat template"):
        pooled.chat([{"role": "user", "content": "Hi"}], chat_template="{{ 1 / 0 }}")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": PROMPTS[0]}]
    (output,) = pooled.chat(chat, greedy(), chat_template=template, use_tqdm=False)
    assert output.outputs == outputs[0].outputs


async def test_streams_are_the_same(llm_engine: LLMEngine, where: dict[str, Any]) -> None:
    params = {f"delta {i}": greedy(output_kind="delta", max_tokens=16 + i) for i in range(20)}
    expected = seen(run(llm_engine, params))
    args = EngineArgs(**SIZES, **where, tokenizer_pool_size=2)
    async_engine = await asyncio.to_thread(AsyncLLMEngine.from_engine_args, args)

    async def collect(number: int, name: str) -> list[Any]:
        prompt = PROMPTS[number % len(PROMPTS)]
        return [output async for output in async_engine.generate(prompt, params[name], name)]

    results = await asyncio.gather(*(collect(i, name) for i, name in enumerate(params)))
    assert seen(dict(zip(params, results, strict=True))) == expected
    async_engine.shutdown()


def test_a_pool_needs_a_tokenizer_and_a_size() -> None:
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        LLM(tokenizer_pool_size=2, skip_tokenizer_init=True)
    for size in (-1, 65):
        with pytest.raises(ConfigError, match=rf"tokenizer_pool_size is {size}, must be in 0..64"):
            LLM(tokenizer_pool_size=size)
