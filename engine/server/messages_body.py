"""The body of Anthropic's ``POST /v1/messages``, and its conversion to a chat completion."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from engine.config.near import near_value
from engine.messages.structured import AdditionalProperties, PropertyOrder
from engine.server.bodies import ChatRequest
from engine.server.conversation import known_role, last_answer, system_text, text_of, think
from engine.server.errors import ApiError, field_error
from engine.server.picture_parts import Part, joined_parts
from engine.server.responses_tools import is_server_tool
from engine.server.speech.tools import CHOICES

Message = dict[str, Any]
ROLES = ("user", "assistant", "system")
SERVER_TOOLS = (
    "advisor", "code_execution", "mcp_toolset", "tool_search_tool_bm25", "tool_search_tool_regex",
    "web_fetch", "web_search",
)  # fmt: skip
"""Types of tools that the server would have to run. Most have a date at the end."""
SERVER_BLOCKS = (
    "advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result",
    "compaction", "container_upload", "fallback", "mcp_tool_listing", "redacted_thinking",
    "server_tool_use", "text_editor_code_execution_tool_result", "tool_addition", "tool_removal",
    "tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result",
)  # fmt: skip
"""Blocks about what a server did. They have no text for the model and are left out."""
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
assert set(TOOL_CHOICES.values()) == set(CHOICES)
THINKING = ("enabled", "disabled", "adaptive")
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


OUTPUT_FIELDS = ("output_format", "output_config", "tools")


class MessagesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/messages`` and of ``count_tokens``, which needs no ``max_tokens``."""

    no_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "fallbacks": ([],),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }

    client_names: ClassVar = {
        "grammar": OUTPUT_FIELDS,
        "max_completion_tokens": ("max_tokens",),
        "multi_modal_data": ("messages",),
        "parallel_tool_calls": ("tool_choice",),
        "prompt": ("messages",),
        "prompt_token_ids": ("messages",),
        "response_format": OUTPUT_FIELDS,
        "stop": ("stop_sequences",),
        "structured_outputs": OUTPUT_FIELDS,
        "user": ("metadata",),
    }
    model: str
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    # accepted without effect; prefixes are always cached
    cache_control: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None
    context_management: dict[str, Any] | None = None
    betas: list[str] | None = None
    billing_policy: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    # vLLM's and ours
    seed: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    timeout: float | None = None
    additional_properties: AdditionalProperties | None = None
    property_order: PropertyOrder | None = None
    chat_template_kwargs: dict[str, Any] | None = None


SHARED = (
    "model", "stream", "temperature", "top_p", "seed", "ignore_eos", "priority", "cache_salt",
    "timeout", "additional_properties", "property_order",
)  # fmt: skip


def chat_of(body: MessagesRequest) -> ChatRequest:
    """Convert the request to a chat completion. Raises ``ApiError``."""
    if not body.messages:
        raise field_error("messages", "is [], must have at least one message")
    messages = messages_of(body)
    choice, is_single = _choice(body.tool_choice, has_tools=bool(body.tools))
    user = (body.metadata or {}).get("user_id")
    return ChatRequest(
        messages=messages,
        continue_final_message=is_begun(messages),
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        top_k=body.top_k,
        tools=tools_of(body) or None,
        tool_choice=choice,
        parallel_tool_calls=False if is_single else None,
        response_format=_format(body),
        user=user if isinstance(user, str) else None,
        chat_template_kwargs={**_thinking(body.thinking), **(body.chat_template_kwargs or {})},
        **{name: getattr(body, name) for name in SHARED},
    )


def messages_of(body: MessagesRequest) -> list[Message]:
    """Convert the messages to OpenAI's format, where each tool result is a message."""
    messages: list[Message] = []
    if body.system:
        messages += _of_system(body.system, "system")
    for message in body.messages:
        role, content = known_role(message.get("role"), ROLES, "messages"), message.get("content")
        if role == "system":
            messages += _of_system(content, "messages")
        elif isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif isinstance(content, list):
            messages += _of_assistant(content) if role == "assistant" else _of_user(content)
        else:
            raise field_error(
                "messages", f"has a content {content!r:.80}, must be a text or a list of blocks"
            )
    return messages


