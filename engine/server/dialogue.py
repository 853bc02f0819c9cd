"""Chat generation, which the APIs of conversations share: prompt, request, output."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from engine.async_engine import AsyncLLMEngine
from engine.errors import RefusedError, RequestError
from engine.frontend.encoding import TextPrompt
from engine.frontend.streams import OutputReader
from engine.messages.requests import CompletionOutput, ErrorCode, RequestOutput
from engine.messages.structured import StructuredOutputsParams, with_rules
from engine.pictures.chat import taken
from engine.pictures.errors import NOT_READ, PARAM
from engine.pictures.sources import Given
from engine.server.adapt import Adapter, adapter_of, strictest
from engine.server.bodies import ChatRequest, copies
from engine.server.conversation import Message, plain_messages
from engine.server.errors import STATUS_OF_END, TEXT_OF_END, ApiError, field_error
from engine.server.speech.answer import ParsedAnswer
from engine.server.speech.events import Event
from engine.server.speech.forms import form_of_answer
from engine.server.speech.generic import as_text
from engine.server.speech.tools import tools_of
from engine.server.speech.turns import ChatFormat
from engine.text.plain_specials import has_special_tokens, render_plainly
from engine.text.tokenizer import Tokenizer

OWN_FIELDS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "self",
    "tools",
)


class ChatModel:
    """An engine with its chat template: renders the prompts of conversations."""

    def __init__(self, engine: AsyncLLMEngine, chat_template: str | None = None) -> None:
        """chat_template: used instead of the model's own template."""
        self.engine = engine
        self.chat_template = chat_template
        self._chat_format: asyncio.Future[ChatFormat] | None = None

    async def loaded(self) -> LoadedChatModel:
        """Return this model with the parser of its answers; the first call makes the parser."""
        made = self._chat_format
        if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
            tokenizer = self.engine.get_tokenizer()
            own = "\n".join(tokenizer.templates.values())
            making = asyncio.to_thread(ChatFormat, tokenizer, self.chat_template or own)
            self._chat_format = asyncio.ensure_future(making)
            made = self._chat_format
        return LoadedChatModel(self, await asyncio.shield(made))

    async def render(
        self,
        messages: list[Message],
        pictures: Sequence[Given] = (),
        *,
        continues: bool = False,
        **options: Any,
    ) -> TextPrompt:
        """Render the prompt of a conversation with the chat template, and load its pictures. Texts
        of messages that look like special tokens are encoded as plain text.

        ``options`` are those of ``Tokenizer.apply_chat_template``; pictures: those whose marks the
        messages have; continues: the prompt ends with the text of the last message. Raises
        ``RequestError`` if the template raises an error, or a picture cannot be loaded."""
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        if (await self.loaded()).chat_format.is_generic:
            messages = as_text(messages, options.pop("tools", None) or [])
        tokenizer = self.engine.get_tokenizer()
        adapter = adapter_of(
            tokenizer,
            self.chat_template,
            bool(options.get("tools")),
            shows=self.engine.pictures.are_read,
        )
        adapted = adapter.adapt(messages)
        if adapted is None:
            await asyncio.to_thread(adapter.learn)
            adapted = adapter.adapt(messages) or messages
        if pictures and not adapter.shows_pictures:
            raise RequestError(
                "multi_modal_data has a picture, and the chat template has no place for it: start "
                "the server with --chat-template FILE, whose template writes the image token",
                param="multi_modal_data",
            )
        fill = partial(self._fill, adapter, pictures, options, continues=continues)
        try:
            prompt = await fill(adapted)
        except RefusedError:
            raise
        except RequestError as error:
            prompt = await self._fill_strictly(fill, adapted, error)
        return await self.engine.pictures.loaded(prompt)

    async def _fill_strictly(
        self,
        fill: Callable[[list[Message]], Awaitable[TextPrompt]],
        adapted: list[Message],
        error: RequestError,
    ) -> TextPrompt:
        """Render messages as the strictest templates need it. Raises ``error`` if that fails."""
        other = strictest(adapted)
        if other != adapted:
            with contextlib.suppress(RequestError):
                return await fill(other)
        raise error

    async def _fill(
        self,
        adapter: Adapter,
        pictures: Sequence[Given],
        options: dict[str, Any],
        messages: list[Message],
        *,
        continues: bool,
    ) -> TextPrompt:
        """Render the prompt of messages that were adapted to the template already, except for
        their pictures."""
        tokenizer = self.engine.get_tokenizer()
        messages = adapter.with_parts(messages, pictures)
        if continues or has_special_tokens(tokenizer, messages, options.get("tools")):
            texts, shown = taken(messages)
            render = partial(render_plainly, continues=continues)
            prompt: TextPrompt = await asyncio.to_thread(render, tokenizer, texts, options)
            if shown:
                prompt["multi_modal_data"] = {"image": shown}
        else:
            prompt = await self.engine.render_chat(messages, **options)
        return prompt


