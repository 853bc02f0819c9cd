"""One sequence as events: some thinking, some text, a tool call.

    text of the engine ──> MarkedText ──> ResponseParser (transformers) ──> events of a Turn

All answers are made of these events, whole ones too, so that a stream and its end say the same.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import secrets
import string
from collections.abc import Iterator
from typing import Any, NamedTuple

from engine.messages.requests import CompletionOutput
from engine.server.speech.families import Family, family_of
from engine.server.speech.markers import MarkedText, Markers
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("engine.server")
THINKING_FIELDS = ("thinking", "reasoning_content", "reasoning")
TOOL_FIELD = "tool_calls"
CLOSE = "region_close"
BRACE = "{"


class Text(NamedTuple):
    """Some text of the answer."""

    text: str


class Thinking(NamedTuple):
    """Some text before it."""

    text: str


class ToolCall(NamedTuple):
    """A whole call; arguments are JSON."""

    id: str
    name: str
    arguments: str


Event = Text | Thinking | ToolCall


class Speech:
    """How a model's answers are read: made once for each model and chat template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str) -> None:
        own = tokenizer.response_template
        family = None if own else family_of(chat_template)
        self.family: Family | None = family
        """``None``: the tokenizer describes itself, or there is nothing to read."""
        self.has_tools = bool(own and TOOL_FIELD in own["fields"]) or bool(family and family.calls)
        self._is_own = own is not None
        self.thinking: tuple[str, str] | None = None
        """What opens thinking and what closes it, if the model thinks."""
        template = own
        if family is not None:
            if family.thinking and any(sign in chat_template for sign in family.thinking):
                self.thinking = family.thinking
            template = family.template(thinks=self.thinking is not None or not family.thinking)
        self._with_tools: Reader | None = None
        self._without: Reader | None = None
        if template is not None:
            self._with_tools = Reader(tokenizer, _fitted(tokenizer, template))
            fields = {k: v for k, v in template["fields"].items() if k != TOOL_FIELD}
            if fields.keys() - {"content"}:
                self._without = Reader(
                    tokenizer, _fitted(tokenizer, {**template, "fields": fields})
                )

    def reader(self, *, has_tools: bool) -> Reader | None:
        """``None``: all is text."""
        return self._with_tools if has_tools else self._without

    def prefix(self, prompt: str) -> str:
        """What the prompt says of the answer already: all of it, or that thinking has begun."""
        if self._is_own:
            return prompt
        return self.thinking[0] if self.thinking and self.is_thinking(prompt) else ""

    def is_thinking(self, prompt: str) -> bool:
        """Whether the prompt ends inside thinking."""
        return bool(self.thinking and prompt.rstrip().endswith(self.thinking[0]))

    def has_thought(self, prompt: str) -> bool:
        """Whether the chat template has ended thinking before it began."""
        return bool(self.thinking and prompt.rstrip().endswith(self.thinking[1]))

    def begin(self, prompt: Any, *, tools: list[dict[str, Any]] | None, skip_special: bool) -> Turn:
        """prompt: as ``AsyncLLMEngine.render_chat`` returns it; tools: those that may be called."""
        reader = self.reader(has_tools=bool(tools))
        if reader is None:
            return PlainTurn()
        marked = MarkedText(reader.markers, prompt["prompt_token_ids"], skip_special=skip_special)
        short = bool(self.family and self.family.short_ids)
        parser = reader.parser(self.prefix(prompt["prompt"]), tools)
        return ReadTurn(marked, parser, reader, short_ids=short)


class Reader:
    """A response template and the markers it has in one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, template: dict[str, Any]) -> None:
        parsing = importlib.import_module("transformers.utils.chat_parsing.response_templates")
        self.markers = Markers(tokenizer, template)
        self._template = parsing.load_response_template(self.markers.template)
        field = template["fields"].get(TOOL_FIELD, {})
        self.needs_close = field.get("content") in ("xml-inline", "kv-lines")
        """Whether a part of a tool call can be taken for all of it."""

    def parser(self, prefix: str, tools: list[dict[str, Any]] | None) -> Any:
        parsing = importlib.import_module("transformers.utils.chat_parsing.response_parser")
        return parsing.ResponseParser(self._template, prefix=self.markers.read(prefix), tools=tools)


class Turn:
    """What one sequence has said so far."""

    def __init__(self) -> None:
        self.content = ""
        self.thinking = ""
        self.calls: list[ToolCall] = []

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thinking, as far as one can know."""
        return False

    def read(self, completion: CompletionOutput, max_calls: int | None = None) -> list[Event]:
        """What is new; calls beyond the limit are left out."""
        events: list[Event] = []
        for event in self._read(completion):
            if isinstance(event, Text):
                self.content += event.text
            elif isinstance(event, Thinking):
                self.thinking += event.text
            elif max_calls is None or len(self.calls) < max_calls:
                self.calls.append(event)
            else:
                continue
            events.append(event)
        return events

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        raise NotImplementedError


class PlainTurn(Turn):
    """All of it is text."""

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        if completion.text:
            yield Text(completion.text)


