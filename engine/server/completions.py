"""Texts behind prompts: ``POST /v1/completions``."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from engine.async_engine import AsyncLLMEngine
from engine.frontend.prompt import Prompt
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import Counted, reason_of, text_logprobs
from engine.server.asked import CompletionRequest
from engine.server.errors import ApiError, as_api_error
from engine.server.streams import DONE, event_of, together

MAX_PROMPTS = 256


class Completion:
    """One request for texts."""

    def __init__(self, engine: AsyncLLMEngine, asked: CompletionRequest, model: str) -> None:
        """Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        refuse_unsupported(asked)
        self._asked = asked
        self._prompts = prompts_of(asked)
        self._params = asked.sampling(
            max_tokens=16 if asked.max_tokens is None else asked.max_tokens,
            logprobs=asked.logprobs,
        )
        self._engine = engine
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._counted = Counted()
        self._sent: dict[int, int] = defaultdict(int)  # characters, by choice

    async def whole(self) -> bytes:
        """The answer, when all of it is there."""
        choices: list[dict[str, Any]] = []
        async for place, output in self._outputs():
            self._counted.add(place, output)
            choices += [self._choice(place, each) for each in output.outputs]
        choices.sort(key=lambda choice: choice["index"])
        return msgspec.json.encode(
            {**self._head, "choices": choices, "usage": self._counted.usage}
        )

    async def events(self) -> AsyncIterator[bytes]:
        """Chunks as they come. An error that comes before the first is raised, later ones are
        the last event."""
        options, is_begun = self._asked.stream_options, False
        try:
            async for place, output in self._outputs():
                self._counted.add(place, output)
                choices = [self._choice(place, each) for each in output.outputs]
                is_begun = True
                yield self._event(choices, has_usage=bool(options and options.continuous_usage_stats))
            if options and options.include_usage:
                yield self._event([], has_usage=True)
        except Exception as error:
            if not is_begun:
                raise
            yield event_of(as_api_error(error).body())
        yield DONE

    async def _outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        asked, name = self._asked, self._head["id"]
        sources: list[AsyncIterator[RequestOutput]] = [
            self._engine.generate(prompt, self._params, f"{name}-{place}", **asked.options())
            for place, prompt in enumerate(self._prompts)
        ]
        async for each in together(sources):
            yield each

    def _event(self, choices: list[dict[str, Any]], *, has_usage: bool) -> bytes:
        chunk = {**self._head, "choices": choices}
        if has_usage:
            chunk["usage"] = self._counted.usage
        return event_of(msgspec.json.encode(chunk))

    def _choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        index = place * self._asked.n + completion.index
        choice: dict[str, Any] = {
            "index": index,
            "text": completion.text,
            "logprobs": text_logprobs(completion, self._asked.logprobs or 0, self._sent[index]),
            "finish_reason": reason_of(completion),
            "stop_reason": completion.stop_reason,
        }
        if self._asked.return_token_ids:
            choice["token_ids"] = completion.token_ids
        self._sent[index] += len(completion.text)
        return choice


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
    many: list[Any] = [prompt]
    if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
        many = prompt
    if not 0 < len(many) <= MAX_PROMPTS:
        raise ApiError(
            400, f"prompt has {len(many)} prompts, must have 1 to {MAX_PROMPTS}", param="prompt"
        )
    if asked.cache_salt is None:
        return many
    name = "prompt" if isinstance(many[0], str) else "prompt_token_ids"
    return [{name: each, "cache_salt": asked.cache_salt} for each in many]  # type: ignore[misc]