class LoadedChatModel(NamedTuple):
    """A chat model with the parser of its output."""

    model: ChatModel
    chat_format: ChatFormat

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.engine.tokenizer


class AnswerPiece(NamedTuple):
    """The ``events`` that one output adds to a sequence's answer; ``turn``: the answer so far."""

    completion: CompletionOutput
    events: list[Event]
    turn: ParsedAnswer
    output: RequestOutput


class ChatGeneration:
    """The generation for one chat request, with ``n`` sequences."""

    def __init__(self, loaded: LoadedChatModel, body: ChatRequest) -> None:
        """Raises ``RequestError`` or ``ApiError`` for a field whose value is not supported."""
        check_body(body)
        body.fill(loaded.model.engine.recommended)
        self._loaded = loaded
        self._body = body
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        limits = (body.max_completion_tokens, body.max_tokens)
        most = next((limit for limit in limits if limit is not None), None)
        self._params = body.sampling(max_tokens=most, logprobs=num_logprobs)
        self._num_copies = body.n if self._params.n == 1 else 1
        self._began = time.monotonic()
        self._pictures: list[Given] = []
        self._messages = plain_messages(body.messages, self._pictures)
        check_pictures(loaded.model.engine, self._pictures)
        self._begun = begun_answer(body, self._messages)
        self._tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
        self._rendered: TextPrompt | None = None
        self._prompt: TextPrompt = {}
        self._turns: dict[int, ParsedAnswer] = {}
        self.num_thinking_tokens = 0

    @property
    def custom_tools(self) -> frozenset[str]:
        """Names of tools whose input is plain text instead of JSON."""
        return frozenset() if self._tools is None else self._tools.custom

    async def open(self, name: str) -> OutputReader:
        """Add the request to the engine under the id ``name``."""
        prompt = await self._prompt_in_time()
        self._prompt = self._as_read(prompt)
        changes: dict[str, Any] = {"structured_outputs": await self._form(self._prompt["prompt"])}
        if self._loaded.chat_format.parser_factory(has_tools=self._tools is not None) is not None:
            # The markers that the parser looks for may be special tokens.
            changes |= {"skip_special_tokens": False, "output_kind": "delta"}
        params = msgspec.structs.replace(self._params, **changes)
        options = self._body.options()
        if self._pictures:  # the time in which they were loaded counts
            options["arrival_time"] = self._began
        return await self._loaded.model.engine.open(prompt, params, name, **options)

    def read(self, output: RequestOutput) -> list[AnswerPiece]:
        """Parse an output of the engine; returns the new part of each sequence."""
        texts = copies(output.outputs, self._num_copies)
        return [self._read(output, completion) for completion in texts]

    def _read(self, output: RequestOutput, completion: CompletionOutput) -> AnswerPiece:
        turn = self._turns.get(completion.index)
        if turn is None:
            turn = self._turns[completion.index] = self._loaded.chat_format.begin(
                self._prompt,
                tools=None if self._tools is None else self._tools.read_as,
                skip_special=self._body.skip_special_tokens is not False,
            )
        is_single = self._tools is not None and self._tools.is_single
        was_thinking, before = turn.is_thinking, turn.num_thinking or 0
        events = turn.read(completion, max_calls=1 if is_single else None)
        if turn.num_thinking is None:  # markers of several tokens: count all tokens of the piece
            is_thinking = was_thinking or turn.is_thinking
            self.num_thinking_tokens += len(completion.token_ids) * is_thinking
        else:
            self.num_thinking_tokens += turn.num_thinking - before
        return AnswerPiece(completion, events, turn, output)

    async def _prompt_in_time(self) -> TextPrompt:
        """The prompt. Raises ``ApiError`` if its pictures are not loaded within the request's
        timeout."""
        limit = self._body.timeout
        is_limited = bool(self._pictures) and limit is not None and limit > 0
        try:
            async with asyncio.timeout(limit if is_limited else None):
                return await self.prompt()
        except TimeoutError:
            code: ErrorCode = "deadline_exceeded"
            raise ApiError(STATUS_OF_END[code], TEXT_OF_END[code], code=code) from None

    async def prompt(self) -> TextPrompt:
        """The prompt of the conversation, rendered by the first call. Raises ``RequestError``."""
        if self._rendered is None:
            self._rendered = await self._render()
        return self._rendered

    async def token_ids(self) -> list[int]:
        """The token ids of the prompt, with those of pictures. Raises ``RequestError``."""
        return await self._loaded.model.engine.pictures.token_ids(await self.prompt())

    async def _render(self) -> TextPrompt:
        body = self._body
        variables = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        is_begun = self._begun is not None
        variables["add_generation_prompt"] = not is_begun and (
            body.add_generation_prompt is not False
        )
        if self._tools is not None:
            variables["tools"] = self._tools.described
        model = self._loaded.model
        prompt = await model.render(self._messages, self._pictures, continues=is_begun, **variables)
        if body.cache_salt is not None:
            prompt["cache_salt"] = body.cache_salt
        return prompt

    def _as_read(self, prompt: TextPrompt) -> TextPrompt:
        """The prompt as the parser needs it, to find out whether the model is thinking. If the
        client has begun the answer, only a marker is returned: the one that begins or the one that
        ends thinking."""
        thinking = self._loaded.chat_format.thinking
        if self._begun is None or thinking is None:
            return prompt
        begin, end = thinking
        is_thinking = self._begun.rfind(begin) > self._begun.rfind(end)
        return {**prompt, "prompt": begin if is_thinking else end}

    async def _form(self, prompt: str) -> StructuredOutputsParams | None:
        """The grammar that the answer must match, tool calls included. Raises ``ApiError`` for
        schemas of tools that cannot be enforced."""
        form, tools, chat_format = (
            self._params.structured_outputs,
            self._tools,
            self._loaded.chat_format,
        )
        rules = self._body.objects.or_else(self._loaded.model.engine.object_rules)
        if tools is None:
            found = form_of_answer(chat_format, tools, form, prompt)
        else:
            tools = tools._replace(objects=rules)
            found = await asyncio.to_thread(form_of_answer, chat_format, tools, form, prompt)
        return None if found is None else with_rules(found, rules)


