"""Change a conversation into what the model's chat template accepts.

Templates differ: some accept one system message at the beginning, or none; some require alternating
user and assistant turns, call ids of nine letters, or one tool call per message. Anything else
raises an error or is silently dropped. So each template is tried once with small probe
conversations. For each ``Trait`` the first rewrite is chosen with which the template raises no
error and the prompt contains all words of the probe.
"""

from __future__ import annotations

import hashlib
import json
import string
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from engine.errors import RequestError
from engine.pictures.sources import Given
from engine.server.conversation import Message, joined_turns, thought_of, with_text
from engine.server.picture_parts import (
    FIRST,
    MARK,
    has_marks,
    with_parts,
    with_pictures_after_results,
)
from engine.text.tokenizer import Tokenizer

Messages = list[Message]
Rewrite = Callable[[Messages], Messages]
MAX_SECONDS = 2.0  # for trying one template
SHORT_ID = 9  # length of a tool call's id that Mistral's templates require
ALPHABET = string.digits + string.ascii_letters
WORDS = tuple(f"Wq{number}zk" for number in range(8))
"""Words of the probe conversations, which no template contains."""
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks it up",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string"}},
            "required": ["key"],
        },
    },
}


class Trait(NamedTuple):
    """A difference between templates: conversations to detect it, and rewrites to try."""

    probes: tuple[Messages, ...]
    rewrites: tuple[Rewrite, ...]


class Adapter:
    """Rewrites conversations for one chat template."""

    def __init__(self, render: Callable[[Messages], str], *, shows: bool = False) -> None:
        """render: fills the template and returns the prompt, or raises ``RequestError``; shows:
        the model reads pictures, so that contents may be lists of parts."""
        self._render = render
        self._traits = (*TRAITS, OF_SHOWN_RESULTS) if shows else TRAITS
        self._shows = shows
        self._needs_parts = False  # the template drops contents that are texts
        self._rewrites: list[Rewrite] | None = None
        self.shows_pictures = False
        """Whether the template has a place for pictures; known once ``learn`` was called."""

    def adapt(self, messages: Messages) -> Messages | None:
        """Rewrite a conversation for the template; ``None`` if ``learn`` must be called first."""
        if self._rewrites is None:
            is_plain = not self._shows and all(_leaves(messages, trait) for trait in TRAITS)
            return messages if is_plain else None
        return _rewritten(self._rewrites, messages)

    def learn(self) -> None:
        """Choose the rewrites by trying the template, which takes some milliseconds."""
        ends = time.monotonic() + MAX_SECONDS
        chosen: list[Rewrite] = []
        if self._shows and not self._accepts([_user(A)], []):
            self._needs_parts = True
        for trait in self._traits:
            is_late = time.monotonic() > ends
            chosen.append(trait.rewrites[0] if is_late else self._smallest(chosen, trait))
        self.shows_pictures = self._shows and self._accepts([_user(f"{A}{chr(FIRST)}")], chosen)
        self._rewrites = chosen

    def with_parts(self, messages: Messages, pictures: Sequence[Given] = ()) -> Messages:
        """The rewritten messages with parts in place of marks, and of texts if the template needs
        that. pictures: put into the parts."""
        return with_parts(messages, pictures, all_texts=self._needs_parts)

    def _smallest(self, before: list[Rewrite], trait: Trait) -> Rewrite:
        """Return the trait's first rewrite with which the template accepts all probe conversations,
        or its first one. ``before``: rewrites that are applied earlier."""
        for rewrite in trait.rewrites:
            if all(self._accepts(probe, [*before, rewrite]) for probe in trait.probes):
                return rewrite
        return trait.rewrites[0]

    def _accepts(self, probe: Messages, rewrites: list[Rewrite]) -> bool:
        """Whether the template renders the rewritten conversation without an error and with all its
        words, except those of the assistant."""
        try:
            prompt = self._render(self.with_parts(_rewritten(rewrites, probe)))
            if any(map(has_marks, probe)):
                bare = self.with_parts(_rewritten(rewrites, [_without_marks(m) for m in probe]))
                # A template that shows no pictures drops them, or writes the parts as they are.
                if prompt == self._render(bare) or "'image'" in prompt or '"image"' in prompt:
                    return False
        except RequestError:
            return False
        return all(word in prompt for word in _words_of(probe))


def strictest(messages: Messages) -> Messages:
    """Rewrite a conversation as the strictest templates need it, for a template that accepted the
    probes but refuses this conversation."""
    traits = (OF_SYSTEM, *OF_TURNS, OF_ARGUMENTS, OF_OPEN_CALLS)
    return _rewritten([trait.rewrites[-1] for trait in traits], messages)


@lru_cache(maxsize=16)
def adapter_of(
    tokenizer: Tokenizer, chat_template: str | None, has_tools: bool, *, shows: bool = False
) -> Adapter:
    """The adapter for ``chat_template`` or, if it is ``None``, for the model's own template.
    shows: whether the model reads pictures."""
    tools = [TOOL] if has_tools else None
    render = partial(tokenizer.apply_chat_template, chat_template=chat_template, tools=tools)
    return Adapter(render, shows=shows)