def is_begun(messages: list[Message]) -> bool:
    """Whether the last message is the assistant's, so that the answer continues it. Raises
    ``ApiError`` if that message ends with white space."""
    last = messages[-1]
    if last["role"] != "assistant":
        return False
    if last["content"] != last["content"].rstrip():
        raise field_error(
            "messages",
            f"ends with an assistant message whose text ends with white space "
            f"({last['content'][-20:]!r}), which a model cannot continue well: remove it",
        )
    return True


def _of_system(content: Any, param: str) -> list[Message]:
    """Convert Anthropic's system text to a system message; [] if the text is empty."""
    _check_text(content, param)
    text = system_text(content, param, between="\n")
    return [{"role": "system", "content": text}] if text else []


def _of_user(blocks: list[Any]) -> list[Message]:
    results: list[Message] = []
    shown: list[str | Part] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else block
        if kind == "text":
            shown.append(text_of(block, "text", "messages"))
        elif kind == "image":
            shown.append(_picture_of(block))
        elif kind == "tool_result":
            results.append(_result_of(block))
        elif kind not in SERVER_BLOCKS:
            raise _unsupported(kind)
    spoken = [{"role": "user", "content": joined_parts(shown, "\n")}]
    return [*results, *spoken] if shown or not results else results


def _result_of(block: dict[str, Any]) -> Message:
    content = block.get("content") or ""
    parts: list[str | Part] = ["Error: "] if block.get("is_error") is True else []
    if isinstance(content, list):
        begin, parts = "".join(map(str, parts)), []
        for each in content:
            if isinstance(each, dict) and each.get("type") == "image":
                parts.append(_picture_of(each))
            else:
                _check_text([each], "messages")
                parts.append(text_of(each, "text", "messages"))
        if begin:
            is_text = bool(parts) and isinstance(parts[0], str)
            parts = [f"{begin}{parts[0] if is_text else ''}", *parts[int(is_text) :]]
        shown = joined_parts(parts, "\n")
    else:
        _check_text(content, "messages")
        shown = joined_parts([*parts, content])
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}


def _picture_of(block: dict[str, Any]) -> Part:
    """A block with a picture as a part of a chat completion. Raises ``ApiError``."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else source
    if isinstance(source, dict) and kind == "url":
        url = text_of(source, "url", "messages")
    elif isinstance(source, dict) and kind == "base64":
        if source.get("media_type") not in MEDIA_TYPES:
            raise field_error(
                "messages",
                f"has an image with media_type {source.get('media_type')!r:.40}, must be one of: "
                f"{', '.join(MEDIA_TYPES)}",
            )
        url = f"data:{source['media_type']};base64,{text_of(source, 'data', 'messages')}"
    elif isinstance(source, dict) and kind == "file":
        raise field_error(
            "messages",
            f"has an image with file_id {source.get('file_id')!r:.40}, and this server stores no "
            "files: send the image in base64",
        )
    else:
        raise field_error(
            "messages", f"has an image with source {kind!r:.40}, must have type base64 or url"
        )
    return {"type": "image_url", "image_url": {"url": url}}


def _of_assistant(blocks: list[Any]) -> list[Message]:
    messages: list[Message] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else block
        if kind == "text":
            last_answer(messages)["content"] += text_of(block, "text", "messages")
        elif kind == "thinking":
            think(last_answer(messages), text_of(block, "thinking", "messages"))
        elif kind in ("tool_use", "mcp_tool_use"):
            name = text_of(block, "name", "messages")
            function = {"name": name, "arguments": block.get("input") or {}}
            call = {"id": block.get("id"), "type": "function", "function": function}
            last_answer(messages).setdefault("tool_calls", []).append(call)
        elif kind == "mcp_tool_result":
            messages.append(_result_of(block))
        elif kind not in SERVER_BLOCKS:
            raise _unsupported(kind)
    return messages or [{"role": "assistant", "content": ""}]


def _check_text(content: Any, param: str) -> None:
    """Raise ``ApiError`` if the content is neither a string nor a list of text blocks."""
    if isinstance(content, list):
        for block in content:
            kind = block.get("type") if isinstance(block, dict) else block
            if not isinstance(block, dict) or kind != "text":
                raise _unsupported(kind, param)
    elif not isinstance(content, str):
        raise field_error(
            param, f"has a content {content!r:.40}, must be a text or a list of blocks"
        )


def tools_of(body: MessagesRequest) -> list[dict[str, Any]]:
    """The request's tools that the client runs, in OpenAI's format."""
    given = body.tools or []
    return [tool_of(each) for each in given if not is_server_tool(each.get("type"), SERVER_TOOLS)]


def left_out_of(body: MessagesRequest) -> tuple[str, ...]:
    """Types of the request's tools that are left out, because the server would have to run them."""
    kinds = [tool.get("type") for tool in body.tools or []]
    return tuple(str(kind) for kind in kinds if is_server_tool(kind, SERVER_TOOLS))