def check_pictures(engine: AsyncLLMEngine, pictures: Sequence[Given]) -> None:
    """Raise ``ApiError`` if a conversation has pictures and the model reads none."""
    if pictures and not engine.pictures.are_read:
        raise field_error(PARAM, f"has a picture, and {NOT_READ}")


def check_body(body: ChatRequest) -> None:
    """Raise ``ApiError`` for fields that contradict each other, whatever the model is."""
    if body.top_logprobs and not body.logprobs:
        raise field_error(
            "top_logprobs", f"is {body.top_logprobs} without logprobs: set logprobs to true"
        )
    template_variables(body.chat_template_kwargs)
    if not body.messages:
        raise field_error("messages", "is [], must have at least one message")
    if body.continue_final_message and body.add_generation_prompt:
        raise field_error(
            "continue_final_message",
            "and add_generation_prompt are both true: leave one of them out",
        )


def template_variables(given: dict[str, Any] | None) -> dict[str, Any]:
    """The variables that a request gives to the chat template. Raises ``ApiError`` if one of them
    is a variable that the server sets."""
    if wrong := sorted({*OWN_FIELDS} & {*(given or {})}):
        raise field_error(
            "chat_template_kwargs", f"has {wrong[0]}, which the server sets itself: leave it out"
        )
    return dict(given or {})


def begun_answer(body: ChatRequest, messages: list[Message]) -> str | None:
    """The text of the last message if the model must continue it, else ``None``. An empty assistant
    message at the end is removed from ``messages`` instead of being continued."""
    if not body.continue_final_message:
        return None
    last = messages[-1]
    if last.get("tool_calls"):
        raise field_error(
            "messages",
            "ends with tool calls, which continue_final_message cannot continue: leave them out, "
            "or add their results",
        )
    if last["role"] == "assistant" and not last["content"] and len(messages) > 1:
        messages.pop()
        return None
    return str(last["content"])
