"""openai-agents over chat completions and responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import cells
from agents import (
    Agent,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

called: list[str] = []
GREETING = "Say hello."
ENOUGH = 512
"""Tokens within which a greeting should end: this client raises for a truncated response."""


class Weather(BaseModel):
    city: Literal["Rome", "Paris"]


@function_tool
def weather(city: Literal["Rome", "Paris"]) -> str:
    """The weather in a city."""
    called.append(city)
    return "sunny"


def models(url: str) -> list[Any]:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return [
        OpenAIChatCompletionsModel(cells.NAME, client),
        OpenAIResponsesModel(cells.NAME, client),
    ]


def agent(model: Any, most: int = 64, **how: Any) -> Agent[Any]:
    settings = how.pop("settings", {})
    return Agent("a", model=model, model_settings=ModelSettings(max_tokens=most, **settings), **how)


def each_model(use: Callable[[Any], Awaitable[None]], url: str) -> None:
    """One event loop for all models: a client's connections belong to the loop that opened them."""

    async def together() -> None:
        for model in models(url):
            try:
                await use(model)
            except ModelBehaviorError as error:
                if "max_output_tokens" not in str(error):
                    raise
                raise cells.ModelFault("the model wrote on to the limit of tokens") from error

    asyncio.run(together())


def chat(url: str) -> None:
    async def chatted(model: Any) -> None:
        result = await Runner.run(agent(model, ENOUGH), GREETING)
        assert isinstance(result.final_output, str)

    each_model(chatted, url)


def stream(url: str) -> None:
    async def streamed(model: Any) -> None:
        how = agent(model, ENOUGH, settings={"temperature": 0})
        whole = (await Runner.run(how, GREETING)).final_output
        result = Runner.run_streamed(how, GREETING)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == whole == result.final_output

    each_model(streamed, url)


def tool(url: str) -> None:
    """Called once by the choice; then the agent resets it, and the answer is a text."""

    async def used(model: Any) -> None:
        for choice in ("required", "weather"):
            called.clear()
            settings = {"tool_choice": choice, "parallel_tool_calls": False}
            how = agent(model, ENOUGH, settings=settings, tools=[weather])
            await Runner.run(how, cells.QUESTION)
            assert called, "the tool was not called"
            cells.check_city(called[0])

    each_model(used, url)


def schema(url: str) -> None:
    async def formed(model: Any) -> None:
        result = await Runner.run(agent(model, output_type=Weather), cells.QUESTION)
        cells.check_city(result.final_output.city)

    each_model(formed, url)


def error(url: str) -> None:
    async def refused(model: Any) -> None:
        try:
            await Runner.run(agent(model, 8), cells.TOO_LONG)
        except BadRequestError as raised:
            assert raised.code == "context_length_exceeded", raised
        else:
            raise AssertionError("a prompt that is too long was answered")

    each_model(refused, url)


def cancel(url: str) -> None:
    async def left(model: Any) -> None:
        result = Runner.run_streamed(agent(model, 1500), cells.QUESTION)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and "delta" in event.data.type:
                break
        result.cancel()
        await asyncio.to_thread(cells.wait_until_idle, url)

    each_model(left, url)


def picture(url: str) -> None:
    """In a message, and as the output of a tool; in chat completions this client sends only the
    texts of outputs."""
    words = {"type": "input_text", "text": cells.QUESTION}
    shown = {"type": "input_image", "image_url": cells.SCREEN_URL, "detail": "auto"}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}

    async def seen(model: Any) -> None:
        sizes = []
        for parts in ([words], [words, shown]):
            message = [{"role": "user", "content": parts}]
            output = {"type": "function_call_output", "call_id": "c", "output": parts}
            for items in (message, [{"role": "user", "content": "look"}, call, output]):
                result = await Runner.run(agent(model, output_type=Weather), items)
                sizes.append(result.context_wrapper.usage.input_tokens)
        assert sizes[2] > sizes[0], sizes
        if isinstance(model, OpenAIResponsesModel):
            assert sizes[3] > sizes[1], sizes

    each_model(seen, url)


if __name__ == "__main__":
    set_tracing_disabled(True)
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel, "picture": picture}
    )  # fmt: skip
