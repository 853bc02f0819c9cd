"""Build grammars in llguidance's Lark dialect for answers: they enforce tool calls, strict
arguments, and formats of the text after thinking."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine.messages.structured import (
    ComposedForm,
    Grammar,
    Opening,
    StructuredOutputsParams,
    form_of,
)
from engine.server.speech.calls import PREFIX
from engine.server.speech.enforced import (
    enforceable,
    is_too_large,
    schema_of_arguments,
    unenforced,
)
from engine.server.speech.families import FAMILIES, Calls
from engine.server.speech.markers import Markers
from engine.server.speech.object_calls import NESTED
from engine.server.speech.tools import Tool, Tools, kinds_of
from engine.server.speech.turns import ChatFormat

VALUES = ("enum", "const", "default", "examples")  # keywords whose values are no schemas
ANY = "/(?s:.*)/"
OPENER = re.compile(r"<[^>]*>|\[[A-Z_]+\]")  # a marker at the beginning of a text
NAMED = "|".join(("name", *NESTED))
JSON_FIRST = "/\\s*\\{(?s:.*)/"
ANY_OBJECT = {"type": "object"}


def form_of_answer(
    chat_format: ChatFormat, tools: Tools | None, text: StructuredOutputsParams | None, prompt: str
) -> StructuredOutputsParams | None:
    """The grammar of an answer that may have tool calls and text; ``None`` if any text is allowed.

    tools: the tools that may be called; text: the format of an answer without calls. Raises
    ``ApiError`` if the schema of a strict tool cannot be enforced.
    """
    if tools is None or (tools.choice == "auto" and text is None and not tools.has_strict):
        return None if text is None else _after_thinking(chat_format, text, prompt)
    tools = enforceable(tools)
    form = _with_calls(chat_format, tools, text, prompt)
    if any(not tool.is_strict and tool.is_enforced for tool in tools.all) and is_too_large(
        form, tools.objects
    ):
        form = _with_calls(chat_format, unenforced(tools), text, prompt)
    return form


def _with_calls(
    chat_format: ChatFormat, tools: Tools, text: StructuredOutputsParams | None, prompt: str
) -> ComposedForm:
    factory, calls = chat_format.parser_factory(has_tools=True), chat_format.calls
    assert factory is not None
    rules = Rules(factory.markers)
    bodies = {tool.name: rules.add("body", _body(rules, calls, tool)) for tool in tools.all}
    if tools.choice == "auto" and text is None:
        return rules.form(_strict(rules, chat_format, bodies, prompt, is_single=tools.is_single))
    call = rules.calls(calls.begin, bodies)
    first = " ".join(filter(None, [rules.text(calls.before), call]))
    answer = rules.many(first, call, calls, is_single=tools.is_single)
    if tools.choice == "auto" and text is not None:
        answer = f"({answer} | {rules.answer(chat_format, form_of(text), prompt)})"
    return rules.form([*rules.thinking(chat_format, prompt), answer])


def _after_thinking(
    chat_format: ChatFormat, text: StructuredOutputsParams, prompt: str
) -> StructuredOutputsParams:
    """Return the format ``text`` with unrestricted thinking before it, if the model thinks."""
    factory = chat_format.parser_factory(has_tools=False)
    thinks = chat_format.thinking is not None or bool(chat_format.calls.before_text)
    if factory is None or not thinks or chat_format.has_thought(prompt):
        return text
    rules = Rules(factory.markers)
    answer = rules.answer(chat_format, form_of(text), prompt)
    return rules.form([*rules.thinking(chat_format, prompt), answer])


class Rules:
    """Collects the Lark rules of one grammar, and the grammars that its rules refer to."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._rules: list[str] = []
        self._parts: list[Grammar] = []
        self._openings: list[Opening] = []
        self._num_calls = 0

    def add(self, name: str, body: str, attribute: str = "") -> str:
        """Add a Lark rule ``name_N: body`` and return its name. attribute: such as ``[lazy]``."""
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def text(self, text: str) -> str:
        return self._markers.in_grammar(text)

    def is_special(self, text: str) -> bool:
        """Whether this text is a special token of the tokenizer."""
        added = self._markers.tokenizer.added_tokens
        return text in added and added[text].special

    def letters(self, markers: Sequence[str]) -> list[str]:
        """Regular expressions for the markers, except those that are special tokens."""
        return [in_regex(each) for each in markers if not self.is_special(each)]

    def part(self, form: Grammar) -> str:
        """Add a grammar that is compiled separately, and return its name for use in rules."""
        self._parts.append(form)
        return f"@part_{len(self._parts) - 1}"

    def json(self, schema: Any, *, is_strict: bool) -> str:
        """Add the grammar of a JSON schema, return its name. is_strict: enforce every keyword."""
        return self.part(schema_of_arguments(schema, is_strict=is_strict))

    def opens(self, text: str, *, scope: str = "", follows: bool = False) -> None:
        """Record a text after which the part added last may begin. scope: the beginning of the call
        in which the text must be; follows: the text directly follows another part."""
        self._openings.append(Opening(text, len(self._parts) - 1, scope, follows))

    def answer(self, chat_format: ChatFormat, form: Grammar, prompt: str) -> str:
        """Add the grammar ``form`` of the answer's text, and return an expression for this text."""
        part, calls = self.part(form), chat_format.calls
        ends = [calls.text, calls.message_end if calls.before_text else ""]
        if chat_format.thinking is not None and not calls.before_text:
            ends.append(chat_format.thinking[1])
        for end in filter(None, ends):
            self.opens(end)
        if not chat_format.is_thinking(prompt):
            self.opens("")
        return self.begun(calls, part)

    def thinking(self, chat_format: ChatFormat, prompt: str) -> list[str]:
        """Expressions for thinking in the answer, optional unless the prompt has begun it."""
        if chat_format.calls.before_text:
            end = chat_format.calls.message_end
            begins = map(self.text, chat_format.calls.before_text)
            return [f"(({' | '.join(begins)}) {self._up_to(end)})*"]
        if chat_format.thinking is None or chat_format.has_thought(prompt):
            return []
        begin, end = chat_format.thinking
        rest = f"{self._up_to(end)} /\\n*/"
        if chat_format.is_thinking(prompt):
            return [rest]
        return [self.add("thinking", f"{self.text(begin)} {rest}") + "?"]

    def _up_to(self, end: str) -> str:
        """The expression for any text up to and including the marker ``end``."""
        marker = OPENER.match(end)
        if marker is not None and self.is_special(marker[0]):
            return f"{ANY} {self.text(end)}"
        return self.until(end)

    def until(self, text: str, but: str = "") -> str:
        """Add a rule for any text up to and including the first ``text``. but: an expression from
        ``_without`` that excludes some texts."""
        return self.add("until", f"/(?s:.*){in_regex(text)}/{but}", "[lazy]")

    def begun(self, calls: Calls, text: str) -> str:
        """Return the expression ``text``, optionally preceded by the beginning ``calls.text``."""
        return f"({self.text(calls.text)})? {text}" if calls.text else text

    def calls(self, begin: str, bodies: dict[str, str]) -> str:
        """Add a rule for a call of any tool. bodies: the rule after ``begin``, by tool name."""
        self._num_calls = len(bodies)
        each = (
            f"{self.text(begin.replace('{name}', name))} {body}" for name, body in bodies.items()
        )
        return self.add("call", " | ".join(each))

    def many(self, first: str, call: str, calls: Calls, *, is_single: bool) -> str:
        """Return the expression for one or more calls; for exactly one if ``is_single``. first: the
        expression for the first call with the text before it; call: that for a further one."""
        more = "" if calls.between is None or is_single else self.text(calls.between)
        parts = [first, f"({more} {call})*" if calls.between is not None and not is_single else ""]
        return " ".join(part for part in [*parts, self.text(calls.after)] if part)

    def form(self, start: list[str]) -> ComposedForm:
        """Return the complete grammar. start: expressions for the parts of the answer, in order."""
        grammar = "\n".join([f"start: {' '.join(start)}", *self._rules]) + "\n"
        return ComposedForm(
            grammar=grammar,
            backend="guidance",
            parts=tuple(self._parts),
            num_ways=self._num_calls,
            openings=tuple(self._openings),
        )