def tool_of(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool to OpenAI's format. Raises ``ApiError`` for Anthropic's built-in types."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise field_error(
            "tools",
            f"has one of type {kind!r:.40}, which is not supported: use type custom with an "
            "input_schema",
        )
    schema = tool.get("input_schema")
    if schema is not None and (
        not isinstance(schema, dict) or schema.get("type", "object") != "object"
    ):
        raise field_error(
            "tools",
            f"has {tool.get('name')!r:.80} with input_schema {schema!r:.80}, must be a JSON "
            "schema of type object",
        )
    function = {"name": tool.get("name"), "parameters": schema}
    kept = {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": {**function, **kept}}


def _choice(choice: dict[str, Any] | None, *, has_tools: bool) -> tuple[Any, bool]:
    """``tool_choice`` in OpenAI's format, and whether the answer may have at most one tool call."""
    if choice is None:
        return None, False
    kind, is_single = choice.get("type"), choice.get("disable_parallel_tool_use") is True
    if kind in ("any", "tool") and not has_tools:
        raise field_error(
            "tool_choice", f"has type {kind!r} without tools: add tools, or leave it out"
        )
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, True
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise field_error(
            "tool_choice",
            f"has type {kind!r:.40}, must be auto, any, tool or none"
            f"{near_value(kind, (*TOOL_CHOICES, 'tool'))}",
        )
    return TOOL_CHOICES[kind], is_single


def _thinking(thinking: dict[str, Any] | None) -> dict[str, Any]:
    """The chat template's variable that turns thinking on or off (off by default)."""
    kind = "disabled" if thinking is None else thinking.get("type")
    if kind not in THINKING:
        raise field_error(
            "thinking",
            f"has type {kind!r:.40}, must be enabled, adaptive or disabled"
            f"{near_value(kind, THINKING)}",
        )
    return {"enable_thinking": kind != "disabled"}


def _format(body: MessagesRequest) -> dict[str, Any] | None:
    form = body.output_format or (body.output_config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise field_error("output_config", f"has a format {form!r:.40}, must be an object")
    kind, schema = form.get("type"), form.get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        name = "output_format" if body.output_format else "output_config"
        raise field_error(
            name, f"has a format {form!r:.80}, must have type json_schema and a schema"
        )
    return {"type": kind, "json_schema": {"schema": schema}}


def _unsupported(kind: Any, param: str = "messages") -> ApiError:
    return field_error(
        param,
        f"has a block of type {kind!r:.40}, which is not supported: use text, image, thinking, "
        "tool_use or tool_result",
    )
