"""instructor: every mode of its OpenAI and Anthropic clients that these two APIs have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import cells
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel

OPENAI_MODES = (
    "TOOLS", "TOOLS_STRICT", "FUNCTIONS", "PARALLEL_TOOLS", "JSON", "JSON_O1", "MD_JSON",
    "JSON_SCHEMA", "RESPONSES_TOOLS",
)  # fmt: skip
ANTHROPIC_MODES = (
    "ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_PARALLEL_TOOLS", "ANTHROPIC_JSON",
)  # fmt: skip
PARALLEL = ("PARALLEL_TOOLS", "ANTHROPIC_PARALLEL_TOOLS")
FREE = ("JSON_O1", "MD_JSON", "ANTHROPIC_JSON", "PARALLEL_TOOLS", "ANTHROPIC_PARALLEL_TOOLS",
        "ANTHROPIC_REASONING_TOOLS", "JSON")  # fmt: skip
"""Modes in which nothing but the prompt makes the model write what is wanted."""


class Weather(BaseModel, extra="forbid"):
    city: Literal["Rome", "Paris"]


def made(url: str, mode: Mode) -> Any:
    if mode.name.startswith("ANTHROPIC"):
        client: Any = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        return instructor.from_anthropic(client, mode=mode)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def extract(url: str, mode: Mode) -> None:
    wanted: Any = Iterable[Weather] if mode.name in PARALLEL else Weather
    most = {"max_output_tokens": 64} if mode.name.startswith("RESP") else {"max_tokens": 64}
    if mode.name == "ANTHROPIC_REASONING_TOOLS":
        most = {"max_tokens": 2048, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    try:
        found = made(url, mode).create(
            model=cells.NAME,
            messages=cells.MESSAGES,
            response_model=wanted,
            max_retries=0,
            **most,
        )
        for each in found if mode.name in PARALLEL else [found]:
            cells.check_city(each.city)
    except Exception as error:
        if mode.name in FREE and not is_servers_fault(error):
            raise cells.ModelFault(f"{type(error).__name__}: {str(error)[:200]}") from error
        raise


def is_servers_fault(error: BaseException) -> bool:
    """Whether the HTTP exchange failed, here or in what the error was raised for."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, openai.APIError | anthropic.APIError):
            return True
        at = at.__cause__ or at.__context__
    return "Error code" in str(error)


def chat(url: str) -> None:
    for mode in (Mode.TOOLS, Mode.ANTHROPIC_TOOLS):
        about = {"model": cells.NAME, "messages": cells.MESSAGES, "max_tokens": 8}
        answer = made(url, mode).create(response_model=None, **about)
        assert answer.usage is not None


def stream(url: str) -> None:
    parts = made(url, Mode.TOOLS).create_partial(
        model=cells.NAME, messages=cells.MESSAGES, response_model=Weather, max_tokens=64
    )
    *_, last = parts
    cells.check_city(last.city)


def error(url: str) -> None:
    try:
        made(url, Mode.TOOLS).create(
            model=cells.NAME,
            messages=[{"role": "user", "content": cells.TOO_LONG}],
            response_model=Weather,
            max_retries=0,
        )
    except Exception as raised:
        cells.check_message(raised, "context length")
        return
    raise AssertionError("a prompt that is too long was answered")


def cancel(url: str) -> None:
    for mode in (Mode.TOOLS, Mode.ANTHROPIC_TOOLS):
        events = made(url, mode).create(
            model=cells.NAME,
            messages=cells.MESSAGES,
            response_model=None,
            max_tokens=1500,
            stream=True,
        )
        next(iter(events))
        events.close()
        cells.wait_until_idle(url)


if __name__ == "__main__":
    modes = {
        f"mode {name}": lambda url, name=name: extract(url, Mode[name])
        for name in (*OPENAI_MODES, *ANTHROPIC_MODES)
    }
    cells.run({"chat": chat, "stream": stream, **modes, "error": error, "cancel": cancel})
