"""Completions of prompts: ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from engine.async_engine import AsyncLLMEngine
from engine.frontend.encoding import Prompt
from engine.frontend.streams import OutputReader
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.server.answers import TEXT, Frame, OpenAIAnswer, reason_of
from engine.server.bodies import CompletionRequest, copies
from engine.server.errors import field_error, log_unforeseen
from engine.server.logprobs import TextLogprobs, TokenNames, prompt_logprobs
from engine.server.offsets import TextOffsets
from engine.server.streams import together

MAX_PROMPTS = 256
MAX_TOKENS = 16  # OpenAI's default for max_tokens
MAX_TEXTS = 2048  # n times the number of prompts


class Completion(OpenAIAnswer):
    """One completion request: ``n`` texts for each prompt."""

    def __init__(self, engine: AsyncLLMEngine, body: CompletionRequest, model: str) -> None:
        """Raises ``RequestError`` or ``ApiError`` for a field whose value is not supported."""
        super().__init__(body, "text_completion", "cmpl", model)
        refuse_unsupported(body)
        if body.max_tokens is None:
            body.max_tokens = min(MAX_TOKENS, engine.recommended.get("max_tokens", MAX_TOKENS))
        body.fill(engine.recommended)
        self._engine = engine
        self._num_logprobs, self._has_echo = body.logprobs, body.echo
        self._prompts = prompts_of(body)
        self._is_echo_alone = body.echo and body.max_tokens == 0
        # The prompt's log-probabilities are computed once, for the larger of the two counts.
        counts = [each for each in (body.logprobs, body.prompt_logprobs) if each is not None]
        is_echoed = body.echo and body.logprobs is not None
        self._params = body.sampling(
            max_tokens=1 if self._is_echo_alone else body.max_tokens,
            logprobs=body.logprobs,
            echoed=max(counts) if is_echoed else None,
        )
        self._names = TokenNames(engine.tokenizer)
        self._logprobs: dict[int, TextLogprobs] = {}  # by choice
        self._text_frame: Frame | None = None
        self._begun: set[int] = set()  # choices of which a part was returned
        self._first: dict[
            int, RequestOutput
        ] = {}  # first output of each prompt, which describes it

    @property
    def is_one(self) -> bool:
        """Whether the request has only one prompt."""
        return len(self._prompts) == 1

    async def whole(self) -> bytes:
        choices: list[dict[str, Any]] = []
        async with aclosing(self._outputs()) as outputs:
            async for place, output in outputs:
                choices += self._choices(place, output)
        choices.sort(key=lambda choice: int(choice["index"]))
        return self._encoded(choices, has_usage=True)

    async def open(self) -> OutputReader:
        if self._num_logprobs is None and not self._has_echo:
            self._text_frame = self._frame(b'{"index":0,"text":' + TEXT + b',"logprobs":null')
        return await self._open(0)

    def events_of(self, output: RequestOutput) -> bytes:
        frame = self._text_frame
        if frame is None or output.finished or not self._begun:
            return self._chunk(self._choices(0, output))
        (completion,) = output.outputs
        self._counted.num_written += len(completion.token_ids)
        return frame.before + msgspec.json.encode(completion.text) + frame.after

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the stream's server-sent events. Errors after the first one become events."""
        is_begun = False
        try:
            async with aclosing(self._outputs()) as outputs:
                async for place, output in outputs:
                    chunk = self._chunk(self._choices(place, output))
                    is_begun = True
                    yield chunk
            yield self.end()
        except Exception as error:
            if not is_begun:
                raise
            log_unforeseen(error)
            yield self.failure(error)

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        sources = [self._source(place) for place in range(len(self._prompts))]
        async with aclosing(together(sources)) as outputs:
            async for place, output in outputs:
                yield place, output

    async def _source(self, place: int) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing((await self._open(place)).outputs()) as outputs:
            async for output in outputs:
                yield output

    async def _open(self, place: int) -> OutputReader:
        prompt = self._prompts[place]
        if self._has_echo:
            prompt = await self._with_text(prompt)
        name, options = f"{self.name}-{place}", self.body.options()
        return await self._engine.open(prompt, self._params, name, **options)

    def _choices(self, place: int, output: RequestOutput) -> list[dict[str, Any]]:
        self._first.setdefault(place, output)
        self._note_transfer(output)
        if self._is_echo_alone:
            for completion in output.outputs:
                _forget_text(completion)
        texts = copies(output.outputs, self.body.n if self._params.n == 1 else 1)
        self._counted.add(place, output, texts)
        return [self._choice(place, each) for each in texts]

    async def _with_text(self, prompt: Prompt) -> Prompt:
        """The prompt with its text, which is decoded from token ids if necessary."""
        if isinstance(prompt, list):
            prompt = {"prompt_token_ids": prompt}
        if isinstance(prompt, dict) and "prompt" not in prompt:
            return {**prompt, "prompt": await self._engine.detokenize(prompt["prompt_token_ids"])}
        return prompt

    def _choice(self, place: int, completion: CompletionOutput) -> dict[str, Any]:
        index, first = place * self.body.n + completion.index, self._first[place]
        choice: dict[str, Any] = {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": reason_of(completion),
            "stop_reason": completion.stop_reason,
        }
        is_first = index not in self._begun
        self._begun.add(index)
        if is_first and self._has_echo:
            choice["text"] = (first.prompt or "") + completion.text
        if completion.logprobs is not None:
            if is_first:
                self._logprobs[index] = self._begin_logprobs(first)
            choice["logprobs"] = self._logprobs[index].of(completion)
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = first.prompt_token_ids
        if self.body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs)
        return choice

    def _begin_logprobs(self, first: RequestOutput) -> TextLogprobs:
        """Make the log-probabilities of a new choice, with those of the prompt if it is echoed."""
        ids, names, echoed = first.prompt_token_ids, self._names, first.prompt or ""
        offsets = TextOffsets(
            names.tokenizer,
            skips_special=self._params.skip_special_tokens,
            begin=len(echoed) if self._has_echo else 0,
        )
        offsets.follow(ids)
        logprobs = TextLogprobs(self._num_logprobs or 0, names, offsets)
        if self._has_echo:
            may_be_cut = self.body.truncate_prompt_tokens is not None
            logprobs.echo(echoed, ids, first.prompt_logprobs or [], may_be_cut=may_be_cut)
        return logprobs


