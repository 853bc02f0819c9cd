"""Answers to conversations: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from engine.async_engine import AsyncLLMEngine
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import Counted, chat_logprobs, reason_of
from engine.server.asked import ChatRequest
from engine.server.errors import ApiError, as_api_error
from engine.server.streams import DONE, event_of

PARTS = ("text", "input_text")


class Chat:
    """One request for an answer."""

    def __init__(self, engine: AsyncLLMEngine, asked: ChatRequest, model: str) -> None:
        """Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        refuse_unsupported(asked)
        self._asked = asked
        self._num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        self._params = asked.sampling(max_tokens=most, logprobs=self._num_logprobs)
        self._messages = [plain_message(message) for message in asked.messages]
        self._engine = engine
        self._name = f"chatcmpl-{uuid.uuid4().hex}"
        self._head = {
            "id": self._name,
            "object": "chat.completion.chunk" if asked.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
        }
        self._counted = Counted()

    async def whole(self) -> bytes:
        """The answer, when all of it is there."""
        choices: list[dict[str, Any]] = []
        async for output in self._outputs():
            self._counted.add(0, output)
            for each in output.outputs:
                message = {"role": "assistant", "content": each.text, "refusal": None}
                choices.append({**self._choice(each), "message": message})
        choices.sort(key=lambda choice: choice["index"])
        return msgspec.json.encode({**self._head, "choices": choices, "usage": self._counted.usage})

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks as they come. An error that comes before the first is raised, later ones are
        the last event."""
        options, begun = self._asked.stream_options, set[int]()
        try:
            async for output in self._outputs():
                self._counted.add(0, output)
                choices = []
                for each in output.outputs:
                    delta: dict[str, Any] = {"content": each.text}
                    if each.index not in begun:
                        delta = {"role": "assistant", **delta}
                        begun.add(each.index)
                    choices.append({**self._choice(each), "delta": delta})
                yield self._event(choices, has_usage=bool(options and options.continuous_usage_stats))
            if options and options.include_usage:
                yield self._event([], has_usage=True)
        except Exception as error:
            if not begun:
                raise
            yield event_of(as_api_error(error).body())
        yield DONE

    async def _outputs(self) -> AsyncIterator[RequestOutput]:
        asked = self._asked
        variables = dict(asked.chat_template_kwargs or {})
        if asked.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", asked.reasoning_effort)
        prompt = await self._engine.render_chat(
            self._messages, add_generation_prompt=asked.add_generation_prompt, **variables
        )
        if asked.cache_salt is not None:
            prompt["cache_salt"] = asked.cache_salt
        async for output in self._engine.generate(
            prompt, self._params, self._name, **asked.options()
        ):
            yield output

    def _event(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        chunk = {**self._head, "choices": choices}
        if has_usage:
            chunk["usage"] = self._counted.usage
        return event_of(msgspec.json.encode(chunk))

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": completion.index,
            "logprobs": chat_logprobs(completion, self._num_logprobs or 0),
            "finish_reason": reason_of(completion),
            "stop_reason": completion.stop_reason,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice


def refuse_unsupported(asked: ChatRequest) -> None:
    if asked.tools:
        raise ApiError(400, "tools are not supported yet: leave them out", param="tools")
    if asked.tool_choice not in (None, "none", "auto"):
        raise ApiError(
            400, "tool_choice is not supported yet: leave it out", param="tool_choice"
        )
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(
            400,
            f"top_logprobs is {asked.top_logprobs} without logprobs: set logprobs to true",
            param="top_logprobs",
        )
    if not asked.messages:
        raise ApiError(400, "messages is [], must have at least one message", param="messages")


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """With its content as one text. Raises ``ApiError`` for parts that are none."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in PARTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(
                400,
                f"messages has a part of type {kind!r:.40}, which is not supported yet: only "
                "text is",
                param="messages",
            )
    return {**message, "content": "".join(str(part.get("text", "")) for part in content)}
