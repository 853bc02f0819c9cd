"""langchain-openai (chat and responses) and langchain-anthropic."""

from __future__ import annotations

from typing import Any

import cells
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

SCHEMA = {"title": "weather", "description": cells.ABOUT, **cells.PARAMETERS}


def chats(url: str, **how: Any) -> list[Any]:
    ours = {"model": cells.NAME, "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    theirs = {**ours, "base_url": url}
    how = {"max_tokens": 64, **how}
    return [
        ChatOpenAI(**ours, **how),
        ChatOpenAI(use_responses_api=True, **ours, **how),
        ChatAnthropic(**theirs, **how),
    ]


def chat(url: str) -> None:
    for each in chats(url, max_tokens=8):
        assert each.invoke("Hello").usage_metadata["output_tokens"] > 0


def stream(url: str) -> None:
    for each in chats(url, max_tokens=8, temperature=0):
        whole = each.invoke(cells.QUESTION).text
        assert "".join(chunk.text for chunk in each.stream(cells.QUESTION)) == whole


def tool(url: str) -> None:
    for each in chats(url):
        for choice in ("any", "weather"):
            once = {"parallel_tool_calls": False}
            bound = each.bind_tools([SCHEMA], tool_choice=choice, **once)
            (call,) = bound.invoke(cells.QUESTION).tool_calls
            assert call["name"] == "weather"
            cells.check_city(call["args"]["city"])
            total = None
            for chunk in bound.stream(cells.QUESTION):
                total = chunk if total is None else total + chunk
            (call,) = total.tool_calls
            cells.check_city(call["args"]["city"])


def schema(url: str) -> None:
    for each in chats(url):
        for method in ("json_schema", "function_calling"):
            formed = each.with_structured_output(SCHEMA, method=method)
            cells.check_city(formed.invoke(cells.QUESTION)["city"])


def error(url: str) -> None:
    for each in chats(url):
        try:
            each.invoke(cells.TOO_LONG)
        except ContextOverflowError as raised:
            is_anthropic = isinstance(each, ChatAnthropic)
            cells.check_message(raised, "too long" if is_anthropic else "context")
        else:
            raise AssertionError("a prompt that is too long was answered")


def cancel(url: str) -> None:
    for each in chats(url, max_tokens=1500):
        chunks = each.stream(cells.QUESTION)
        next(chunks)
        chunks.close()
        cells.wait_until_idle(url)


def picture(url: str) -> None:
    """In OpenAI's form and in LangChain's own, streamed, and in the result of a tool."""
    own = {"type": "image", "base64": cells.SCREEN, "mime_type": "image/png"}
    words = {"type": "text", "text": cells.QUESTION}
    call = AIMessage("", tool_calls=[{"id": "c", "name": "look", "args": {}}])
    for each in chats(url, max_tokens=8, temperature=0):
        size = each.invoke([HumanMessage([words])]).usage_metadata["input_tokens"]
        for part in ({"type": "image_url", "image_url": {"url": cells.SCREEN_URL}}, own):
            messages = [HumanMessage([part, words])]
            whole = each.invoke(messages)
            assert whole.usage_metadata["input_tokens"] > size
            assert "".join(chunk.text for chunk in each.stream(messages)) == whole.text
        sizes = [
            each.invoke(
                [HumanMessage("look"), call, ToolMessage(content, tool_call_id="c")]
            ).usage_metadata["input_tokens"]
            for content in ([words], [words, own])
        ]
        assert sizes[1] > sizes[0]


if __name__ == "__main__":
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel, "picture": picture}
    )  # fmt: skip
