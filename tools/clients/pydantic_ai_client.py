"""pydantic-ai over chat completions, responses and messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import cells
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Weather(BaseModel):
    city: Literal["Rome", "Paris"]


def models(url: str) -> list[Any]:
    ours = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return [
        OpenAIChatModel(cells.NAME, provider=ours),
        OpenAIResponsesModel(cells.NAME, provider=ours),
        AnthropicModel(cells.NAME, provider=AnthropicProvider(base_url=url, api_key="none")),
    ]


def chat(url: str) -> None:
    for model in models(url):
        answer = Agent(model, model_settings={"max_tokens": 8}).run_sync("Hello")
        assert answer.usage.output_tokens > 0


def stream(url: str) -> None:
    async def streamed(model: Any) -> None:
        agent = Agent(model, model_settings={"max_tokens": 8, "temperature": 0})
        whole = (await agent.run(cells.QUESTION)).output
        async with agent.run_stream(cells.QUESTION) as result:
            parts = [part async for part in result.stream_text(delta=True, debounce_by=None)]
        assert "".join(parts) == whole

    for model in models(url):
        asyncio.run(streamed(model))


def tool(url: str) -> None:
    """The tool is called because the output is one (named by the client as `required`)."""
    for model in models(url):
        agent = Agent(model, output_type=ToolOutput(Weather), model_settings={"max_tokens": 64})
        cells.check_city(agent.run_sync(cells.QUESTION).output.city)


def schema(url: str) -> None:
    for model in models(url)[:2]:
        agent = Agent(model, output_type=NativeOutput(Weather), model_settings={"max_tokens": 64})
        cells.check_city(agent.run_sync(cells.QUESTION).output.city)


def error(url: str) -> None:
    for model in models(url):
        try:
            Agent(model, model_settings={"max_tokens": 8}).run_sync(cells.TOO_LONG)
        except ModelHTTPError as raised:
            assert raised.status_code == 400, raised
        else:
            raise AssertionError("a prompt that is too long was answered")


def cancel(url: str) -> None:
    async def left(model: Any) -> None:
        agent = Agent(model, model_settings={"max_tokens": 1500})
        async with agent.run_stream(cells.QUESTION) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                break
        await asyncio.to_thread(cells.wait_until_idle, url)

    for model in models(url):
        asyncio.run(left(model))


if __name__ == "__main__":
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel}
    )  # fmt: skip