def _body(rules: Rules, calls: Calls, tool: Tool) -> str:
    """Return the expression for the part of a tool call that follows ``calls.begin``."""
    if calls.form not in ("arguments", "object"):
        return " ".join([*_tagged(rules, calls, tool), rules.text(calls.end)])
    schema = tool.parameters if tool.is_enforced else ANY_OBJECT
    if calls.form == "object":
        schema = _object(calls, tool)
    body = [rules.json(schema, is_strict=tool.is_strict)]
    rules.opens(calls.begin.replace("{name}", tool.name) or calls.before)
    if not calls.begin and calls.between is not None:
        rules.opens(calls.between, follows=True)
    return " ".join([*body, rules.text(calls.end)])


def _object(calls: Calls, tool: Tool) -> dict[str, Any]:
    """The JSON schema of a call that is one JSON object with the tool's name and its arguments."""
    arguments = _moved(tool.parameters, f"#/properties/{calls.key}")
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            calls.key: arguments if tool.is_enforced else ANY_OBJECT,
        },
        "required": ["name", calls.key],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """Prefix local references in a schema by ``root``, the place to which the schema is moved. A
    schema with ``$id`` is unchanged, because its references are relative to itself."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved = {k: v if k in VALUES else _moved(v, root) for k, v in schema.items()}
    reference = moved.get("$ref")
    if reference == "#" or (isinstance(reference, str) and reference.startswith("#/")):
        moved["$ref"] = root + reference[1:]
    return moved


def _tagged(rules: Rules, calls: Calls, tool: Tool) -> Iterator[str]:
    """Yield rules for arguments between tags, in order; only required arguments must occur."""
    required = tool.parameters.get("required", [])
    for name in tool.parameters["properties"]:
        if calls.form == "xml":
            begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
        else:
            begin, end = f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"
        value = _value(rules, tool, name, end)
        if value.startswith("@"):
            rules.opens(begin, scope=calls.begin.replace("{name}", tool.name))
        whole = rules.add("argument", f"{rules.text(begin)} {value}")
        yield whole if name in required else f"{whole}?"


def _value(rules: Rules, tool: Tool, name: str, end: str) -> str:
    """The expression for an argument between tags: plain text for strings, otherwise JSON."""
    found = kinds_of(tool.parameters["properties"][name], tool.parameters)
    if found.values:
        spelled = [each if isinstance(each, str) else json.dumps(each) for each in found.values]
        return f"({' | '.join(map(json.dumps, spelled))}) {rules.text(end)}"
    if tool.is_enforced and found.types and "string" not in found.types:
        at = "#/$defs/arguments"
        place = name.replace("~", "~0").replace("/", "~1")
        definitions = {"arguments": _moved(tool.parameters, at)}
        whole = {"$ref": f"{at}/properties/{place}", "$defs": definitions}
        body = rules.json(whole, is_strict=tool.is_strict)
        return f"{body} {rules.text(end)}"
    schema = tool.parameters["properties"][name]
    pattern = schema.get("pattern") if isinstance(schema, dict) and tool.is_strict else None
    if isinstance(pattern, str):
        return f"{rules.add('value', f'/{whole_expression(pattern)}/')} {rules.text(end)}"
    return rules.until(end)


def _strict(
    rules: Rules, chat_format: ChatFormat, bodies: dict[str, str], prompt: str, *, is_single: bool
) -> list[str]:
    """Expressions for calls that match the tools' schemas, and for text that is no call."""
    calls = chat_format.calls
    call = rules.calls(calls.begin, bodies)
    whole = " ".join(filter(None, [rules.text(calls.before), call]))
    many = rules.many(whole, call, calls, is_single=is_single)
    found = OPENER.match(calls.before or calls.begin)
    opener = found[0] if found else ""
    others = _like_calls(rules, chat_format, bodies, opener)
    without, without_opener = _without(others), _without([*others, *rules.letters([opener])])
    if calls.before_text:
        free = rules.add("FREE", f"{ANY}{without_opener}")
        return [*rules.thinking(chat_format, prompt), f"({many} | {rules.begun(calls, free)})"]
    if not opener:  # a call begins like any JSON, so that text and calls exclude each other
        return [f"({many} | {rules.add('FREE', f'{ANY}{without} & ~{JSON_FIRST}')})"]
    if rules.is_special(opener):
        free = rules.add("FREE", f"{ANY}{without}")
        thinking = rules.thinking(chat_format, prompt)
        return [*thinking, free, f"({many} {free})" + ("?" if is_single else "*")]
    # The opener is plain letters: once they are written, a call must follow.
    free = rules.add("FREE", f"{ANY}{without_opener}")
    before, begin = calls.before.removeprefix(opener), calls.begin
    if not calls.before:
        begin = begin.removeprefix(opener)
    rest = " ".join(filter(None, [rules.text(before), rules.calls(begin, bodies)]))
    many = rules.many(f"{rules.until(opener, without)} {rest}", call, calls, is_single=is_single)
    return [f"({many})" + ("?" if is_single else "*"), free]


