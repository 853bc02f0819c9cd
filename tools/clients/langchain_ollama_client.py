"""langchain-ollama."""

from __future__ import annotations

from typing import Any

import cells
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama, OllamaLLM
from ollama import ResponseError

SCHEMA = {"title": "weather", "description": cells.ABOUT, **cells.PARAMETERS}


def model(url: str, **how: Any) -> ChatOllama:
    wanted = {"num_predict": 64, "validate_model_on_init": True, "keep_alive": "5m", **how}
    return ChatOllama(model=cells.NAME, base_url=url, **wanted)


def chat(url: str) -> None:
    every = {"num_ctx": 1024, "num_gpu": 1, "num_thread": 2, "repeat_penalty": 1.1, "seed": 1}
    answer = model(url, num_predict=8, top_k=20, top_p=0.9, stop=["@@"], **every).invoke("Hello")
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["done_reason"] in ("stop", "length")
    assert OllamaLLM(model=cells.NAME, base_url=url, num_predict=8).invoke("Hello")


def stream(url: str) -> None:
    short = model(url, num_predict=8, temperature=0)
    whole = short.invoke(cells.QUESTION).text
    assert "".join(chunk.text for chunk in short.stream(cells.QUESTION)) == whole


def tool(url: str) -> None:
    for seed in range(20):
        answer = model(url, seed=seed).bind_tools([SCHEMA]).invoke(cells.QUESTION)
        for call in answer.tool_calls:
            assert call["name"] == "weather", call
            cells.check_city(call["args"].get("city"))
            return
    raise cells.ModelFault("the model called no tool in 20 answers")


def schema(url: str) -> None:
    for method in ("json_schema", "json_mode"):
        formed = model(url, seed=1, num_predict=200).with_structured_output(SCHEMA, method=method)
        found = formed.invoke(cells.QUESTION)
        assert isinstance(found, dict)
        if method == "json_schema":
            cells.check_city(found["city"])


def error(url: str) -> None:
    for wrong, words in (
        ({"temperature": 9}, "options.temperature"),
        ({"mirostat": 2}, "mirostat"),
    ):
        try:
            model(url, **wrong).invoke("Hello")
        except ResponseError as raised:
            cells.check_message(raised, words)
        else:
            raise AssertionError(f"{wrong} was accepted")


def cancel(url: str) -> None:
    chunks = model(url, num_predict=1500).stream(cells.QUESTION)
    next(chunks)
    chunks.close()
    cells.wait_until_idle(url)


def picture(url: str) -> None:
    words = {"type": "text", "text": cells.QUESTION}
    shown = {"type": "image_url", "image_url": {"url": cells.SCREEN_URL}}
    short = model(url, num_predict=8, temperature=0)
    text, both = (short.invoke([HumanMessage(parts)]) for parts in ([words], [shown, words]))
    assert both.usage_metadata["input_tokens"] > text.usage_metadata["input_tokens"]
    chunks = short.stream([HumanMessage([shown, words])])
    assert "".join(chunk.text for chunk in chunks) == both.text


if __name__ == "__main__":
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel, "picture": picture}
    )  # fmt: skip
