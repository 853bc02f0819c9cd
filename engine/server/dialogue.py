"""A conversation that goes on by an answer: what chat completions, responses and messages share."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any, NamedTuple

from engine.async_engine import AsyncLLMEngine
from engine.frontend.prompt import TextPrompt
from engine.frontend.streams import Reader
from engine.messages.requests import CompletionOutput, RequestOutput
from engine.messages.structured import StructuredOutputsParams
from engine.server.asked import ChatRequest
from engine.server.errors import ApiError
from engine.server.speech.answer import AnswerReader
from engine.server.speech.events import Event
from engine.server.speech.forms import form_behind_thinking, form_with_tools
from engine.server.speech.generic import in_words, takes_system
from engine.server.speech.tools import tools_of
from engine.server.speech.turns import Speech
from engine.text.plain_specials import has_special_tokens, render_plainly
from engine.text.tokenizer import Tokenizer

TEXT_PARTS = (
    "text", "input_text", "output_text", "reasoning_text", "summary_text", "refusal",
)  # fmt: skip
OWN_FIELDS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "messages",
    "self",
    "tools",
)


class ChatModel:
    """An engine, and how conversations with its model are written and read."""

    def __init__(self, engine: AsyncLLMEngine, chat_template: str | None = None) -> None:
        """chat_template: to use instead of the model's own."""
        self.engine = engine
        self.chat_template = chat_template
        self._speech: asyncio.Future[Speech] | None = None

    async def voice(self) -> Voice:
        """Made once, in a thread: it takes a second."""
        made = self._speech
        if made is None or (made.done() and (made.cancelled() or made.exception() is not None)):
            tokenizer = self.engine.get_tokenizer()
            own = "\n".join(tokenizer.templates.values())
            making = asyncio.to_thread(Speech, tokenizer, self.chat_template or own)
            self._speech = asyncio.ensure_future(making)
            made = self._speech
        return Voice(self, await asyncio.shield(made))

    async def render(self, messages: list[dict[str, Any]], **options: Any) -> TextPrompt:
        """The prompt of a conversation. What a message says is plain text, whatever it looks like.
        Raises ``RequestError`` if the template refuses it."""
        if self.chat_template is not None:
            options["chat_template"] = self.chat_template
        tokenizer = self.engine.get_tokenizer()
        if has_special_tokens(tokenizer, messages, options.get("tools")):
            prompt: TextPrompt = await asyncio.to_thread(
                render_plainly, tokenizer, messages, options
            )
            return prompt
        return await self.engine.render_chat(messages, **options)


