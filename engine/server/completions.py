"""Texts behind prompts: ``POST /v1/completions``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from engine.async_engine import AsyncLLMEngine
from engine.frontend.prompt import Prompt
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import Answer
from engine.server.asked import CompletionRequest
from engine.server.errors import ApiError
from engine.server.logprobs import TextLogprobs, TokenNames, prompt_logprobs
from engine.server.streams import together

MAX_PROMPTS = 256
MAX_TEXTS = 2048  # of all prompts together


class Completion(Answer):
    """One request for texts."""

    def __init__(self, engine: AsyncLLMEngine, asked: CompletionRequest, model: str) -> None:
        """Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        super().__init__(asked, "text_completion", "cmpl", model)
        refuse_unsupported(asked)
        self._engine = engine
        self._num_logprobs, self._has_echo = asked.logprobs, asked.echo
        self._prompts = prompts_of(asked)
        most = 16 if asked.max_tokens is None else asked.max_tokens
        self._is_echo_alone = asked.echo and most == 0
        # Both are told: as many as the one that asks for more.
        counts = [each for each in (asked.logprobs, asked.prompt_logprobs) if each is not None]
        is_echoed = asked.echo and asked.logprobs is not None
        self._params = asked.sampling(
            max_tokens=1 if self._is_echo_alone else most,
            logprobs=asked.logprobs,
            echoed=max(counts) if is_echoed else None,
        )
        names = TokenNames(engine.tokenizer)
        self._logprobs: dict[int, TextLogprobs] = defaultdict(
            lambda: TextLogprobs(asked.logprobs or 0, names)
        )  # by choice
        self._begun: set[int] = set()  # choices of which something was said
        self._read: dict[int, RequestOutput] = {}  # by place: what is known of the prompt

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        options = self.asked.options()
        if self._has_echo:
            self._prompts = [await self._with_text(prompt) for prompt in self._prompts]
        sources: list[AsyncGenerator[RequestOutput, None]] = [
            self._engine.generate(prompt, self._params, f"{self.name}-{place}", **options)
            for place, prompt in enumerate(self._prompts)
        ]
        async with aclosing(together(sources)) as outputs:
            async for place, output in outputs:
                self._read.setdefault(place, output)
                if self._is_echo_alone:
                    for completion in output.outputs:
                        _forget_text(completion)
                yield place, output

    async def _with_text(self, prompt: Prompt) -> Prompt:
        """A prompt that can be told."""
        if isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        if isinstance(prompt, dict) and "prompt" not in prompt:
            return {**prompt, "prompt": await self._engine.decode(prompt["prompt_token_ids"])}
        return prompt

    def choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        index, read = place * self.asked.n + completion.index, self._read[place]
        choice: dict[str, Any] = {"index": index, "text": completion.text, "logprobs": None}
        is_first = index not in self._begun
        self._begun.add(index)
        token_ids, positions = completion.token_ids, completion.logprobs
        if is_first and self._has_echo:
            choice["text"] = (read.prompt or "") + completion.text
            if positions is not None:
                token_ids = [*read.prompt_token_ids, *token_ids]
                positions = [*(read.prompt_logprobs or []), *positions]  # type: ignore[list-item]
        if positions is not None:
            choice["logprobs"] = self._logprobs[index].of(token_ids, positions)
        if is_first and self.asked.return_token_ids:
            choice["prompt_token_ids"] = read.prompt_token_ids
        if self.asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(read.prompt_logprobs)
        return choice


def _forget_text(completion: CompletionOutput) -> None:
    """Only the prompt was asked for: the token that had to be generated is not told."""
    completion.text, completion.token_ids = "", []
    completion.logprobs = None if completion.logprobs is None else []
    if completion.finish_reason == "stop":
        completion.finish_reason, completion.stop_reason = "length", None


def refuse_unsupported(asked: CompletionRequest) -> None:
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
    if len(many) * asked.n > MAX_TEXTS:
        raise ApiError(
            400,
            f"n is {asked.n} with {len(many)} prompts, the limit is {MAX_TEXTS} texts: ask for "
            "fewer at a time",
            param="n",
        )
    if asked.cache_salt is None:
        return many
    name = "prompt" if isinstance(many[0], str) else "prompt_token_ids"
    return [{name: each, "cache_salt": asked.cache_salt} for each in many]  # type: ignore[misc]
