"""Prompts that are not only a conversation, and conversations that are cut to a context."""

from __future__ import annotations

from typing import Protocol

import msgspec

from engine.errors import PromptTooLongError
from engine.frontend.encoding import TextPrompt
from engine.frontend.streams import OutputReader
from engine.messages.requests import RequestOutput
from engine.server.bodies import ChatRequest
from engine.server.dialogue import AnswerPiece, ChatGeneration, LoadedChatModel
from engine.server.errors import field_error
from engine.server.speech.answer import PlainAnswer


class Generation(Protocol):
    """The generation for one request, with one sequence."""

    async def prompt(self) -> TextPrompt:
        """The prompt with its token ids. Raises ``RequestError``."""

    async def token_ids(self) -> list[int]:
        """The token ids of the prompt, with those of pictures. Raises ``RequestError``."""

    async def open(self, name: str) -> OutputReader:
        """Add the request to the engine under the id ``name``."""

    def read(self, output: RequestOutput) -> list[AnswerPiece]:
        """Parse an output of the engine; returns the new part of the sequence."""


class RawGeneration:
    """The continuation of a text, without a template."""

    def __init__(self, loaded: LoadedChatModel, body: ChatRequest, text: str) -> None:
        """body: everything but the prompt. Raises ``RequestError`` or ``ApiError`` for a field
        whose value is not supported."""
        self._engine = loaded.model.engine
        self._body = body
        self._text = text
        self._answer = PlainAnswer()
        body.fill(self._engine.recommended)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        self._params = body.sampling(max_tokens=body.max_completion_tokens, logprobs=num_logprobs)

    async def prompt(self) -> TextPrompt:
        ids = await self._engine.tokenize(self._text)
        prompt = TextPrompt(prompt=self._text, prompt_token_ids=ids)
        if self._body.cache_salt is not None:
            prompt["cache_salt"] = self._body.cache_salt
        return prompt

    async def token_ids(self) -> list[int]:
        return (await self.prompt())["prompt_token_ids"]

    async def open(self, name: str) -> OutputReader:
        prompt, options = await self.prompt(), self._body.options()
        return await self._engine.open(prompt, self._params, name, **options)

    def read(self, output: RequestOutput) -> list[AnswerPiece]:
        (completion,) = output.outputs
        events = self._answer.read(completion)
        return [AnswerPiece(completion, events, self._answer, output)]


class ContinuedGeneration(ChatGeneration):
    """A conversation after token ids of an earlier one."""

    def __init__(self, loaded: LoadedChatModel, body: ChatRequest, context: list[int]) -> None:
        """context: of an answer of this model. Raises ``ApiError`` for ids that it does not have,
        and as ``ChatGeneration`` does."""
        super().__init__(loaded, body)
        tokenizer = loaded.model.engine.get_tokenizer()
        if loaded.model.engine.pictures.has_placeholders(context):
            raise field_error(
                "context",
                "is from an answer about pictures, and token ids do not contain them: leave it out "
                "and send the pictures again, or send the conversation to /api/chat",
            )
        for token_id in context:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise field_error(
                    "context",
                    f"has {token_id}, must have ids from 0 to {tokenizer.vocab_size - 1}: send "
                    "that of an answer of this model",
                )
        self._context = context
        self._begin = tokenizer.bos_token_id

    async def _render(self) -> TextPrompt:
        prompt = await super()._render()
        ids = prompt["prompt_token_ids"]
        if self._context and ids[:1] == [self._begin]:
            ids = ids[1:]
        return {**prompt, "prompt_token_ids": [*self._context, *ids]}


async def fitted(
    loaded: LoadedChatModel, body: ChatRequest, whole: ChatGeneration, most: int
) -> ChatGeneration:
    """The generation for a conversation without its oldest messages, as many as needed for a prompt
    of at most ``most`` tokens. System messages and the last message stay, whatever they need.
    whole: the generation for all messages."""
    low, high = 1, len(body.messages) - 1  # where the messages that stay begin
    if high < low or await _fits(whole, most):
        return whole
    made: dict[int, ChatGeneration] = {}
    while low < high:
        begin = (low + high) // 2
        made[begin] = _without_first(loaded, body, begin)
        if await _fits(made[begin], most):
            high = begin
        else:
            low = begin + 1
    return made.get(low) or _without_first(loaded, body, low)


def _without_first(loaded: LoadedChatModel, body: ChatRequest, begin: int) -> ChatGeneration:
    kept = [
        message
        for place, message in enumerate(body.messages)
        if place >= begin or message["role"] == "system"
    ]
    return ChatGeneration(loaded, msgspec.structs.replace(body, messages=kept))


async def _fits(generation: ChatGeneration, most: int) -> bool:
    try:
        return len(await generation.token_ids()) <= most
    except PromptTooLongError:
        return False
