"""Grammars that make a model write what a request demands: a tool call, strict arguments, or a
form of the answer after free thinking. In the notation of Lark that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.messages.structured import (
    ComposedForm,
    Grammar,
    StructuredOutputsParams,
    form_of,
)
from engine.server.speech.enforced import (
    enforceable,
    is_too_large,
    schema_of_arguments,
    unenforced,
)
from engine.server.speech.families import Calls
from engine.server.speech.markers import Markers
from engine.server.speech.tools import Tool, Tools, kinds_of
from engine.server.speech.turns import Speech

VALUES = ("enum", "const", "default", "examples")  # keywords with values, which are no schemas
ANY = "/(?s:.*)/"
JSON_FIRST = "/\\s*\\{(?s:.*)/"
ANY_OBJECT = {"type": "object"}


def form_of_answer(
    speech: Speech, tools: Tools | None, text: StructuredOutputsParams | None, prompt: str
) -> StructuredOutputsParams | None:
    """What an answer must be: calls, text in a form, or one of both; ``None``: anything.

    tools: those that may be called; text: the form of an answer in words. Raises ``ApiError`` if
    the schema of a strict tool cannot be enforced.
    """
    if tools is None or (tools.choice == "auto" and text is None and not tools.has_strict):
        return None if text is None else _after_thinking(speech, text, prompt)
    tools = enforceable(tools)
    form = _with_calls(speech, tools, text, prompt)
    if any(not tool.is_strict and tool.is_enforced for tool in tools.all) and is_too_large(form):
        form = _with_calls(speech, unenforced(tools), text, prompt)
    return form


def _with_calls(
    speech: Speech, tools: Tools, text: StructuredOutputsParams | None, prompt: str
) -> ComposedForm:
    reader, calls = speech.reader(has_tools=True), speech.calls
    assert reader is not None
    rules = Rules(reader.markers)
    bodies = {tool.name: rules.add("body", _body(rules, calls, tool)) for tool in tools.all}
    if tools.choice == "auto" and text is None:
        return rules.form(_strict(rules, calls, bodies, is_single=tools.is_single))
    call = rules.calls(calls.begin, bodies)
    first = " ".join(filter(None, [rules.text(calls.before), call]))
    answer = rules.many(first, call, calls, is_single=tools.is_single)
    if tools.choice == "auto" and text is not None:
        answer = f"({answer} | {rules.part(form_of(text))})"
    return rules.form([*rules.thinking(speech, prompt), answer])


def _after_thinking(
    speech: Speech, text: StructuredOutputsParams, prompt: str
) -> StructuredOutputsParams:
    """The same form of a text before which the model may think, where it is one that thinks."""
    reader = speech.reader(has_tools=False)
    if reader is None or speech.thinking is None or speech.has_thought(prompt):
        return text
    rules = Rules(reader.markers)
    return rules.form([*rules.thinking(speech, prompt), rules.part(form_of(text))])


class Rules:
    """A grammar that grows."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._rules: list[str] = []
        self._parts: list[Grammar] = []

    def add(self, name: str, body: str, attribute: str = "") -> str:
        """The name of a new rule."""
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{attribute}: {body}")
        return name

    def text(self, text: str) -> str:
        return self._markers.in_grammar(text)

    def is_special(self, text: str) -> bool:
        """Whether it is a token that no text has."""
        added = self._markers.tokenizer.added_tokens
        return text in added and added[text].special

    def part(self, form: Grammar) -> str:
        """The name of a form of its own."""
        self._parts.append(form)
        return f"@part_{len(self._parts) - 1}"

    def json(self, schema: Any, *, is_strict: bool) -> str:
        """is_strict: a keyword that cannot be enforced is an error."""
        return self.part(schema_of_arguments(schema, is_strict=is_strict))

    def thinking(self, speech: Speech, prompt: str) -> list[str]:
        """Free text until thinking ends: if it has begun, and else if the model wants to."""
        if speech.thinking is None or speech.has_thought(prompt):
            return []
        begin, end = speech.thinking
        if self.is_special(end):
            rest = f"{ANY} {self.text(end)} /\\n*/"
        else:
            rest = f"{self.until(end)} /\\n*/"
        if speech.is_thinking(prompt):
            return [rest]
        return [self.add("thinking", f"{self.text(begin)} {rest}") + "?"]

    def until(self, text: str) -> str:
        """The name of a rule for all up to the next such text, with it."""
        return self.add("until", f"/(?s:.*){in_regex(text)}/", "[lazy]")

    def calls(self, begin: str, bodies: dict[str, str]) -> str:
        """The name of a rule for one call: begin, with a name for ``{name}``, and its body."""
        each = (
            f"{self.text(begin.replace('{name}', name))} {body}" for name, body in bodies.items()
        )
        return self.add("call", " | ".join(each))

    def many(self, first: str, call: str, calls: Calls, *, is_single: bool) -> str:
        """One call, or several; first: the first of them, with what comes before it."""
        more = "" if calls.between is None or is_single else self.text(calls.between)
        parts = [first, f"({more} {call})*" if calls.between is not None and not is_single else ""]
        return " ".join(part for part in [*parts, self.text(calls.after)] if part)

    def form(self, start: list[str]) -> ComposedForm:
        """start: the parts of the answer, in their order."""
        grammar = "\n".join([f"start: {' '.join(start)}", *self._rules]) + "\n"
        return ComposedForm(grammar=grammar, backend="guidance", parts=tuple(self._parts))


