"""Custom tools: their input is plain text, which may have to match a grammar.

The model sees a custom tool as a function with one argument, ``input``. The arguments of a call are
converted back to plain text for the client.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from engine.server.errors import field_error
from engine.server.speech.lark_regex import LarkError, regex_of_lark

INPUT = "input"
BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
PLAIN = re.compile(
    r'(?:[^"\\\ud800-\udfff]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"
)
"""The inside of a JSON string up to its end or to an incomplete escape."""


class CustomFunction(NamedTuple):
    """A custom tool, described to the model as a function."""

    function: dict[str, Any]
    """The function's description for the chat template."""
    pattern: str | None
    """Regular expression that the input must match; ``None``: any text."""


def function_of(given: dict[str, Any]) -> CustomFunction:
    """Convert a custom tool of chat completions to a function. Raises ``ApiError``."""
    about = given.get("custom")
    if not isinstance(about, dict):
        raise field_error("tools", f"has {given!r:.80}, must have an object in custom")
    name, form = about.get("name"), about.get("format") or {}
    description = about.get("description") or ""
    grammar = _grammar_of(name, form)
    pattern = None
    if grammar is not None:
        pattern = _pattern_of(name, *grammar)
        syntax, definition = grammar
        follows = f"The input is a text that follows this {syntax} grammar:\n{definition}"
        description = f"{description}\n\n{follows}" if description else follows
    function = {"name": name, "parameters": schema_of_input(None)}
    if description:
        function["description"] = description
    return CustomFunction(function, pattern)


def schema_of_input(pattern: str | None) -> dict[str, Any]:
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": pattern}
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _grammar_of(name: Any, form: Any) -> tuple[str, str] | None:
    """Syntax and definition of the grammar in a tool's ``format``; ``None`` if it has none. Raises
    ``ApiError``."""
    kind = form.get("type") if isinstance(form, dict) else form
    if isinstance(form, dict) and kind in (None, "text"):
        return None
    about = form.get("grammar", form) if isinstance(form, dict) else None
    if kind == "grammar" and isinstance(about, dict):
        syntax, definition = about.get("syntax"), about.get("definition")
        if syntax in ("lark", "regex") and isinstance(definition, str):
            return syntax, definition
    raise field_error(
        "tools",
        f"has {name!r:.80} with format {form!r:.80}, must have type text, or type grammar "
        "with syntax lark or regex and a definition",
    )


def _pattern_of(name: Any, syntax: str, definition: str) -> str:
    if syntax == "regex":
        inner = definition.removeprefix("^")
        if inner.endswith("$") and not inner.endswith("\\$"):
            inner = inner[:-1]
        return f"^(?:{inner})$"
    try:
        return f"^(?:{regex_of_lark(definition)})$"
    except LarkError as error:
        raise field_error(
            "tools",
            f"has {name!r:.80} with a grammar that cannot be enforced: {error}; change it, "
            "or use type text",
        ) from error


def input_of(arguments: str) -> str:
    """The input text in the arguments of a call; the arguments unchanged if they contain none."""
    try:
        found = json.loads(arguments)
    except ValueError:
        reader = InputReader()
        return reader.feed(arguments) or arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class InputReader:
    """Extracts the input text of a custom tool from streamed arguments."""

    def __init__(self) -> None:
        self.arguments = ""
        self._at = -1  # where the undecoded rest of the arguments begins; -1: before the text
        self._num_sent = 0

    def feed(self, piece: str) -> str:
        """Add a piece of the arguments and return the new part of the input text."""
        self.arguments += piece
        if self._at < 0:
            begun = BEGIN.match(self.arguments)
            if begun is None:
                return ""
            self._at = begun.end()
        found = PLAIN.match(self.arguments, self._at)
        assert found is not None
        self._at = found.end()
        text = str(json.loads(f'"{found[0]}"', strict=False))
        self._num_sent += len(text)
        return text

    def end(self) -> str:
        """Return the rest of the input text, which ``feed`` has not returned."""
        return input_of(self.arguments)[self._num_sent :]