def _forget_text(completion: CompletionOutput) -> None:
    """For ``max_tokens`` 0: remove the one token that the engine has generated nevertheless."""
    completion.text, completion.token_ids = "", []
    completion.logprobs = None if completion.logprobs is None else []
    if completion.finish_reason == "stop":
        completion.finish_reason, completion.stop_reason = "length", None


def refuse_unsupported(body: CompletionRequest) -> None:
    """Raise ``ApiError`` for a suffix, and for ``best_of`` other than ``n``."""
    if body.suffix:
        raise field_error("suffix", f"is {body.suffix!r:.80}, not supported: leave it out")
    if body.best_of not in (None, body.n):
        raise field_error(
            "best_of", f"is {body.best_of}, must be equal to n, which is {body.n}: leave it out"
        )


def prompts_of(body: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, each a text or token ids. Raises ``ApiError``."""
    prompt: Any = body.prompt
    many: list[Any] = prompt if isinstance(prompt, list) else [prompt]
    if len({type(each) for each in many}) > 1:
        raise field_error(
            "prompt", f"is {prompt!r:.80}, must be a text, a list of token ids, or a list of either"
        )
    if many and isinstance(many[0], int):
        many = [prompt]
    if not 0 < len(many) <= MAX_PROMPTS:
        raise field_error("prompt", f"has {len(many)} entries, must have 1 to {MAX_PROMPTS}")
    if len(many) * body.n > MAX_TEXTS:
        raise field_error(
            "n",
            f"is {body.n} for {len(many)} prompts, {len(many) * body.n} texts together, the "
            f"limit is {MAX_TEXTS}: send several requests",
        )
    if body.cache_salt is None:
        return many
    name = "prompt" if isinstance(many[0], str) else "prompt_token_ids"
    return [{name: each, "cache_salt": body.cache_salt} for each in many]  # type: ignore[misc]