class ReadTurn(Turn):
    """Taken apart by a parser. What cannot be read as a tool call stays text."""

    def __init__(self, marked: MarkedText, parser: Any, reader: Reader, *, short_ids: bool) -> None:
        super().__init__()
        self._marked = marked
        self._parser: Any = parser
        self._markers = reader.markers
        self._needs_close = reader.needs_close
        self._short_ids = short_ids
        self._spaces = ""  # at the end of a text; left out if no more of it follows
        self._has_begun = False  # some text, or thinking, was said of the region that is open
        self._num_regions = 0
        self._call = ""  # as it is written
        self._region = ""
        for event in parser.initial_events:
            list(self._told(event))

    @property
    def is_thinking(self) -> bool:
        return self._region in THINKING_FIELDS

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        text = self._marked.read(completion.token_ids, completion.text)
        if completion.finish_reason is not None:
            text += self._marked.flush()
        if self._parser is None:
            yield from self._as_text(text)
            return
        try:
            told, last = self._parser.feed(text), []
            if completion.finish_reason is not None:
                last = self._parser.finalize()[1]
        except Exception as error:  # the library's parsers raise what they like
            logger.info("an answer cannot be read as its template says: %r", error)
            self._parser = None
            yield from self._as_text(self._call + text)
            return
        for event in told:
            yield from self._told(event)
        for event in last:
            if self._needs_close and (event["type"], event["field"]) == (CLOSE, TOOL_FIELD):
                event = {**event, "value": None}
            yield from self._told(event)
        if completion.finish_reason is not None:
            yield from self._as_text("")

    def _told(self, event: dict[str, Any]) -> Iterator[Event]:
        field, kind = event["field"], event["type"]
        if kind == "region_open":
            self._region, self._has_begun, self._call = field, False, ""
            self._num_regions += 1
            if field != "content":
                self._spaces = ""
        elif kind == "region_chunk" and field == TOOL_FIELD:
            self._call += event["text"]
        elif kind == "region_chunk":
            yield from self._said(field, event["text"])
        else:
            self._region = ""
            if field == TOOL_FIELD:
                yield from self._called(event["value"])
            elif field in THINKING_FIELDS:
                self._spaces = ""

    def _said(self, field: str, text: str) -> Iterator[Event]:
        """Without the white space between the parts of an answer."""
        text = self._markers.plain(text)
        is_thinking = field in THINKING_FIELDS
        if not self._has_begun and (is_thinking or self._num_regions > 1):
            text = text.lstrip()
        if not text:
            return
        self._has_begun = True
        kept = text.rstrip()
        if not kept:
            self._spaces += text
            return
        said, self._spaces = self._spaces + kept, text[len(kept) :]
        yield Thinking(said) if is_thinking else Text(said)

    def _called(self, value: Any) -> Iterator[Event]:
        written, self._call = self._call, ""
        calls = calls_of(value)
        if not calls:
            yield from self._as_text(written)
            return
        for name, arguments in calls:
            told = self._markers.plain(json.dumps(arguments, ensure_ascii=False))
            yield ToolCall(call_id(short=self._short_ids), name, told)

    def _as_text(self, text: str) -> Iterator[Event]:
        text, self._spaces = self._spaces + self._markers.plain(text), ""
        if text:
            yield Text(text)


def calls_of(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments in what a model wrote as a tool call; none if it is no call."""
    if isinstance(value, str):
        value = _values_in(value)
    found = []
    for each in value if isinstance(value, list) else [value]:
        call = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(call, dict):
            return []
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = _values_in(arguments)
            arguments = arguments[0] if len(arguments) == 1 else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        found.append((name, arguments))
    return found


def _values_in(text: str) -> list[Any]:
    """JSON values one behind the other, as two calls may be written; none if there is more."""
    values, decoder = [], json.JSONDecoder()
    at = text.find(BRACE)
    if text[: max(at, 0)].strip():
        return []
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        at = text.find(BRACE, end)
        if text[end : at if at >= 0 else None].strip(" \n\t;,"):
            return []
    return values


def call_id(*, short: bool) -> str:
    if short:
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(9))
    return f"call_{secrets.token_hex(12)}"


def _fitted(tokenizer: Tokenizer, template: dict[str, Any]) -> dict[str, Any]:
    """For a vocabulary in which a marker is no token, letters must do: thinking is then at the
    beginning only, and a call ends behind a brace."""
    added, fields = tokenizer.added_tokens, {}
    for name, field in template["fields"].items():
        begin, end = field.get("open"), field.get("close")
        if name == "thinking" and isinstance(begin, str) and begin not in added:
            field = {k: v for k, v in field.items() if k != "open"}
            field["open_pattern"] = rf"\A\s*{re.escape(begin)}"
        if field.get("content") == "json" and isinstance(end, str) and end not in added:
            field = {k: v for k, v in field.items() if k != "close"}
            field["close_pattern"] = rf"(?<=\}})\s*{re.escape(end)}"
        fields[name] = field
    return {**template, "fields": fields}
