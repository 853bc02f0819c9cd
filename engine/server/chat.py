"""Answers to conversations: ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engine.async_engine import AsyncLLMEngine, Reader
from engine.frontend.prompt import TextPrompt
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import TEXT, Answer, chat_logprobs
from engine.server.asked import ChatRequest
from engine.server.errors import ApiError

PARTS = ("text", "input_text")
OWN_FIELDS = ("add_generation_prompt", "chat_template", "messages", "tools")


class Chat(Answer):
    """One request for an answer."""

    def __init__(self, engine: AsyncLLMEngine, asked: ChatRequest, model: str) -> None:
        """Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        super().__init__(asked, kind, "chatcmpl", model)
        refuse_unsupported(asked)
        self._engine = engine
        self._num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        limits = (asked.max_completion_tokens, asked.max_tokens)
        most = next((limit for limit in limits if limit is not None), None)
        self._params = asked.sampling(max_tokens=most, logprobs=self._num_logprobs)
        self._messages = [plain_message(message) for message in asked.messages]
        self._variables = dict(asked.chat_template_kwargs or {})
        if asked.reasoning_effort is not None:
            self._variables.setdefault("reasoning_effort", asked.reasoning_effort)
        self._variables["add_generation_prompt"] = asked.add_generation_prompt
        self._begun: set[int] = set()  # sequences of which something was said
        if not asked.logprobs:
            self.frame = self._frame(
                b'{"index":0,"delta":{"content":' + TEXT + b'},"logprobs":null'
            )

    async def open(self) -> Reader:
        prompt = await self._prompt()
        return await self._engine.open(prompt, self._params, self.name, **self.asked.options())

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt = await self._prompt()
        options = self.asked.options()
        source = self._engine.generate(prompt, self._params, self.name, **options)
        async with aclosing(source) as outputs:
            async for output in outputs:
                yield 0, output

    async def _prompt(self) -> TextPrompt:
        prompt = await self._engine.render_chat(self._messages, **self._variables)
        if self.asked.cache_salt is not None:
            prompt["cache_salt"] = self.asked.cache_salt
        return prompt

    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(completion, self._num_logprobs or 0)
        said = {"content": completion.text}
        if not self.asked.stream:
            return {"message": {"role": "assistant", **said, "refusal": None}, "logprobs": logprobs}
        if completion.index not in self._begun:
            self._begun.add(completion.index)
            said = {"role": "assistant", **said}
        return {"delta": said, "logprobs": logprobs}


def refuse_unsupported(asked: ChatRequest) -> None:
    if asked.tools:
        raise ApiError(400, "tools are not supported yet: leave them out", param="tools")
    if asked.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice is not supported yet: leave it out", param="tool_choice")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(
            400,
            f"top_logprobs is {asked.top_logprobs} without logprobs: set logprobs to true",
            param="top_logprobs",
        )
    if wrong := sorted({*OWN_FIELDS} & {*(asked.chat_template_kwargs or {})}):
        raise ApiError(
            400,
            f"chat_template_kwargs has {wrong[0]}, no variable of a template: leave it out",
            param="chat_template_kwargs",
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