def _like_calls(
    rules: Rules, chat_format: ChatFormat, names: Iterable[str], opener: str
) -> list[str]:
    """Regular expressions for text that the parser takes for a call even without ``opener``."""
    syntax = (chat_format.family or FAMILIES[-1]).syntax
    others = [text for text in (*syntax.openers, *syntax.inner) if text != opener]
    called = f"({re.escape(PREFIX)})?({'|'.join(map(in_regex, names))})"
    return [*rules.letters(others), rf"({NAMED})[\"']\s*:\s*[\"']\s*{called}\s*[\"']"]


def _without(expressions: Sequence[str]) -> str:
    """A suffix for a Lark expression, to exclude texts with a match of one of ``expressions``."""
    return f" & ~/(?s:.*)({'|'.join(expressions)})(?s:.*)/"


def whole_expression(pattern: str) -> str:
    """Convert a schema's pattern, which may match any part of a text, to a regular expression that
    must match all of it. Slashes are escaped."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern)
    inner = pattern[1 if begins else 0 : -1 if ends else None]
    whole = f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
    return re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", whole)


def in_regex(text: str) -> str:
    """Escape a text for use in a regular expression between slashes."""
    special = {"\n": "\\n", "/": "\\/"}
    return "".join(special.get(char) or re.escape(char) for char in text)
