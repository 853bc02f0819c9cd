"""Grammars that make a model write what a request demands: a tool call, strict arguments, or a
form of the answer behind free thinking. In the notation of Lark that llguidance reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.messages.structured import StructuredOutputsParams
from engine.server.speech.families import Calls
from engine.server.speech.markers import Markers
from engine.server.speech.tools import Tool, Tools, kinds_of
from engine.server.speech.turns import Speech

# As models are trained to write JSON: a space behind commas and colons, and no other.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
DEFINITIONS: tuple[str, ...] = ("$defs", "definitions")
ANY = "/(?s:.*)/"


def form_with_tools(speech: Speech, tools: Tools, prompt: str) -> StructuredOutputsParams | None:
    """What the tools of a request demand; ``None``: nothing."""
    if tools.choice != "required" and not tools.has_strict:
        return None
    reader, calls = speech.reader(has_tools=True), speech.calls
    assert reader is not None
    rules = Rules(reader.markers)
    names = [rules.add("call", _call(rules, calls, tool)) for tool in tools.all]
    call = rules.add("calls", " | ".join(names))
    if tools.choice == "required":
        many = rules.many(call, calls, is_single=tools.is_single)
        return rules.params(rules.thinking(speech, prompt) + many)
    return rules.params(_strict(rules, calls, call, is_single=tools.is_single))


def form_behind_thinking(
    speech: Speech, form: StructuredOutputsParams, prompt: str
) -> StructuredOutputsParams:
    """The same form of an answer before which the model may think, where it is one that thinks."""
    reader = speech.reader(has_tools=False)
    if reader is None or speech.thinking is None or speech.has_thought(prompt):
        return form
    body = _body(form)
    if body is None:
        return form
    rules = Rules(reader.markers)
    return rules.params([*rules.thinking(speech, prompt), rules.add("answer", body)])


class Rules:
    """A grammar that grows."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._rules: list[str] = []

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

    def json(self, schema: Any, *, is_strict: bool) -> str:
        """is_strict: a keyword that cannot be enforced is an error."""
        how = WRITTEN if is_strict else {**WRITTEN, "lenient": True, "coerce_one_of": True}
        return "%json " + json.dumps({**schema, "x-guidance": how})

    def thinking(self, speech: Speech, prompt: str) -> list[str]:
        """Free text until thinking ends: if it has begun, and else if the model wants to."""
        if speech.thinking is None or speech.has_thought(prompt):
            return []
        begin, end = speech.thinking
        if self.is_special(end):
            rest = f"{ANY} {self.text(end)} /\\n*/"
        else:
            rest = self.add("rest", f"/(?s:.*){in_regex(end)}\\n*/", "[lazy]")
        if speech.is_thinking(prompt):
            return [rest]
        return [self.add("thinking", f"{self.text(begin)} {rest}") + "?"]

    def many(self, call: str, calls: Calls, *, is_single: bool) -> list[str]:
        """One call, or several."""
        parts = [self.text(calls.before), call]
        if calls.between is not None and not is_single:
            parts.append(f"({self.text(calls.between)} {call})*")
        return [part for part in [*parts, self.text(calls.after)] if part]

    def params(self, start: list[str]) -> StructuredOutputsParams:
        grammar = "\n".join([f"start: {' '.join(start)}", *self._rules]) + "\n"
        return StructuredOutputsParams(grammar=grammar, backend="guidance")


def _call(rules: Rules, calls: Calls, tool: Tool) -> str:
    """How one tool is called."""
    begin = rules.text(calls.begin.replace("{name}", tool.name))
    if calls.form == "arguments":
        body = [rules.json(tool.parameters, is_strict=tool.is_strict)]
    elif calls.form == "object":
        body = [rules.json(_object(calls, tool), is_strict=tool.is_strict)]
    else:
        body = list(_tagged(rules, calls, tool))
    parts = [begin, *body, rules.text(calls.end)]
    # A schema ends its line.
    return " ".join(rules.add("part", part) if "%json" in part else part for part in parts)


def _object(calls: Calls, tool: Tool) -> dict[str, Any]:
    """References inside the tool's schema point to its root, which moves."""
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            calls.key: _moved(tool.parameters, f"#/properties/{calls.key}"),
        },
        "required": ["name", calls.key],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, root) for key, value in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved


def _tagged(rules: Rules, calls: Calls, tool: Tool) -> Iterator[str]:
    """Arguments between tags, those that are required always, in the order of the schema."""
    required = tool.parameters.get("required", [])
    for name, schema in tool.parameters["properties"].items():
        if calls.form == "xml":
            begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
        else:
            begin, end = f"<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"
        value = _value(rules, tool, schema, end)
        whole = rules.add("argument", f"{rules.text(begin)} {value}")
        yield whole if name in required else f"{whole}?"


def _value(rules: Rules, tool: Tool, schema: Any, end: str) -> str:
    """Texts stand there as they are, all else as JSON."""
    found = kinds_of(schema, tool.parameters)
    if found.values:
        told = [each if isinstance(each, str) else json.dumps(each) for each in found.values]
        return f"({' | '.join(map(json.dumps, told))}) {rules.text(end)}"
    if found.types and "string" not in found.types:
        # With the definitions that it may refer to; where they are is where they were.
        whole = {**tool.parameters, **schema} if isinstance(schema, dict) else {}
        kept = {key: whole[key] for key in (*DEFINITIONS, *schema) if key in whole}
        body = rules.json(kept, is_strict=tool.is_strict)
        return f"{rules.add('value', body)} {rules.text(end)}"
    return rules.add("value", f"/(?s:.*){in_regex(end)}/", "[lazy]")


def _strict(rules: Rules, calls: Calls, call: str, *, is_single: bool) -> list[str]:
    """Free text in which no call begins, and calls."""
    opener = re.match(r"<[^>]*>|\[[A-Z_]+\]|", calls.before or calls.begin)
    assert opener is not None
    free = ANY
    if opener[0] and not rules.is_special(opener[0]):
        free = rules.add("FREE", f"{ANY} & ~/(?s:.*){in_regex(opener[0])}(?s:.*)/")
    many = " ".join(rules.many(call, calls, is_single=is_single))
    return [free, f"({many} {free})" + ("?" if is_single else "*")]


def in_regex(text: str) -> str:
    """The text inside an expression between slashes."""
    special = {"\n": "\\n", "/": "\\/"}
    return "".join(special.get(char) or re.escape(char) for char in text)


def _body(form: StructuredOutputsParams) -> str | None:
    """The form as a rule; ``None`` for those that are written otherwise."""
    if form.disable_any_whitespace or form.disable_additional_properties or form.whitespace_pattern:
        return None
    if form.json is not None:
        schema = json.loads(form.json) if isinstance(form.json, str) else form.json
        return "%json " + json.dumps(schema)
    if form.json_object:
        return '%json {"type": "object"}'
    if form.choice is not None:
        return " | ".join(json.dumps(choice) for choice in form.choice)
    if form.regex is not None:
        return "/" + re.sub(r"(?<!\\)/", r"\\/", form.regex) + "/"
    return None
