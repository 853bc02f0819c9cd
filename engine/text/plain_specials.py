"""Keeps the names of special tokens in users' messages from becoming special tokens.

A chat template writes special tokens around messages. If the same letters in a message became such
a token, a user could forge a system message. So a guard, a character that no message has, is
inserted into these letters before the template is rendered. Afterwards the guards are removed, and
the texts that had a guard are tokenised as plain text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, islice
from typing import Any

from engine.errors import RequestError
from engine.text.chat import Messages, plain
from engine.text.tokenizer import Tokenizer

NOTHING = re.compile(r"(?!)")
GUARDS = [chr(number) for number in range(0xE000, 0xF8FF)]  # private use: no text has all of them


def has_special_tokens(tokenizer: Tokenizer, messages: Messages, tools: Any = None) -> bool:
    """Whether the messages or tools contain the text of a special token."""
    pattern = _pattern(tokenizer)
    if pattern is None:
        return False
    return any(pattern.search(text) for text in _texts([list(messages), tools]))


def render_plainly(
    tokenizer: Tokenizer, messages: Messages, options: dict[str, Any], *, continues: bool = False
) -> Any:
    """Render a conversation so that no letters in its messages and tools become special tokens.
    Returns a dict with ``prompt`` and ``prompt_token_ids``.

    options: of ``Tokenizer.apply_chat_template``, which may raise. continues: end the prompt with
    the content of the last message, for the model to continue."""
    pattern = _pattern(tokenizer) or NOTHING
    given: dict[str, Any] = {"messages": list(messages), "tools": options.get("tools")}
    seen = set("".join(_texts(given)))
    guard, end = islice((char for char in GUARDS if char not in seen), 2)
    guarded = _replaced(plain(given), pattern, guard)
    options = {**options, "tools": guarded["tools"]}
    if continues:
        _append(guarded["messages"][-1], end)
    text = tokenizer.apply_chat_template(guarded["messages"], **options)
    if continues:
        text, found, _ = text.rpartition(end)
        if not found:
            raise RequestError(
                "the chat template drops the last message, so the answer cannot continue it: set "
                "continue_final_message to false",
                param="messages",
            )
    token_ids: list[int] = []
    for has_guard, parts in groupby(_split(pattern, text), key=lambda part: guard in part):
        part = "".join(parts)
        if has_guard:
            token_ids += tokenizer.backend.encode_plain(part.replace(guard, ""))
        else:
            token_ids += tokenizer.encode(part, add_special_tokens=False)
    return {"prompt": text.replace(guard, ""), "prompt_token_ids": token_ids}


def _append(message: dict[str, Any], text: str) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] += text
    elif content and content[-1].get("type") == "text":
        content[-1]["text"] += text
    else:
        content.append({"type": "text", "text": text})


@lru_cache(maxsize=8)
def _pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    added = tokenizer.added_tokens
    special = [text for text, token in added.items() if token.special and len(text) > 1]
    if not special:
        return None
    special.sort(key=len, reverse=True)
    return re.compile("|".join(map(re.escape, special)))


def _split(pattern: re.Pattern[str], text: str) -> Iterator[str]:
    """Split a text into special tokens (matches of ``pattern``) and the texts between them."""
    at = 0
    for match in pattern.finditer(text):
        if match.start() > at:
            yield text[at : match.start()]
        yield match[0]
        at = match.end()
    if at < len(text):
        yield text[at:]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _replaced(value: Any, pattern: re.Pattern[str], guard: str) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + guard + match[0][1:], value)
    if isinstance(value, dict):
        return {
            _replaced(key, pattern, guard): _replaced(item, pattern, guard)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_replaced(item, pattern, guard) for item in value]
    return value
