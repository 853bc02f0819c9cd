"""openai-agents over chat completions and responses."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import cells
from agents import (
    Agent,
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


def chat(url: str) -> None:
    for model in models(url):
        result = asyncio.run(Runner.run(agent(model, 8), "Hello"))
        assert isinstance(result.final_output, str)


def stream(url: str) -> None:
    async def streamed(model: Any) -> None:
        how = agent(model, 8, settings={"temperature": 0})
        whole = (await Runner.run(how, cells.QUESTION)).final_output
        result = Runner.run_streamed(how, cells.QUESTION)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event"
            and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == whole == result.final_output

    for model in models(url):
        asyncio.run(streamed(model))


def tool(url: str) -> None:
    """Called once by `required`; then the agent resets the choice and the answer is a text."""
    for choice in ("required", "weather"):
        for model in models(url):
            called.clear()
            settings = {"tool_choice": choice, "parallel_tool_calls": False}
            how = agent(model, settings=settings, tools=[weather])
            asyncio.run(Runner.run(how, cells.QUESTION))
            assert called, "the tool was not called"
            cells.check_city(called[0])


def schema(url: str) -> None:
    for model in models(url):
        result = asyncio.run(Runner.run(agent(model, output_type=Weather), cells.QUESTION))
        cells.check_city(result.final_output.city)


def error(url: str) -> None:
    for model in models(url):
        try:
            asyncio.run(Runner.run(agent(model, 8), cells.TOO_LONG))
        except BadRequestError as raised:
            assert raised.code == "context_length_exceeded", raised
        else:
            raise AssertionError("a prompt that is too long was answered")


def cancel(url: str) -> None:
    async def left(model: Any) -> None:
        result = Runner.run_streamed(agent(model, 1500), cells.QUESTION)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and "delta" in event.data.type:
                break
        result.cancel()
        await asyncio.to_thread(cells.wait_until_idle, url)

    for model in models(url):
        asyncio.run(left(model))


if __name__ == "__main__":
    set_tracing_disabled(True)
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel}
    )  # fmt: skip
