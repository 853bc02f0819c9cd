"""The body of ``POST /v1/responses``, and its conversion to a chat completion."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from engine.config.near import near_value
from engine.messages.structured import AdditionalProperties, PropertyOrder
from engine.server.bodies import FORMS, ChatRequest
from engine.server.conversation import Message
from engine.server.errors import field_error
from engine.server.responses_items import messages_of
from engine.server.responses_tools import (
    SERVER_TOOLS,
    ResponseTools,
    flat_name,
    is_server_tool,
    tools_in,
)

INCLUDED = (
    "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "message.output_text.logprobs",
    "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results",
)  # fmt: skip
"""Accepted values of ``include``; most concern features that this server does not have."""


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: str | None = None  # no effect: thinking is returned in full
    generate_summary: str | None = None
    context: str | None = None  # the chat template decides
    mode: Literal["standard"] | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ObfuscationOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool = False  # no effect: streams are never obfuscated


class AccessPrograms(msgspec.Struct, forbid_unknown_fields=True):
    cyber: Literal["standard"] | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/responses``."""

    no_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "context_management": ([],),
    }

    client_names: ClassVar = {
        "grammar": ("text.format", "tools"),
        "logprobs": ("top_logprobs",),
        "max_completion_tokens": ("max_output_tokens",),
        "max_tokens": ("max_output_tokens",),
        "messages": ("input",),
        "multi_modal_data": ("input",),
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
    # accepted without effect
    service_tier: str | None = None
    access_programs: AccessPrograms | None = None
    background_options: dict[str, Any] | None = None
    image: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None  # sent by Codex
    max_tool_calls: int | None = None  # limits only tools that the server runs
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
    additional_properties: AdditionalProperties | None = None
    property_order: PropertyOrder | None = None
    chat_template_kwargs: dict[str, Any] | None = None


OWN_TOOLS = ("function", "custom")
"""Types of tools that a client runs."""
SHARED = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "seed", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop", "stop_token_ids", "priority",
    "cache_salt", "timeout", "additional_properties", "property_order", "chat_template_kwargs",
)  # fmt: skip


def chat_of(
    body: ResponsesRequest, before: list[Message], tools: ResponseTools | None = None
) -> ChatRequest:
    """Convert the request to a chat completion. before: messages of the conversation that it
    continues; tools: ``tools_of(body)``, if already computed. Raises ``ApiError``."""
    tools = tools or tools_of(body)
    _refuse(body)
    messages = list(before)
    if body.instructions is not None:  # instructions of the earlier response are not continued
        messages.insert(0, {"role": "system", "content": body.instructions})
    messages += messages_of(body.input)
    if not messages:
        raise field_error("input", "is missing: add it, or instructions")
    form = None if body.text is None or body.text.format is None else body.text.format
    return ChatRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=None if form is None else _format(form),
        tools=tools.described or None,
        tool_choice=_choice(body.tool_choice, tools),
        **{name: getattr(body, name) for name in SHARED},
    )


def tools_of(body: ResponsesRequest) -> ResponseTools:
    """Collect the tools in a request's fields ``tools`` and ``input``. Raises ``ApiError``."""
    return ResponseTools([*(body.tools or []), *tools_in(body.input)])


def _refuse(body: ResponsesRequest) -> None:
    if body.background:
        raise field_error("background", "is true, which is not supported: leave it out")
    if body.truncation == "auto":
        raise field_error("truncation", "is auto, which is not supported: use disabled")
    for each in body.include or []:
        if each not in INCLUDED:
            raise field_error("include", f"has {each!r:.60}, must have only: {', '.join(INCLUDED)}")


def _choice(
    choice: str | dict[str, Any] | None, tools: ResponseTools
) -> str | dict[str, Any] | None:
    """Convert ``tool_choice`` to that of chat completions. Raises ``ApiError``."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        given = choice.get("tools")
        listed = [_listed(each) for each in given] if isinstance(given, list) else []
        kept = [each for each in listed if each["name"] is not None]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": kept}}
    if is_server_tool(kind, SERVER_TOOLS):
        raise field_error(
            "tool_choice",
            f"has type {kind!r:.40}, which the server would have to run and cannot: "
            "choose a function, a custom tool, auto or none",
        )
    if kind not in OWN_TOOLS:
        raise field_error(
            "tool_choice",
            f"has type {kind!r:.40}, must be {', '.join(OWN_TOOLS)} or allowed_tools"
            f"{near_value(kind, OWN_TOOLS)}",
        )
    if not tools.described:
        raise field_error(
            "tool_choice", f"is {choice!r:.80} without tools: add tools, or leave it out"
        )
    return {"type": kind, "function": _listed(choice)}


def _listed(each: Any) -> dict[str, Any]:
    """Return ``{"name": ...}`` for a tool in ``tool_choice``: the name that the model reads,
    ``None`` for a tool that the client does not run."""
    if not isinstance(each, dict) or is_server_tool(each.get("type"), SERVER_TOOLS):
        return {"name": None}
    return {"name": flat_name(each.get("name"), each.get("namespace"))}


def _format(form: dict[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind in ("text", "json_object"):
        return form
    if kind != "json_schema" or not isinstance(form.get("schema"), dict):
        raise field_error(
            "text.format",
            f"is {form!r:.80}, must have type text, json_object, or json_schema with "
            f"a schema{'' if kind in FORMS else near_value(kind, FORMS)}",
        )
    return {"type": kind, "json_schema": {k: v for k, v in form.items() if k != "type"}}
