"""Renders chat templates: Jinja in a sandbox, with the filters and names that templates expect.

The result equals that of transformers' ``apply_chat_template``. Templates are third-party code:
they see only plain data, cannot reach other Python objects, and are limited in time and size
(``sandbox``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from engine.config.model import read_json
from engine.errors import ModelError, RequestError, RequestTypeError
from engine.text.sandbox import BUDGET, MAX_SECONDS, BoundedEnvironment, Budget, bounded_filter

Messages = Sequence[Mapping[str, Any]]
"""One conversation: ``{"role": ..., "content": ...}`` and any other keys the template reads."""

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


def read_templates(root: Path, options: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates of a model directory by name, the usual one as ``"default"``.

    Files override ``chat_template`` in tokenizer_config.json; that of a model with images may be in
    chat_template.json."""
    files = {
        path.stem: path for path in sorted((root / "additional_chat_templates").glob("*.jinja"))
    }
    files["default"] = root / "chat_template.jinja"
    found = {name: _read_template(path) for name, path in files.items() if path.is_file()}
    own = (read_json(root / "chat_template.json") or options).get("chat_template")
    return found or _templates_in(own, root)


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is damaged: {error}") from error


def _templates_in(value: Any, root: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, dict):
        return dict(value)
    try:
        return {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"chat_template in {root / 'tokenizer_config.json'} must be a template or a list of "
            "named templates"
        ) from error


def render_chat(template: str, messages: Messages, values: dict[str, Any]) -> str:
    """Render a conversation. Raises ``RequestError`` if the template refuses it."""
    return fill_template(template, chat_values(messages, values))


def chat_values(messages: Messages, values: dict[str, Any]) -> dict[str, Any]:
    """Return all variables of a template as plain data. Raises ``RequestError`` if invalid."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        message = f"a conversation must be a list of messages, got {messages!r:.100}"
        raise RequestTypeError(message, param="messages")
    chat = [_plain_message(message) for message in messages]
    try:
        return {**plain(values), "messages": chat}
    except RecursionError as error:
        raise _refusal(error) from error


def fill_template(template: str, values: dict[str, Any], seconds: float = MAX_SECONDS) -> str:
    """Render a template. Raises ``RequestError`` if it refuses these values, or takes longer than
    ``seconds``."""
    try:
        return str(compile_template(template).render({**values, BUDGET: Budget(seconds)}))
    except Exception as error:  # third-party code may raise anything
        raise _refusal(error) from error


def _refusal(error: Exception) -> RequestError:
    # The error that Python raises depends on the depth of the recursion.
    is_endless = isinstance(error, RecursionError)
    why = "it is nested too deeply, or calls itself without end" if is_endless else str(error)
    return RequestError(f"the chat template refuses this conversation: {why}", param="messages")


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise RequestError(
            f'a message must be {{"role": ..., "content": ...}}, got {message!r:.100}',
            param="messages",
        )
    copy: dict[str, Any] = plain(message)
    reasoning = next((copy[n] for n in REASONING_NAMES if copy.get(n) is not None), None)
    if reasoning is not None:  # templates read either of two names
        copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
    return copy


def plain(value: Any) -> Any:
    """Copy a value as plain JSON types, so that a template cannot call its methods."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    return f"<{type(value).__name__}>"


@lru_cache(maxsize=16)
def compile_template(source: str) -> Any:
    """Compile a chat template. Raises ``TemplateError`` if it is not valid Jinja."""
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = bounded_filter(_to_json, is_sized=True)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class Generation(Extension):
    """Accepts ``{% generation %}``, which marks the model's text for training; has no effect."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON. Unlike Jinja's own filter, it does not escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
