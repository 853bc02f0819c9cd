"""Bodies of Ollama's requests, and the chat completions that they mean."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from engine.config.near import near_value
from engine.server.bodies import ChatRequest, QueuedBody
from engine.server.errors import field_error
from engine.server.ollama.options import CLIENT_NAMES, Options, sampling_of
from engine.server.ollama.turns import messages_of, with_images

LEVELS = ("low", "medium", "high", "max")
"""Levels of thinking, for models that have several."""
QUEUED = QueuedBody.__struct_fields__
KeepAlive = float | str | None
"""Has no effect: the model is loaded as long as the server runs."""


class OllamaBody(QueuedBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests that a core computes."""

    model: str
    values: Options | None = msgspec.field(default=None, name="options")
    keep_alive: KeepAlive = None
    truncate: bool = True


class GeneratingBody(OllamaBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests for text."""

    no_effect: ClassVar[dict[str, tuple[Any, ...]]] = {"_debug_render_only": (False,)}

    stream: bool = True
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    shift: bool = True  # without an effect: an answer ends where the context does


class ChatBody(GeneratingBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/chat``."""

    client_names: ClassVar = {
        **CLIENT_NAMES,
        "chat_template_kwargs": ("think",),
        "grammar": ("format", "tools"),
        "logprobs": ("top_logprobs", "logprobs"),
        "multi_modal_data": ("messages",),
        "prompt": ("messages",),
        "prompt_token_ids": ("messages",),
        "response_format": ("format",),
        "structured_outputs": ("format",),
        "truncate_prompt_tokens": ("truncate",),
    }

    messages: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tools: list[dict[str, Any]] | None = None


class GenerateBody(GeneratingBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/generate``."""

    no_effect: ClassVar = {
        **GeneratingBody.no_effect,
        "height": (0,),
        "steps": (0,),
        "width": (0,),
    }
    client_names: ClassVar = {
        **ChatBody.client_names,
        "grammar": ("format",),
        "messages": ("prompt",),
        "multi_modal_data": ("images",),
        "prompt": ("prompt",),
        "prompt_token_ids": ("context", "prompt"),
    }

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    template: str = ""
    context: list[int] | None = None
    raw: bool = False
    images: list[Any] | None = None


class EmbedBody(OllamaBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/embed``."""

    client_names: ClassVar = CLIENT_NAMES

    input: str | list[str]
    dimensions: int | None = None


class EmbeddingsBody(OllamaBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/embeddings``, Ollama's older form."""

    client_names: ClassVar = {**CLIENT_NAMES, "input": ("prompt",)}

    prompt: str = ""


class ShowBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /api/show``."""

    model: str = ""
    name: str = ""  # the older name of the field
    # without an effect
    verbose: bool = False
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


def chat_of(body: ChatBody, num_kept: int) -> ChatRequest:
    """Convert the request to a chat completion. num_kept: most tokens of the prompt. Raises
    ``ApiError``."""
    messages = messages_of(body.messages)
    last = messages[-1]
    return ChatRequest(
        messages=messages,
        tools=body.tools or None,
        continue_final_message=last["role"] == "assistant" and not last.get("tool_calls"),
        **_shared(body, None if any(each.get("images") for each in body.messages) else num_kept),
    )


def chat_of_prompt(body: GenerateBody, num_kept: int) -> ChatRequest:
    """Convert the request to a chat completion, whose only message a raw prompt does not need.
    num_kept: most tokens of the prompt. Raises ``ApiError``."""
    if body.suffix:
        raise field_error("suffix", f"is {body.suffix!r:.80}, not supported: leave it out")
    if body.template:
        raise field_error(
            "template",
            "is not supported: send the whole prompt with raw, or start the server with "
            "--chat-template FILE",
        )
    for name in ("system", "context", "images"):
        if body.raw and getattr(body, name):
            raise field_error(name, "is given with raw, which has only a prompt: leave one out")
    content: Any = body.prompt
    if body.images:
        content = with_images(body.prompt, body.images, "images")
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return ChatRequest(messages=messages, **_shared(body, None if body.images else num_kept))


def check_alone(body: GeneratingBody) -> None:
    """Check the other fields of a request without a prompt. Raises ``RequestError`` or
    ``ApiError``."""
    chat = ChatRequest(messages=[], **_shared(body, 1))
    chat.sampling(max_tokens=chat.max_completion_tokens, logprobs=None)


def _shared(body: GeneratingBody, num_kept: int | None) -> dict[str, Any]:
    """num_kept: ``None`` for a prompt with pictures, which cannot be cut."""
    variables: dict[str, Any] = {}
    if isinstance(body.think, bool):
        variables["enable_thinking"] = body.think
    elif body.think is not None:
        if body.think not in LEVELS:
            raise field_error(
                "think",
                f"is {body.think!r:.40}, must be true, false, or one of: {', '.join(LEVELS)}"
                f"{near_value(body.think, LEVELS)}",
            )
        variables = {"enable_thinking": True, "reasoning_effort": body.think}
    return {
        **{name: getattr(body, name) for name in (*QUEUED, "model", "stream", "logprobs")},
        **sampling_of(body.values),
        "top_logprobs": body.top_logprobs,
        "chat_template_kwargs": variables or None,
        "response_format": _format_of(body.format),
        "truncate_prompt_tokens": num_kept if body.truncate else None,
    }


def _format_of(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not form:
        return None
    if isinstance(form, dict):
        return {"type": "json_schema", "json_schema": {"schema": form}}
    kinds: tuple[Literal["json"], ...] = ("json",)
    if form not in kinds:
        raise field_error(
            "format", f"is {form!r:.40}, must be json or a JSON schema{near_value(form, kinds)}"
        )
    return {"type": "json_object"}
