"""The whole engine with the model in the box: mixed loads, tasks, mistakes of users."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from e2e.box_engine import PROMPTS, SIZES, greedy, joined

from engine import (
    LLM,
    AsyncLLMEngine,
    ConfigError,
    EngineArgs,
    LLMEngine,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from engine.assets import BOX_MODEL


def test_bad_input_harms_nobody(llm_engine: LLMEngine, answer: tuple[str, list[int]]) -> None:
    llm_engine.add_request("good", PROMPTS[0], greedy())
    llm_engine.step()
    for prompt, message in (
        ([], "empty"),
        ([5] * 512, "max_model_len is 512"),
        ([4096], "vocabulary"),
    ):
        with pytest.raises(RequestError, match=message):
            llm_engine.add_request("bad", prompt, greedy())
    with pytest.raises(RequestError, match="'good' is in use"):
        llm_engine.add_request("good", "x", greedy())
    while llm_engine.has_unfinished_requests():
        outputs = llm_engine.step()
    assert outputs[0].outputs[0].text == answer[0]


def test_llm_keeps_the_order_and_agrees_with_the_engine(answer: tuple[str, list[int]]) -> None:
    with LLM(**SIZES) as llm:
        params = [greedy(max_tokens=n) for n in (32, 1, 9, 20)]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.prompt for output in outputs] == PROMPTS
        assert [len(o.outputs[0].token_ids) for o in outputs] == [32, 1, 9, 20]
        assert outputs[0].outputs[0].text == answer[0]
        (reply,) = llm.chat([{"role": "user", "content": "Hello"}], greedy(), use_tqdm=False)
        assert reply.prompt is not None and reply.prompt.endswith("<|im_start|>assistant\n")
        assert reply.outputs[0].token_ids


# The asynchronous engine


async def collect(
    async_engine: AsyncLLMEngine, name: str, params: SamplingParams
) -> list[RequestOutput]:
    return [output async for output in async_engine.generate(PROMPTS[0], params, name)]


@pytest.mark.behaviour(122)
async def test_slow_reader(answer: tuple[str, list[int]]) -> None:
    async_engine = AsyncLLMEngine.from_engine_args(EngineArgs(**SIZES))
    try:
        for kind in ("delta", "cumulative"):
            outputs = []
            async for output in async_engine.generate(PROMPTS[0], greedy(output_kind=kind), "slow"):
                outputs.append(output)
                await asyncio.sleep(0.1)
            assert [output.finished for output in outputs].count(True) == 1
            last = outputs[-1].outputs[0]
            found = joined(outputs) if kind == "delta" else (last.text, last.token_ids)
            assert found == answer
    finally:
        async_engine.shutdown()


async def test_an_answer_to_a_conversation() -> None:
    async_engine = AsyncLLMEngine.from_engine_args(EngineArgs(**SIZES))
    try:
        messages = [{"role": "user", "content": "Hello"}]
        chat_options = {"add_generation_prompt": False}
        source = async_engine.chat(messages, greedy(), "chat", chat_options, priority=1)
        outputs = [output async for output in source]
        tokenizer = async_engine.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert outputs[-1].finished and outputs[-1].prompt == text
    finally:
        async_engine.shutdown()


# What is wrong with a model or an option is said before anything is loaded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere"}, "'/nowhere' does not exist"),
        ({"max_model_len": 1 << 20}, "max_model_len is 1048576"),
        ({"scheduling_policy": "fastest"}, "fastest"),
        ({"max_num_seq": 4}, "did you mean 'max_num_seqs'"),
    ],
)
def test_what_cannot_work_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{"model": BOX_MODEL, **options})


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(BOX_MODEL / name)
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        LLM(**{**SIZES, "model": tmp_path})
    with LLM(**{**SIZES, "model": tmp_path}, skip_tokenizer_init=True) as llm:
        (output,) = llm.generate([[5, 6]], greedy(max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
