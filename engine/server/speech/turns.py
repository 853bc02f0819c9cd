"""The chat format of one model, by its family or by its tokenizer's response template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.server.speech.answer import (
    AnswerParser,
    FamilyParser,
    ParsedAnswer,
    PlainAnswer,
    StructuredAnswer,
    ThinkingCounter,
)
from engine.server.speech.calls import Types
from engine.server.speech.families import FAMILIES, GENERIC, GENERIC_CALLS, Family, family_of
from engine.server.speech.harmony import HarmonyCalls, HarmonyParser
from engine.server.speech.markers import MarkedText, Markers, markers_in
from engine.server.speech.source import TextSource
from engine.server.speech.template_reading import TOOL_FIELD, ResponseTemplate, TemplateParser
from engine.server.speech.text_reading import TextParser
from engine.text.tokenizer import Tokenizer


class ChatFormat:
    """How a model with a given chat template writes thinking and tool calls."""

    def __init__(self, tokenizer: Tokenizer, chat_template: str) -> None:
        own = tokenizer.response_template
        family = family_of(chat_template)
        has_own_calls = own is not None and TOOL_FIELD in own["fields"]
        self.family: Family | None = None if own else family
        """``None`` if the tokenizer has a response template."""
        self.is_generic = not has_own_calls and (own is not None or family.name == GENERIC)
        """Whether the chat template has no tools, so that they are described as text."""
        self.calls = GENERIC_CALLS if self.is_generic else family.calls
        """The format of enforced calls."""
        self.thinking: tuple[str, str] | None = None
        """The opening and closing markers of thinking; ``None`` if the model does not think."""
        self._with_tools: ParserFactory
        self._without: ParserFactory | None = None
        if own is not None:
            calls = None if has_own_calls else FAMILIES[-1]
            self._with_tools = TemplateParserFactory(tokenizer, own, calls)
            fields = {k: v for k, v in own["fields"].items() if k != TOOL_FIELD}
            if fields.keys() - {"content"}:
                self._without = TemplateParserFactory(tokenizer, {**own, "fields": fields}, None)
            return
        if family.thinking and any(sign in chat_template for sign in family.thinking):
            self.thinking = family.thinking
        self._with_tools = FamilyParserFactory(tokenizer, family, self.thinking, has_calls=True)
        if self.thinking is not None or family.reader is HarmonyCalls:
            self._without = FamilyParserFactory(tokenizer, family, self.thinking, has_calls=False)

    def parser_factory(self, *, has_tools: bool) -> ParserFactory | None:
        """The factory of parsers for answers; ``None`` if all answers are plain text."""
        return self._with_tools if has_tools else self._without

    def is_thinking(self, prompt: str) -> bool:
        """Whether the prompt has begun thinking, so that the answer continues it."""
        return bool(self.thinking and prompt.rstrip().endswith(self.thinking[0]))

    def has_thought(self, prompt: str) -> bool:
        """Whether the prompt ends with completed thinking, so that the answer has none."""
        return bool(self.thinking and prompt.rstrip().endswith(self.thinking[1]))

    def begin(
        self, prompt: Any, *, tools: list[dict[str, Any]] | None, skip_special: bool
    ) -> ParsedAnswer:
        """Make the parser of a new answer. prompt: the result of ``AsyncLLMEngine.render_chat``;
        tools: those that may be called; skip_special: remove special tokens from the text."""
        factory = self.parser_factory(has_tools=tools is not None)
        if factory is None:
            return PlainAnswer()
        marked = MarkedText(factory.markers, prompt["prompt_token_ids"], skip_special=skip_special)
        is_thinking = self.is_thinking(prompt["prompt"])
        reading = factory.begin(prompt["prompt"], tools, is_thinking=is_thinking)
        counter = self._counter(factory, is_thinking)
        return StructuredAnswer(marked, factory.markers, reading, counter)

    def _counter(self, factory: ParserFactory, is_thinking: bool) -> ThinkingCounter | None:
        """Make a counter of thinking tokens; ``None`` if the markers of thinking are no tokens."""
        added = factory.markers.tokenizer.added_tokens
        if self.thinking is None or any(marker not in added for marker in self.thinking):
            return None
        begin, end = (added[marker].token_id for marker in self.thinking)
        return ThinkingCounter(begin, end, is_thinking)


class FamilyParserFactory:
    """Makes parsers of answers in the format of a model family."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        thinking: tuple[str, str] | None,
        *,
        has_calls: bool,
        more: list[str] | None = None,
    ) -> None:
        """has_calls: whether answers may have tool calls; more: further markers to recognise, those
        of a response template."""
        own = family.markers if has_calls or family.reader is HarmonyCalls else ()
        self.markers = Markers(tokenizer, (*own, *(thinking or ()), *(more or ())))
        self._family = family
        self._has_calls = has_calls
        self._thinking: tuple[str, str] | None = None
        if thinking is not None:
            self._thinking = self.markers.read(thinking[0]), self.markers.read(thinking[1])
        self._thinks_first = thinking is not None and not self.markers.has(thinking[0])

    def begin(
        self, prompt: str, tools: list[dict[str, Any]] | None, *, is_thinking: bool
    ) -> AnswerParser:
        family, source = self._family, TextSource()
        calls = family.reader(
            source, types_of(tools or []), self.markers, family.syntax, short_ids=family.short_ids
        )
        if isinstance(calls, HarmonyCalls):
            return FamilyParser(source, HarmonyParser(calls))
        reading = TextParser(
            source,
            calls if self._has_calls else None,
            self._thinking,
            is_thinking=is_thinking,
            thinks_first=self._thinks_first,
        )
        return FamilyParser(source, reading)


class TemplateParserFactory:
    """Makes parsers of answers that a response template describes."""

    def __init__(
        self, tokenizer: Tokenizer, template: dict[str, Any], calls: Family | None
    ) -> None:
        """calls: the model family whose tool calls are parsed if the template describes none."""
        texts = markers_in(tokenizer, template)
        self._calls: FamilyParserFactory | None = None
        self.markers = Markers(tokenizer, texts)
        if calls is not None:
            self._calls = FamilyParserFactory(tokenizer, calls, None, has_calls=True, more=texts)
            self.markers = self._calls.markers
        self._template = ResponseTemplate(self.markers, template)

    def begin(
        self, prompt: str, tools: list[dict[str, Any]] | None, *, is_thinking: bool
    ) -> AnswerParser:
        calls = None
        if self._calls is not None and tools is not None:
            calls = self._calls.begin(prompt, tools, is_thinking=False)
        return TemplateParser(self._template, prompt, tools, calls)


ParserFactory = FamilyParserFactory | TemplateParserFactory


def types_of(tools: list[dict[str, Any]]) -> Mapping[str, Types]:
    """For each tool, the JSON types of its arguments by name."""
    found: dict[str, Types] = {}
    for tool in tools:
        function = tool["function"]
        properties = (function.get("parameters") or {}).get("properties") or {}
        found[function["name"]] = {name: _types(each) for name, each in properties.items()}
    return found


def _types(schema: Any) -> list[str]:
    types = schema.get("type", []) if isinstance(schema, dict) else []
    return [types] if isinstance(types, str) else list(types)
