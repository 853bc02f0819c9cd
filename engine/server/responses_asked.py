"""What ``POST /v1/responses`` may ask, and the conversation that it means."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from engine.server.asked import ChatRequest
from engine.server.conversation import known_role, last_answer, plain_content, plain_message, think
from engine.server.errors import ApiError

MAX_ITEMS = 4096
ROLES = ("user", "assistant", "system", "developer")
Message = dict[str, Any]


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None  # thinking is told whole
    generate_summary: str | None = None
    context: str | None = None  # the chat template decides
    mode: Literal["standard"] | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ObfuscationOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False  # never done


class AccessPrograms(msgspec.Struct, forbid_unknown_fields=True):
    cyber: Literal["standard"] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/responses``."""

    nothing: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_management": ([],),
    }

    called: ClassVar = {
        "grammar": ("text.format", "tools"),
        "logprobs": ("top_logprobs",),
        "max_completion_tokens": ("max_output_tokens",),
        "max_tokens": ("max_output_tokens",),
        "messages": ("input",),
        "prompt": ("input",),
        "prompt_token_ids": ("input",),
        "reasoning_effort": ("reasoning.effort",),
        "response_format": ("text.format", "tools"),
        "structured_outputs": ("text.format", "tools"),
    }
    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool = False
    stream_options: ObfuscationOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    background: bool | None = None
    # of no effect here
    service_tier: str | None = None
    access_programs: AccessPrograms | None = None
    background_options: dict[str, Any] | None = None  # of responses in the background
    image: dict[str, Any] | None = None  # of how images are read
    client_metadata: dict[str, Any] | None = None  # of Codex
    max_tool_calls: int | None = None  # of tools that a server runs
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # vLLM's and ours
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    chat_template_kwargs: dict[str, Any] | None = None


SHARED = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "seed", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "priority",
    "cache_salt", "timeout", "chat_template_kwargs",
)  # fmt: skip


def chat_of(asked: ResponsesRequest, before: list[Message]) -> ChatRequest:
    """The same as a request for chat completions; before: the conversation it goes on. Raises
    ``ApiError``."""
    _refuse(asked)
    messages = list(before)
    if asked.instructions is not None:  # those of an earlier response do not hold any more
        messages.insert(0, {"role": "system", "content": asked.instructions})
    messages += messages_of(asked.input)
    if not messages:
        raise ApiError(400, "input is missing: give it, or instructions", param="input")
    form = None if asked.text is None or asked.text.format is None else asked.text.format
    return ChatRequest(
        messages=messages,
        max_completion_tokens=asked.max_output_tokens,
        reasoning_effort=asked.reasoning.effort if asked.reasoning else None,
        response_format=None if form is None else _format(form),
        tools=[_tool(tool) for tool in asked.tools or []] or None,
        tool_choice=_choice(asked.tool_choice),
        **{name: getattr(asked, name) for name in SHARED},
    )


def messages_of(given: str | list[dict[str, Any]] | None) -> list[Message]:
    """Items as messages: what the model said between two others is one message."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if len(given) > MAX_ITEMS:
        raise ApiError(
            400, f"input has {len(given)} items, the limit is {MAX_ITEMS}", param="input"
        )
    messages: list[Message] = []
    for item in given:
        _add_item(messages, item)
    return messages


def _add_item(messages: list[Message], item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role, content = known_role(item.get("role"), ROLES, "input"), item.get("content")
        if role == "assistant":
            last_answer(messages)["content"] += plain_content(content, "input")
        elif plain := plain_message({"role": role, "content": content}, "input"):
            messages.append(plain)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        last_answer(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = plain_content(item.get("output"), "input")
        call_id = item.get("call_id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind == "reasoning":
        text = plain_content(item.get("content") or item.get("summary") or "", "input")
        if text:
            think(last_answer(messages), text)
    else:
        raise ApiError(
            400,
            f"input has an item of type {kind!r:.40}; message, function_call, "
            "function_call_output and reasoning are supported",
            param="input",
        )


def _refuse(asked: ResponsesRequest) -> None:
    if asked.background:
        raise ApiError(400, "background is not supported: leave it out", param="background")
    if asked.truncation == "auto":
        raise ApiError(
            400, "truncation is auto, which is not supported: use disabled", param="truncation"
        )
    for each in asked.include or []:
        if each not in ("reasoning.encrypted_content", "message.output_text.logprobs"):
            raise ApiError(
                400,
                f"include has {each!r:.60}, which is not supported: leave it out",
                param="include",
            )


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(
            400,
            f"tools has one of type {tool.get('type')!r:.40}, which is not supported: only "
            "function is",
            param="tools",
        )
    about = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": about}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return {"type": "allowed_tools", "allowed_tools": choice}
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
