"""The package ollama."""

from __future__ import annotations

import base64
import json
from typing import Any

import cells
import ollama

SHORT = {"num_predict": 8, "temperature": 0}
LONG = {"num_predict": 64}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": cells.ABOUT,
        "parameters": {k: v for k, v in cells.PARAMETERS.items() if k != "additionalProperties"},
    },
}
CALL = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}


def ask(url: str, **how: Any) -> Any:
    """A chat with the usual question."""
    wanted = {"messages": cells.MESSAGES, "options": SHORT, **how}
    return ollama.Client(url).chat(cells.NAME, **wanted)


def fails(status: int, words: str, use: Any) -> None:
    try:
        use()
    except ollama.ResponseError as raised:
        assert raised.status_code == status, raised
        cells.check_message(raised, words)
    else:
        raise AssertionError(f"no error with {words!r} was raised")


def chat(url: str) -> None:
    assert ask(url).eval_count > 0
    client = ollama.Client(url)
    assert client.generate(cells.NAME, cells.QUESTION, options=SHORT).response
    assert client.generate(cells.NAME, cells.QUESTION, raw=True, options=SHORT).response


def stream(url: str) -> None:
    whole = ask(url)
    parts = list(ask(url, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count


def tool(url: str) -> None:
    turns = [
        *cells.MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_name": "weather", "content": "sunny in Rome"},
    ]
    assert ask(url, messages=turns, tools=[TOOL]).message.content
    for seed in range(20):
        for parts in (
            [ask(url, tools=[TOOL], options={**LONG, "seed": seed})],
            list(ask(url, tools=[TOOL], options={**LONG, "seed": seed}, stream=True)),
        ):
            for call in (each for part in parts for each in part.message.tool_calls or ()):
                assert call.function.name == "weather", call
                cells.check_city(call.function.arguments.get("city"))
                return
    raise cells.ModelFault("the model called no tool in 40 answers")


def schema(url: str) -> None:
    for parts in (
        [ask(url, format=cells.PARAMETERS, options=LONG)],
        list(ask(url, format=cells.PARAMETERS, options=LONG, stream=True)),
    ):
        cells.check_city(json.loads("".join(part.message.content for part in parts))["city"])
    assert isinstance(
        json.loads(ask(url, format="json", options={"seed": 1}).message.content), dict
    )


def error(url: str) -> None:
    client = ollama.Client(url)
    fails(400, "options.temperature", lambda: ask(url, options={"temperature": 9}))
    fails(404, "gpt-9", lambda: client.chat("gpt-9", cells.MESSAGES))
    fails(400, "/api/pull is not supported", lambda: client.pull(cells.NAME))
    fails(400, "no vectors", lambda: client.embed(cells.NAME, "x"))
    long = [{"role": "user", "content": cells.TOO_LONG}]
    assert ask(url, messages=long).prompt_eval_count > 1000


def cancel(url: str) -> None:
    parts = ask(url, options={"num_predict": 1500}, stream=True)
    next(parts)
    parts.close()
    cells.wait_until_idle(url)


def lists(url: str) -> None:
    client = ollama.Client(url)
    name = f"{cells.NAME}:latest"
    assert [each.model for each in client.list().models] == [name]
    assert [each.model for each in client.ps().models] == [name]
    assert "completion" in client.show(name).capabilities


def picture(url: str) -> None:
    client = ollama.Client(url)
    assert "vision" in client.show(cells.NAME).capabilities
    message = {"role": "user", "content": cells.QUESTION}
    seen = {**message, "images": [base64.b64decode(cells.SCREEN)]}
    text, both = (ask(url, messages=[each]) for each in (message, seen))
    assert both.prompt_eval_count > text.prompt_eval_count
    parts = list(ask(url, messages=[seen], stream=True))
    assert "".join(part.message.content for part in parts) == both.message.content
    one = client.generate(cells.NAME, cells.QUESTION, images=[cells.SCREEN], options=SHORT)
    assert one.response == both.message.content
    result = {"role": "tool", "tool_name": "look", "content": "seen", "images": [cells.SCREEN]}
    turns = [message, {"role": "assistant", "content": "", "tool_calls": [CALL]}, result]
    assert ask(url, messages=turns).prompt_eval_count > text.prompt_eval_count


if __name__ == "__main__":
    cells.run(
        {"chat": chat, "stream": stream, "tool": tool, "schema": schema, "error": error,
         "cancel": cancel, "lists": lists, "picture": picture}
    )  # fmt: skip
