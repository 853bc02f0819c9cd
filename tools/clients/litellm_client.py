"""litellm, by the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import cells
import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": cells.ABOUT,
        "parameters": cells.PARAMETERS,
    },
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": cells.PARAMETERS}}


def models(url: str) -> list[dict[str, Any]]:
    key = {"api_key": "none", "num_retries": 0, "max_retries": 0}
    return [
        {"model": f"openai/{cells.NAME}", "api_base": f"{url}/v1", **key},
        {"model": f"anthropic/{cells.NAME}", "api_base": url, **key},
    ]


def chat(url: str) -> None:
    for model in models(url):
        whole = litellm.completion(messages=cells.MESSAGES, max_tokens=8, **model)
        assert 0 < whole.usage.completion_tokens <= 8


def stream(url: str) -> None:
    for model in models(url):
        how = {"messages": cells.MESSAGES, "max_tokens": 8, "temperature": 0, **model}
        whole = litellm.completion(**how).choices[0].message.content
        chunks = list(litellm.completion(stream=True, **how))
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def tool(url: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for model in models(url):
        for choice in ("required", named):
            for streams in (False, True):
                got = litellm.completion(
                    messages=cells.MESSAGES,
                    tools=[TOOL],
                    tool_choice=choice,
                    parallel_tool_calls=False,
                    stream=streams,
                    max_tokens=64,
                    **model,
                )
                if streams:
                    got = litellm.stream_chunk_builder(list(got))
                (call,) = got.choices[0].message.tool_calls
                assert call.function.name == "weather"
                cells.check_city(litellm.json.loads(call.function.arguments)["city"])


def schema(url: str) -> None:
    for model in models(url):
        answer = litellm.completion(
            messages=cells.MESSAGES, response_format=FORMAT, max_tokens=64, **model
        )
        cells.check_city(litellm.json.loads(answer.choices[0].message.content)["city"])


def error(url: str) -> None:
    for model in models(url):
        long = [{"role": "user", "content": cells.TOO_LONG}]
        try:
            litellm.completion(messages=long, max_tokens=8, **model)
        except litellm.ContextWindowExceededError:
            pass
        else:
            raise AssertionError("a prompt that is too long was answered")
        try:
            litellm.completion(messages=cells.MESSAGES, max_tokens=8, temperature=9, **model)
        except litellm.BadRequestError as raised:
            cells.check_message(raised, "temperature", "9")
        else:
            raise AssertionError("a temperature of 9 was taken")


def cancel(url: str) -> None:
    for model in models(url):
        chunks = litellm.completion(messages=cells.MESSAGES, max_tokens=1500, stream=True, **model)
        next(iter(chunks))
        chunks.completion_stream.close()
        del chunks
        cells.wait_until_idle(url)


def picture(url: str) -> None:
    words = {"type": "text", "text": cells.QUESTION}
    shown = {"type": "image_url", "image_url": {"url": cells.SCREEN_URL}}
    for model in models(url):
        how = {"max_tokens": 8, "temperature": 0, **model}
        text, both = (
            litellm.completion(messages=[{"role": "user", "content": parts}], **how)
            for parts in ([words], [shown, words])
        )
        assert both.usage.prompt_tokens > text.usage.prompt_tokens
        messages = [{"role": "user", "content": [shown, words]}]
        chunks = litellm.completion(messages=messages, stream=True, **how)
        parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(parts) == both.choices[0].message.content


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel, "picture": picture}
    )  # fmt: skip
