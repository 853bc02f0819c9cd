"""One sequence as events: some thinking, some text, a tool call.

    text of the engine ──> MarkedText ──> ResponseParser (transformers) ──> events of a Turn

All answers are made of these events, whole ones too, so that a stream and its end say the same.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from engine.messages.requests import CompletionOutput
from engine.server.speech.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Text,
    Thinking,
    ToolCall,
    new_call_id,
)
from engine.server.speech.families import GENERIC, GENERIC_CALLS, GENERIC_FIELD, Family, family_of
from engine.server.speech.markers import MarkedText, Markers
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger("engine.server")
THINKING_FIELDS = ("thinking", "reasoning_content", "reasoning")
TOOL_FIELD = "tool_calls"
BRACE = "{"
HALVES = re.compile("[\ud800-\udfff]")


class Speech:
    """How a model's answers are read: made once for each model and chat template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str) -> None:
        own = tokenizer.response_template
        family = family_of(chat_template)
        has_own_calls = own is not None and TOOL_FIELD in own["fields"]
        self.family: Family | None = None if own else family
        """``None``: the tokenizer describes itself."""
        self.is_generic = not has_own_calls and (own is not None or family.name == GENERIC)
        """Whether the chat template knows no tools, so that texts must do for them."""
        self.calls = GENERIC_CALLS if self.is_generic else family.calls
        """How calls are written when they are forced."""
        self._is_own = own is not None
        self.thinking: tuple[str, str] | None = None
        """What opens thinking and what closes it, if the model thinks."""
        if own is None:
            if family.thinking and any(sign in chat_template for sign in family.thinking):
                self.thinking = family.thinking
            template = family.template(thinks=self.thinking is not None or not family.thinking)
        else:
            template = {**own, "fields": {TOOL_FIELD: GENERIC_FIELD, **own["fields"]}}
        self._with_tools = Reader(
            tokenizer,
            _fitted(tokenizer, template),
            self.calls.before + self.calls.begin,
            is_ours=not has_own_calls,
        )
        self._without: Reader | None = None
        fields = {k: v for k, v in template["fields"].items() if k != TOOL_FIELD}
        if fields.keys() - {"content"}:
            self._without = Reader(tokenizer, _fitted(tokenizer, {**template, "fields": fields}))

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
        reader = self.reader(has_tools=tools is not None)
        if reader is None:
            return PlainTurn()
        marked = MarkedText(reader.markers, prompt["prompt_token_ids"], skip_special=skip_special)
        short = bool(self.family and self.family.short_ids)
        parser = reader.parser(self.prefix(prompt["prompt"]), tools)
        names = {tool["function"]["name"] for tool in tools or []}
        thinking = self._counter(reader, self.is_thinking(prompt["prompt"]))
        return ReadTurn(marked, parser, reader, names, thinking, short_ids=short)

    def _counter(self, reader: Reader, is_thinking: bool) -> ThinkingCounter | None:
        """``None`` where markers are no tokens."""
        added = reader.markers.tokenizer.added_tokens
        if self.thinking is None or any(marker not in added for marker in self.thinking):
            return None
        begin, end = (added[marker].token_id for marker in self.thinking)
        return ThinkingCounter(begin, end, is_thinking)


class Reader:
    """A response template and the markers it has in one vocabulary."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: dict[str, Any],
        opener: str = "",
        *,
        is_ours: bool = True,
    ) -> None:
        """opener: how a call begins, if the template does not say; is_ours: the template."""
        parsing = importlib.import_module("transformers.utils.chat_parsing.response_templates")
        self.markers = Markers(tokenizer, template)
        self._template = parsing.load_response_template(self.markers.template)
        field = template["fields"].get(TOOL_FIELD, {})
        self.needs_close = field.get("content") in ("xml-inline", "kv-lines")
        """Whether a part of a tool call can be taken for all of it."""
        self.has_names = "transform" in field
        """Whether what opens a tool call names the tool."""
        self.is_json = is_ours and field.get("content") == "json"
        """Whether what stands in a tool call is it, or all its arguments, as JSON."""
        self.opener: str = field.get("open") or opener
        """How a call begins, ``{name}`` for the tool's."""

    def parser(self, prefix: str, tools: list[dict[str, Any]] | None) -> Any:
        parsing = importlib.import_module("transformers.utils.chat_parsing.response_parser")
        return parsing.ResponseParser(self._template, prefix=self.markers.read(prefix), tools=tools)