def _rewritten(rewrites: Iterable[Rewrite], messages: Messages) -> Messages:
    for rewrite in rewrites:
        messages = rewrite(messages)
    return messages


def _leaves(messages: Messages, trait: Trait) -> bool:
    """True if the rewrites of this trait leave the conversation unchanged."""
    return all(rewrite(messages) == messages for rewrite in trait.rewrites)


def _words_of(messages: Messages) -> list[str]:
    texts = [message["content"] or "" for message in messages if message["role"] != "assistant"]
    texts += [json.dumps(message.get("tool_calls")) for message in messages]
    written = " ".join(texts)
    return [word for word in WORDS if word in written]


def _without_marks(message: Message) -> Message:
    return {**message, "content": MARK.sub("", message["content"])}


# Rewrites. Each returns equal messages if there is nothing to change.


def unchanged(messages: Messages) -> Messages:
    return messages


def with_short_ids(messages: Messages) -> Messages:
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        if calls:
            message = {**message, "tool_calls": [{**c, "id": short_id(c["id"])} for c in calls]}
        elif message.get("tool_call_id"):
            message = {**message, "tool_call_id": short_id(message["tool_call_id"])}
        found.append(message)
    return found


def short_id(name: Any) -> Any:
    """An id of nine characters made by hashing ``name``, so that equal ids stay equal."""
    if not isinstance(name, str) or (len(name) == SHORT_ID and name.isalnum() and name.isascii()):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode()).digest())
    letters = []
    for _ in range(SHORT_ID):
        number, at = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[at])
    return "".join(letters)


