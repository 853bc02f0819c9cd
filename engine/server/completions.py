"""Texts behind prompts: ``POST /v1/completions``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engine.async_engine import AsyncLLMEngine, Reader
from engine.frontend.prompt import Prompt
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import TEXT, Answer, text_logprobs
from engine.server.asked import CompletionRequest
from engine.server.errors import ApiError
from engine.server.streams import together

MAX_PROMPTS = 256


class Completion(Answer):
    """One request for texts."""

    def __init__(self, engine: AsyncLLMEngine, asked: CompletionRequest, model: str) -> None:
        """Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        super().__init__(asked, "text_completion", "cmpl", model)
        refuse_unsupported(asked)
        self._engine = engine
        self._num_logprobs = asked.logprobs
        self._prompts = prompts_of(asked)
        most = 16 if asked.max_tokens is None else asked.max_tokens
        self._params = asked.sampling(max_tokens=most, logprobs=asked.logprobs)
        self._sent: dict[int, int] = defaultdict(int)  # characters, by choice
        if len(self._prompts) == 1 and asked.logprobs is None:
            self.frame = self._frame(b'{"index":0,"text":' + TEXT + b',"logprobs":null')

    async def open(self) -> Reader:
        options = self.asked.options()
        return await self._engine.open(self._prompts[0], self._params, self.name, **options)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        options = self.asked.options()
        sources: list[AsyncGenerator[RequestOutput, None]] = [
            self._engine.generate(prompt, self._params, f"{self.name}-{place}", **options)
            for place, prompt in enumerate(self._prompts)
        ]
        async with aclosing(together(sources)) as outputs:
            async for each in outputs:
                yield each

    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        index = place * self.asked.n + completion.index
        sent = self._sent[index]
        self._sent[index] += len(completion.text)
        return {
            "index": index,
            "text": completion.text,
            "logprobs": text_logprobs(completion, self._num_logprobs or 0, sent),
        }


def refuse_unsupported(asked: CompletionRequest) -> None:
    if asked.echo:
        raise ApiError(400, "echo is not supported yet: leave it out", param="echo")
    if asked.suffix is not None:
        raise ApiError(400, "suffix is not supported: put it into the prompt", param="suffix")
    if asked.best_of not in (None, asked.n):
        raise ApiError(
            400, f"best_of is {asked.best_of}, must be n, which is {asked.n}", param="best_of"
        )


def prompts_of(asked: CompletionRequest) -> list[Prompt]:
    """One or several, as text or as token ids."""
    prompt: Any = asked.prompt
    many: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if len({type(each) for each in many}) > 1:
        raise ApiError(
            400,
            f"prompt is {prompt!r:.80}, must be a text, token ids, or a list of one of these",
            param="prompt",
        )
    if many and isinstance(many[0], int):
        many = [prompt]
    if not 0 < len(many) <= MAX_PROMPTS:
        raise ApiError(
            400, f"prompt has {len(many)} prompts, must have 1 to {MAX_PROMPTS}", param="prompt"
        )
    if asked.cache_salt is None:
        return many
    name = "prompt" if isinstance(many[0], str) else "prompt_token_ids"
    return [{name: each, "cache_salt": asked.cache_salt} for each in many]  # type: ignore[misc]