class ThinkingCounter:
    """Counts tokens between two markers."""

    def __init__(self, begin: int, end: int, is_thinking: bool) -> None:
        self._begin, self._end, self._is_thinking = begin, end, is_thinking

    def count(self, token_ids: list[int]) -> int:
        num = 0
        for token in token_ids:
            if token in (self._begin, self._end):
                self._is_thinking = token == self._begin
            else:
                num += self._is_thinking
        return num


class Turn(ABC):
    """What one sequence has said so far."""

    def __init__(self) -> None:
        # In parts: a text that grows by a token would be copied for each.
        self._content: list[str] = []
        self._thinking: list[str] = []
        self.calls: list[ToolCall] = []
        self._is_left_out = False  # the call that is open
        self.num_thinking: int | None = 0
        """Tokens of thinking; ``None`` if they cannot be counted."""

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def thinking(self) -> str:
        return "".join(self._thinking)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes next is thinking, as far as one can know."""
        return False

    def read(self, completion: CompletionOutput, max_calls: int | None = None) -> list[Event]:
        """What is new; calls beyond the limit are left out."""
        events: list[Event] = []
        for event in self._read(completion):
            if isinstance(event, Text):
                self._content.append(event.text)
            elif isinstance(event, Thinking):
                self._thinking.append(event.text)
            elif not self._keep(event, max_calls):
                continue
            events.append(event)
        return events

    def _keep(self, event: CallBegin | CallArguments | CallEnd, max_calls: int | None) -> bool:
        """Whether it belongs to a call that is within the limit."""
        if isinstance(event, CallBegin):
            self._is_left_out = max_calls is not None and len(self.calls) >= max_calls
            if not self._is_left_out:
                self.calls.append(ToolCall(event.id, event.name))
        elif isinstance(event, CallArguments) and not self._is_left_out:
            self.calls[-1].parts.append(event.text)
        return not self._is_left_out

    @abstractmethod
    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        """What is new."""


class PlainTurn(Turn):
    """All of it is text."""

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        if completion.text:
            yield Text(completion.text)


class ReadTurn(Turn):
    """Taken apart by a parser. What cannot be read as a tool call stays text."""

    def __init__(
        self,
        marked: MarkedText,
        parser: Any,
        reader: Reader,
        names: set[str],
        thinking: ThinkingCounter | None,
        *,
        short_ids: bool,
    ) -> None:
        """names: of the tools that may be called."""
        super().__init__()
        self._marked = marked
        self._parser: Any = parser
        self._markers = reader.markers
        self._reader = reader
        self._names = names
        self._counter = thinking
        if thinking is None:
            self.num_thinking = None
        self._short_ids = short_ids
        self._spaces = ""  # at the end of a text; left out if no more of it follows
        self._has_begun = False  # some text, or thinking, was said of the region that is open
        self._was_said = [False, False]  # some text; some thinking
        self._num_regions = 0
        self._call = ""  # as it is written
        self._region = ""
        for event in parser.initial_events:
            list(self._told(event))

    @property
    def is_thinking(self) -> bool:
        return self._region in THINKING_FIELDS

    def _read(self, completion: CompletionOutput) -> Iterator[Event]:
        if self._counter is not None and self.num_thinking is not None:
            self.num_thinking += self._counter.count(completion.token_ids)
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
            yield from self._as_text(self._written("") + text)
            return
        for event in told:
            yield from self._told(event)
        for event in last:
            yield from self._told(event, is_cut=self._reader.needs_close)
        if completion.finish_reason is not None:
            yield from self._as_text("")

    def _told(self, event: dict[str, Any], *, is_cut: bool = False) -> Iterator[Event]:
        """is_cut: a call that closes here has no end."""
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
            if field == TOOL_FIELD:
                yield from self._called(event["value"], is_cut=is_cut)
            elif field in THINKING_FIELDS:
                self._spaces = ""
            self._region = ""

    def _said(self, field: str, text: str) -> Iterator[Event]:
        """Without the white space between the parts of an answer."""
        text = self._markers.plain(text)
        is_thinking = field in THINKING_FIELDS
        if not self._has_begun and (is_thinking or self._num_regions > 1):
            text = text.lstrip() if is_thinking else text.lstrip("\n")
        if not text:
            return
        if not self._has_begun and self._was_said[is_thinking]:
            text = "\n" + text  # a part of its own
        self._has_begun = self._was_said[is_thinking] = True
        kept = text.rstrip()
        if not kept:
            self._spaces += text
            return
        said, self._spaces = self._spaces + kept, text[len(kept) :]
        yield Thinking(said) if is_thinking else Text(said)

    def _called(self, value: Any, *, is_cut: bool) -> Iterator[Event]:
        name = _name_in(value) if self._reader.has_names else ""
        written = self._written(name)
        try:
            calls = [] if is_cut else self._calls(value, name)
        except (ValueError, RecursionError):
            calls = []
        if not calls:
            yield from self._as_text(written)
        for called, arguments in calls:
            yield CallBegin(new_call_id(is_short=self._short_ids), called)
            yield CallArguments(arguments)
            yield CallEnd()

    def _written(self, name: str) -> str:
        """The call that is open, as it was written."""
        if self._region != TOOL_FIELD:
            return ""
        return self._reader.opener.replace("{name}", name) + self._markers.plain(self._call)

    def _calls(self, value: Any, name: str) -> list[tuple[str, str]]:
        """Names and arguments. Raises ``ValueError`` for numbers that JSON does not have."""
        found: list[tuple[str, dict[str, Any] | None]] = [*calls_of(value, self._names)]
        if self._reader.is_json:  # read again: an escape may look like a marker
            plain = self._markers.plain(self._call)
            found = [(name, _arguments_in(plain))] if name else [*calls_of(plain, self._names)]
        calls = []
        for called, arguments in found:
            if arguments is None:
                return []
            told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            calls.append((self._clean(called), self._clean(told)))
        return calls

    def _clean(self, text: str) -> str:
        """Without halves of characters, which a model can write by escapes."""
        plain = text if self._reader.is_json else self._markers.plain(text)
        return HALVES.sub("\ufffd", plain)

    def _as_text(self, text: str) -> Iterator[Event]:
        text, self._spaces = self._spaces + self._markers.plain(text), ""
        if text:
            yield Text(text)


def calls_of(value: Any, names: set[str]) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments in what a model wrote as a tool call; none if it is no call. What has no
    arguments must have one of these names."""
    if isinstance(value, str):
        value = _values_in(value)
    found = []
    for each in value if isinstance(value, list) else [value]:
        call = each.get("function", each) if isinstance(each, dict) else None
        if not isinstance(call, dict):
            return []
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if isinstance(arguments, str):
            arguments = _arguments_in(arguments)
        elif arguments is None and (name in names or call.keys() & {"arguments", "parameters"}):
            arguments = {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return []
        found.append((name, arguments))
    return found


def _arguments_in(text: str) -> dict[str, Any] | None:
    """One object, or nothing at all; ``None`` for anything else."""
    if not text.strip():
        return {}
    values = _values_in(text)
    return values[0] if len(values) == 1 and isinstance(values[0], dict) else None


def _name_in(value: Any) -> str:
    """That the template has taken out of the opening of a call; none if it did not."""
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _values_in(text: str) -> list[Any]:
    """JSON values one behind the other, as two calls may be written; none if there is more."""
    if text.lstrip().startswith("["):
        try:
            return list(json.loads(text))
        except (ValueError, RecursionError):
            return []
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