class Voice(NamedTuple):
    """A model for conversations, and how its answers are read."""

    model: ChatModel
    speech: Speech

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.model.engine.tokenizer

    def in_words(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """A conversation for a chat template that knows no tools."""
        tokenizer = self.model.engine.get_tokenizer()
        has_system = not tools or takes_system(tokenizer, self.model.chat_template)
        return in_words(messages, tools, has_system=has_system)


class Said(NamedTuple):
    """What is new of one sequence."""

    completion: CompletionOutput
    events: list[Event]
    turn: AnswerReader
    output: RequestOutput


class Dialogue:
    """One answer to a conversation, or ``n`` of them."""

    def __init__(self, voice: Voice, asked: ChatRequest) -> None:
        """Raises ``RequestError`` or ``ApiError`` for what cannot be asked."""
        check_asked(asked)
        self._voice = voice
        self._asked = asked
        num_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        limits = (asked.max_completion_tokens, asked.max_tokens)
        most = next((limit for limit in limits if limit is not None), None)
        self._params = asked.sampling(max_tokens=most, logprobs=num_logprobs)
        self._messages = [plain_message(message) for message in asked.messages]
        self._tools = tools_of(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        self._prompt: TextPrompt = {}
        self._turns: dict[int, AnswerReader] = {}
        self.num_thinking_tokens = 0

    async def open(self, name: str) -> Reader:
        """Ask the model; name: of the request."""
        prompt = self._prompt = await self.prompt()
        params = self._params
        params.structured_outputs = self._form(prompt["prompt"])
        if self._voice.speech.reader(has_tools=self._tools is not None) is not None:
            params.skip_special_tokens = False  # markers may be special
            params.output_kind = "delta"
        options = self._asked.options()
        return await self._voice.model.engine.open(prompt, params, name, **options)

    def read(self, output: RequestOutput) -> list[Said]:
        """What is new, by sequence."""
        return [self._read(output, completion) for completion in output.outputs]

    def _read(self, output: RequestOutput, completion: CompletionOutput) -> Said:
        turn = self._turns.get(completion.index)
        if turn is None:
            turn = self._turns[completion.index] = self._voice.speech.begin(
                self._prompt,
                tools=None if self._tools is None else self._tools.read_as,
                skip_special=self._asked.skip_special_tokens,
            )
        is_single = self._tools is not None and self._tools.is_single
        was_thinking, before = turn.is_thinking, turn.num_thinking or 0
        events = turn.read(completion, max_calls=1 if is_single else None)
        if turn.num_thinking is None:  # its markers are no tokens: about so many
            is_thinking = was_thinking or turn.is_thinking
            self.num_thinking_tokens += len(completion.token_ids) * is_thinking
        else:
            self.num_thinking_tokens += turn.num_thinking - before
        return Said(completion, events, turn, output)

    async def prompt(self) -> TextPrompt:
        """The conversation as the model reads it. Raises ``RequestError``."""
        asked = self._asked
        variables = dict(asked.chat_template_kwargs or {})
        if asked.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", asked.reasoning_effort)
        variables["add_generation_prompt"] = asked.add_generation_prompt
        messages, told = self._messages, self._tools.told if self._tools else []
        if self._voice.speech.is_generic:
            messages = self._voice.in_words(messages, told)
        elif told:
            variables["tools"] = told
        prompt = await self._voice.model.render(messages, **variables)
        if asked.cache_salt is not None:
            prompt["cache_salt"] = asked.cache_salt
        return prompt

    def _form(self, prompt: str) -> StructuredOutputsParams | None:
        form, tools, speech = self._params.structured_outputs, self._tools, self._voice.speech
        demanded = None if tools is None else form_with_tools(speech, tools, prompt)
        if form is None:
            return demanded
        if demanded is not None:
            raise ApiError(
                400,
                "a form of the text and tools that must be called, or are strict, are both given: "
                "leave one of them out",
                param="response_format",
            )
        return form_behind_thinking(speech, form, prompt)


def check_asked(asked: ChatRequest) -> None:
    """Raises ``ApiError`` for what cannot be asked of any model."""
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
    """As chat templates read it: content as one text, arguments of tool calls as objects. Raises
    ``ApiError`` for what is no text."""
    if not isinstance(message.get("role"), str):
        raise ApiError(
            400,
            f"messages has the role {message.get('role')!r:.40}, must be a text as user",
            param="messages",
        )
    plain = {**message, "content": plain_content(message.get("content"))}
    if plain.get("role") == "developer":  # OpenAI's newer name; templates know the older one
        plain["role"] = "system"
    calls = plain.get("tool_calls")
    if calls is None:
        plain.pop("tool_calls", None)
        return plain
    if not isinstance(calls, list):
        raise ApiError(400, f"tool_calls is {calls!r:.80}, must be a list", param="messages")
    plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def plain_content(content: Any, param: str = "messages") -> str:
    """The text of a message, whole or in parts. Raises ``ApiError`` that names ``param``."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(
            400,
            f"a message's content is {content!r:.80}, must be a text or parts of one",
            param=param,
        )
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in TEXT_PARTS:
            kind = part.get("type") if isinstance(part, dict) else part
            raise ApiError(
                400,
                f"{param} has a part of type {kind!r:.40}, which is not supported yet: only "
                "text is",
                param=param,
            )
    return "".join(
        text_of(part, "refusal" if part["type"] == "refusal" else "text", param) for part in content
    )


def text_of(part: dict[str, Any], name: str, param: str) -> str:
    """This field of a part, which must be a text."""
    text = part.get(name)
    if not isinstance(text, str):
        raise ApiError(
            400, f"{param} has a part whose {name} is {text!r:.40}, must be a text", param=param
        )
    return text


def said_last(messages: list[dict[str, Any]], *, calls: bool = False) -> dict[str, Any]:
    """The message of the model at the end, a new one if there is none. What is no call begins a
    new one behind calls."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or ("tool_calls" in last and not calls):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def think(message: dict[str, Any], text: str) -> None:
    """Add to what the model thought before a message."""
    before = message.get("reasoning_content")
    message["reasoning_content"] = text if before is None else f"{before}\n{text}"


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(
            400,
            f"tool_calls has {call!r:.80}, must have a function with name and arguments",
            param="messages",
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # a model may have written it so
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}