def with_written_arguments(messages: Messages) -> Messages:
    """Write call arguments as JSON text, for templates that concatenate them with text."""
    return [
        {**message, "tool_calls": [_written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_object_arguments(messages: Messages) -> Messages:
    """Wrap call arguments that are no JSON object, e.g. of a truncated call, in an object."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": {"arguments": arguments}}}


def _written(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def with_calls_alone(messages: Messages) -> Messages:
    """Split each message with text and tool calls into a text message and a call message."""
    found = []
    for message in messages:
        if message.get("tool_calls"):
            if message["content"]:
                found.append({k: v for k, v in message.items() if k != "tool_calls"})
            message = {**message, "content": None}
        found.append(message)
    return found


def with_text_in_thinking(messages: Messages) -> Messages:
    """If a message has tool calls, thinking and text, move the text to the end of the thinking."""
    found = []
    for message in messages:
        thought = thought_of(message)
        if message.get("tool_calls") and message["content"] and thought:
            whole = f"{thought}\n{message['content']}"
            message = {**message, "content": "", "reasoning_content": whole}
            message = {k: v for k, v in message.items() if k not in ("thinking", "reasoning")}
        found.append(message)
    return found


def with_one_call_each(messages: Messages) -> Messages:
    """Split messages with several tool calls: one call per message, followed by its result."""
    found: Messages = []
    at = 0
    while at < len(messages):
        message = messages[at]
        calls = message.get("tool_calls") or []
        at += 1
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            about = message if number == 0 else {"role": "assistant", "content": ""}
            found.append({**about, "tool_calls": [call]})
            own = [each for each in results if each.get("tool_call_id") == call.get("id")]
            found += own
            results = [each for each in results if each not in own]
        found += results
    return found


def with_lost_results_as_text(messages: Messages) -> Messages:
    """Turn each tool result that follows no tool call into a user message."""
    found: Messages = []
    was_called = False
    for message in messages:
        if message["role"] == "tool" and not was_called:
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            found.append({"role": "user", "content": text})
            continue
        was_called = bool(message.get("tool_calls")) or message["role"] == "tool"
        found.append(message)
    return found if found == messages else joined_turns(found)


def with_text_in_results(messages: Messages) -> Messages:
    """Append the text of a user message that follows a tool result to that result."""
    found: Messages = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = with_text(found[-1], message["content"], "\n\n")
        else:
            found.append(message)
    return found


def with_bridges(messages: Messages, words: str = "") -> Messages:
    """Insert an assistant message (``words``) between a tool call or result and a user message."""
    found: Messages = []
    for message in messages:
        is_open = bool(found) and (found[-1].get("tool_calls") or found[-1]["role"] == "tool")
        if message["role"] == "user" and is_open:
            found.append({"role": "assistant", "content": words})
        found.append(message)
    return found


def with_system_first(messages: Messages) -> Messages:
    """Join all system messages into one at the beginning."""
    systems = [message for message in messages if message["role"] == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    text = "\n\n".join(message["content"] for message in systems if message["content"])
    others = joined_turns(message for message in messages if message["role"] != "system")
    return [{**systems[0], "content": text}, *others]


def with_system_in_user(messages: Messages) -> Messages:
    """Put the system text at the beginning of the first user message."""
    messages = with_system_first(messages)
    if not messages or messages[0]["role"] != "system":
        return messages
    text, others = messages[0]["content"], messages[1:]
    if not others or others[0]["role"] != "user":
        return [{"role": "user", "content": text}, *others]
    whole = "\n\n".join(filter(None, [text, others[0]["content"]]))
    return [{**others[0], "content": whole}, *others[1:]]


def with_some_user(messages: Messages) -> Messages:
    """If there is no user message, insert an empty one; a lone system message becomes a user
    message."""
    roles = {message["role"] for message in messages}
    if "user" in roles:
        return messages
    if roles == {"system"}:
        return [{**message, "role": "user"} for message in messages]
    return with_user_first(messages)


def with_user_first(messages: Messages) -> Messages:
    """Insert an empty user message if the first message after the system message is not a
    user's."""
    at = 1 if messages and messages[0]["role"] == "system" else 0
    if len(messages) > at and messages[at]["role"] == "user":
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def without_empty_answers(messages: Messages) -> Messages:
    """Drop assistant messages that have neither text nor calls."""
    kept = [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or message.get("tool_calls")
    ]
    return messages if len(kept) == len(messages) else joined_turns(kept)


def with_all_turns_joined(messages: Messages) -> Messages:
    return joined_turns(messages, ignore_names=True)


def _system(word: str) -> Message:
    return {"role": "system", "content": word}


def _user(word: str, **about: str) -> Message:
    return {"role": "user", "content": word, **about}


def _assistant(word: str, *called: str, **about: str) -> Message:
    calls = [
        {
            "id": f"call_{word}",
            "type": "function",
            "function": {"name": "lookup", "arguments": {"key": word}},
        }
        for word in called
    ]
    return {
        "role": "assistant",
        "content": word,
        **({"tool_calls": calls} if calls else {}),
        **about,
    }


def _result(word: str, called: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{called}", "name": "lookup", "content": word}


A, B, C, D, E, F = WORDS[:6]
CALLED = [_user(A), _assistant("", B), _result(C, B)]
TEXT_AND_CALL = [_user(A), _assistant(D, B), _result(C, B)]
THOUGHT = [_user(A), _assistant(D, B, reasoning_content=E), _result(C, B)]
OF_SYSTEM = Trait(
    (
        [_system(A), _system(B), _user(C), _assistant(D), _system(E), _user(F)],
        [_user(A), _system(B)],
    ),
    (unchanged, with_system_first, with_system_in_user),
)
BROKEN = _assistant("", B)
BROKEN["tool_calls"][0]["function"]["arguments"] = f'{{"key": "{B}'
OF_ARGUMENTS = Trait(
    ([_user(A), BROKEN, _result(C, B)],),
    (unchanged, with_object_arguments),
)
OF_TOOLS = (
    Trait(
        (CALLED,),
        (
            unchanged,
            with_short_ids,
            with_written_arguments,
            lambda messages: with_short_ids(with_written_arguments(messages)),
            lambda messages: with_calls_alone(with_written_arguments(messages)),
        ),
    ),
    OF_ARGUMENTS,
    Trait((TEXT_AND_CALL,), (unchanged, with_calls_alone)),
    Trait((THOUGHT,), (unchanged, with_text_in_thinking)),
    Trait(
        ([_user(A), _assistant("", B, C), _result(D, B), _result(E, C)],),
        (unchanged, with_one_call_each),
    ),
)
OF_TURNS = (
    Trait(([_result(A, B)], [_user(C), _result(A, B)]), (unchanged, with_lost_results_as_text)),
    Trait(
        ([*CALLED, _user(D)], [*CALLED, _user(D), _assistant(E), _user(F)]),
        (unchanged, with_text_in_results),
    ),
    Trait(([_system(A)],), (unchanged, with_some_user)),
    Trait(
        ([_assistant(A), _user(B)], [_system(C), _assistant(A), _user(B)]),
        (unchanged, with_user_first),
    ),
    Trait(([_user(A), _assistant(""), _user(B)],), (unchanged, without_empty_answers)),
    Trait(([_user(A, name="ann"), _user(B, name="bob")],), (unchanged, with_all_turns_joined)),
)
OF_OPEN_CALLS = Trait(
    ([_user(A), _assistant("", B), _user(C)],),
    (unchanged, with_bridges, partial(with_bridges, words="...")),
)
OF_FIRST_CALLS = Trait(
    ([_assistant("", A), _result(B, A), _assistant(C), _user(D)],), (unchanged, with_user_first)
)
OF_SHOWN_RESULTS = Trait(
    ([_user(A), _assistant("", B), _result(f"{C}{chr(FIRST)}", B)],),
    (unchanged, with_pictures_after_results),
)
TRAITS = (
    OF_SYSTEM,
    *OF_TURNS,
    *OF_TOOLS,
    OF_FIRST_CALLS,
    OF_OPEN_CALLS,
)  # in the order in which they are applied: rewrites that split messages after those that join
