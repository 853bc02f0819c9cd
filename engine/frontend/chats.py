"""Renders conversations to prompts, in text processes if the engine has any."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from engine.errors import WireError
from engine.frontend.text_workers import TextPool
from engine.messages.text import Rendering
from engine.text.chat import Messages, chat_values
from engine.text.tokenizer import Tokenizer

Begun = Callable[[], Rendering]
"""Function that returns a rendered conversation, waiting for another process if that renders it;
raises the error of the rendering."""


def render_chats(
    tokenizer: Tokenizer,
    pool: TextPool | None,
    conversations: Iterable[Messages],
    options: dict[str, Any],
) -> list[Rendering]:
    """Render conversations to texts and token ids. Special tokens come from the template only.

    ``options``: as for ``Tokenizer.apply_chat_template``. Raises the ``RequestError`` of the first
    conversation that cannot be rendered."""
    begun = [_begin(tokenizer, pool, messages, options) for messages in conversations]
    return [rendered() for rendered in begun]


def _begin(
    tokenizer: Tokenizer, pool: TextPool | None, messages: Messages, options: dict[str, Any]
) -> Begun:
    here = partial(_render_here, tokenizer, messages, options)
    if pool is None:
        return here
    try:
        inputs = tokenizer.chat_inputs(messages, **options)
        values = chat_values(inputs.messages, inputs.values)
        if _has_tuple(values):  # it would arrive as a list, which templates render differently
            return here
        future = pool.render(inputs.template, values)
    except Exception:  # raised again in order, since an earlier conversation may be invalid too
        return here
    return partial(_result, future.result, here)


def _result(elsewhere: Begun, here: Begun) -> Rendering:
    try:
        return elsewhere()
    except WireError:  # numbers or sizes that a message cannot hold
        return here()


def _render_here(tokenizer: Tokenizer, messages: Messages, options: dict[str, Any]) -> Rendering:
    text = tokenizer.apply_chat_template(messages, **options)
    return Rendering(text, tokenizer.encode(text, add_special_tokens=False))


def _has_tuple(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_has_tuple(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(_has_tuple(item) for item in value)
    return isinstance(value, tuple)