def _body(rules: Rules, calls: Calls, tool: Tool) -> str:
    """What follows the beginning of a call of this tool."""
    if calls.form == "arguments":
        schema = tool.parameters if tool.is_enforced else ANY_OBJECT
        body = [rules.json(schema, is_strict=tool.is_strict)]
    elif calls.form == "object":
        body = [rules.json(_object(calls, tool), is_strict=tool.is_strict)]
    else:
        body = list(_tagged(rules, calls, tool))
    return " ".join([*body, rules.text(calls.end)])


def _object(calls: Calls, tool: Tool) -> dict[str, Any]:
    """References inside the tool's schema point to its root, which moves."""
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
    """The schema with references to where its root is now; one that has a name of its own keeps
    them, since they start there."""
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
    """Arguments between tags, those that are required always, in the order of the schema."""
    required = tool.parameters.get("required", [])
    for name in tool.parameters["properties"]:
        if calls.form == "xml":
            begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
        else:
            begin, end = f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"
        value = _value(rules, tool, name, end)
        whole = rules.add("argument", f"{rules.text(begin)} {value}")
        yield whole if name in required else f"{whole}?"


def _value(rules: Rules, tool: Tool, name: str, end: str) -> str:
    """Texts stand there as they are, all else as JSON."""
    found = kinds_of(tool.parameters["properties"][name], tool.parameters)
    if found.values:
        told = [each if isinstance(each, str) else json.dumps(each) for each in found.values]
        return f"({' | '.join(map(json.dumps, told))}) {rules.text(end)}"
    if tool.is_enforced and found.types and "string" not in found.types:
        at = "#/$defs/arguments"
        place = name.replace("~", "~0").replace("/", "~1")
        definitions = {"arguments": _moved(tool.parameters, at)}
        whole = {"$ref": f"{at}/properties/{place}", "$defs": definitions}
        body = rules.json(whole, is_strict=tool.is_strict)
        return f"{body} {rules.text(end)}"
    return rules.until(end)


def _strict(rules: Rules, calls: Calls, bodies: dict[str, str], *, is_single: bool) -> list[str]:
    """Free text in which nothing begins like a call, and calls."""
    call = rules.calls(calls.begin, bodies)
    found = re.match(r"<[^>]*>|\[[A-Z_]+\]|", calls.before or calls.begin)
    opener = found[0] if found else ""
    whole = " ".join(filter(None, [rules.text(calls.before), call]))
    if not opener:  # a call begins as any JSON, and stands alone
        many = rules.many(whole, call, calls, is_single=is_single)
        return [f"({many} | {rules.add('FREE', f'{ANY} & ~{JSON_FIRST}')})"]
    if rules.is_special(opener):
        many = rules.many(whole, call, calls, is_single=is_single)
        return [ANY, f"({many} {ANY})" + ("?" if is_single else "*")]
    # Letters: as soon as they are written, the text goes on as a call.
    free = rules.add("FREE", f"{ANY} & ~/(?s:.*){in_regex(opener)}(?s:.*)/")
    before, begin = calls.before.removeprefix(opener), calls.begin
    if not calls.before:
        begin = begin.removeprefix(opener)
    opened = f"{rules.until(opener)} {rules.text(before)} {rules.calls(begin, bodies)}"
    many = rules.many(opened, call, calls, is_single=is_single)
    return [f"({many})" + ("?" if is_single else "*"), free]


def in_regex(text: str) -> str:
    """The text inside an expression between slashes."""
    special = {"\n": "\\n", "/": "\\/"}
    return "".join(special.get(char) or re.escape(char) for char in text)
