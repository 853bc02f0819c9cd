"""Parser of answers for tokenizers with a response template (``response_template`` in
tokenizer_config.json). It uses transformers' parser; what that cannot parse becomes text."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from engine.server.private_parts import PARSING
from engine.server.speech.answer import AnswerParser
from engine.server.speech.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    PartEnd,
    Text,
    Thinking,
    new_call_id,
)
from engine.server.speech.json_text import HALVES, mended
from engine.server.speech.markers import Markers

logger = logging.getLogger("engine.server")
THINKING_FIELDS = ("thinking", "reasoning_content", "reasoning")
TOOL_FIELD = "tool_calls"


class ResponseTemplate:
    """A tokenizer's response template, which defines how answers are parsed, with its markers
    replaced by single characters."""

    def __init__(self, markers: Markers, template: dict[str, Any]) -> None:
        parsing = importlib.import_module(f"{PARSING}.response_templates")
        fitted = _fitted(markers, template)
        self.markers = markers
        self._template = parsing.load_response_template(markers.in_template(fitted))
        field = template["fields"].get(TOOL_FIELD, {})
        self.needs_close = field.get("content") in ("xml-inline", "kv-lines")
        """Whether an incomplete tool call may look like a complete one."""
        self.has_names = "transform" in field
        """Whether the opener of a tool call contains the tool's name."""
        self.opener: str = field.get("open") or ""

    def parser(self, prompt: str, tools: list[dict[str, Any]] | None) -> Any:
        parsing = importlib.import_module(f"{PARSING}.response_parser")
        return parsing.ResponseParser(self._template, prefix=self.markers.read(prompt), tools=tools)


class TemplateParser:
    """Parses one answer with transformers' parser and a response template."""

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: list[dict[str, Any]] | None,
        calls: AnswerParser | None,
    ) -> None:
        """calls: parses tool calls if the template does not describe them."""
        self._template = template
        self._names = {tool["function"]["name"] for tool in tools or []}
        self._parser = template.parser(prompt, tools)
        self._calls = calls
        self._call = ""  # text of the current call
        self._field = ""
        for event in self._parser.initial_events:
            list(self._events_of(event))

    @property
    def is_thinking(self) -> bool:
        return self._field in THINKING_FIELDS

    def read(self, text: str) -> Iterator[Event | PartEnd]:
        yield from self._parsed(lambda parser: parser.feed(text), text)

    def end(self, *, is_cut: bool) -> Iterator[Event | PartEnd]:
        yield from self._parsed(lambda parser: parser.finalize()[1], "", is_last=True)
        if self._calls is not None:
            yield from self._calls.end(is_cut=is_cut)

    def _parsed(
        self, parse: Callable[[Any], Iterable[Any]], text: str, *, is_last: bool = False
    ) -> Iterator[Event | PartEnd]:
        if self._parser is None:
            yield from self._text(text)
            return
        try:
            events = parse(self._parser)
        except Exception as error:  # the library's parsers raise various errors
            logger.info("an answer cannot be parsed with its response template: %r", error)
            self._parser = None
            yield from self._text(self._written("") + text)
            return
        for event in events:
            yield from self._events_of(event, is_cut=is_last and self._template.needs_close)

    def _events_of(
        self, event: dict[str, Any], *, is_cut: bool = False
    ) -> Iterator[Event | PartEnd]:
        """Convert an event of transformers' parser to ours. is_cut: a tool call that ends with this
        event is incomplete and becomes text."""
        field, kind = event["field"], event["type"]
        if kind == "region_open":
            self._field, self._call = field, ""
        elif kind == "region_chunk" and field == TOOL_FIELD:
            self._call += event["text"]
        elif kind == "region_chunk":
            is_thinking = field in THINKING_FIELDS
            text = event["text"]
            yield from [Thinking(text)] if is_thinking else self._text(text)
        elif field == TOOL_FIELD:
            yield from self._called(event["value"], is_cut=is_cut)
            self._field = ""
        else:
            if self._calls is None or self.is_thinking:
                yield PartEnd()
            self._field = ""

    def _text(self, text: str) -> Iterable[Event | PartEnd]:
        if not text:
            return ()
        return (Text(text),) if self._calls is None else self._calls.read(text)

    def _written(self, name: str) -> str:
        """The current tool call as the model wrote it; "" without one. name: the tool's name."""
        if self._field != TOOL_FIELD:
            return ""
        return self._template.opener.replace("{name}", name) + self._call

    def _called(self, value: Any, *, is_cut: bool) -> Iterator[Event | PartEnd]:
        found = [] if is_cut else list(_calls_in(value))
        calls = [(name, self._arguments(given)) for name, given in found if name in self._names]
        if not calls or len(calls) < len(found) or any(given is None for _, given in calls):
            name = found[0][0] if found and self._template.has_names else ""
            yield from self._text(self._written(name))
            return
        for name, arguments in calls:
            yield CallBegin(new_call_id(is_short=False), name)
            yield CallArguments(arguments or "")
            yield CallEnd()

    def _arguments(self, given: Any) -> str | None:
        """Convert a call's arguments to JSON text; ``None`` if they are not an object."""
        if given is None or given == "":
            return "{}"
        try:
            text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            text = mended(self._template.markers.plain(text)) or ""
        except (ValueError, RecursionError):
            return None
        return HALVES.sub("\ufffd", text) if text.startswith("{") else None


def _calls_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tool names and arguments of the calls in a parsed value."""
    if isinstance(value, str):
        value = _json(value)
    for each in value if isinstance(value, list) else [value]:
        call = each.get("function", each) if isinstance(each, dict) else None
        name = call.get("name") if isinstance(call, dict) else None
        if isinstance(call, dict) and isinstance(name, str):
            yield name, call.get("arguments", call.get("parameters"))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fitted(markers: Markers, template: dict[str, Any]) -> dict[str, Any]:
    """Adapt a template to markers that are not single tokens: thinking begins only at the start of
    the answer, and a call's end marker counts only after a closing brace."""
    fields = {}
    for name, field in template["fields"].items():
        begin, end = field.get("open"), field.get("close")
        if name == "thinking" and isinstance(begin, str) and not markers.has(begin):
            field = {k: v for k, v in field.items() if k != "open"}
            field["open_pattern"] = rf"\A\s*{re.escape(begin)}"
        if field.get("content") == "json" and isinstance(end, str) and not markers.has(end):
            field = {k: v for k, v in field.items() if k != "close"}
            field["close_pattern"] = rf"(?<=\}})\s*{re.escape(end)}"
        fields[name] = field
    return {**template, "fields": fields}
