"""Conversations as a model's chat template takes them.

Templates differ: some take one system message, at the beginning, or none at all; some want user and
assistant by turns, call ids of nine letters, one call at a time. What a template does not take it
refuses, or silently leaves out. So a template is tried once, with small conversations made of words
that it cannot know: for each ``Trait`` the mildest way is chosen with which nothing is refused and
nothing is lost. A conversation that a template takes as it is stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import string
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from engine.errors import RequestError
from engine.server.conversation import Message, joined_turns, thought_of, with_text
from engine.text.tokenizer import Tokenizer

Messages = list[Message]
Way = Callable[[Messages], Messages]
MAX_SECONDS = 2.0  # for trying one template
SHORT_ID = 9  # letters and digits of a call's id, all that Mistral's templates take
ALPHABET = string.digits + string.ascii_letters
WORDS = tuple(f"Wq{number}zk" for number in range(8))
"""Words that no template has."""
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
    """What templates differ in: conversations that show it, and what can be done, mildest first."""

    probes: tuple[Messages, ...]
    ways: tuple[Way, ...]


class Adapter:
    """What one chat template takes."""

    def __init__(self, render: Callable[[Messages], str]) -> None:
        """render: raises ``RequestError`` for what the template refuses."""
        self._render = render
        self._ways: list[Way] | None = None

    def adapt(self, messages: Messages) -> Messages | None:
        """The conversation as the template takes it; ``None`` if that must be learned first."""
        if self._ways is None:
            return messages if all(_is_the_same(messages, trait) for trait in TRAITS) else None
        return _after(self._ways, messages)

    def learn(self) -> None:
        """Try the template, which takes some milliseconds."""
        ends = time.monotonic() + MAX_SECONDS
        ways: list[Way] = []
        for trait in TRAITS:
            is_late = time.monotonic() > ends
            ways.append(trait.ways[0] if is_late else self._mildest(ways, trait))
        self._ways = ways

    def _mildest(self, before: list[Way], trait: Trait) -> Way:
        """The first of all if none helps: then it is not up to this trait."""
        for way in trait.ways:
            if all(self._takes(probe, [*before, way]) for probe in trait.probes):
                return way
        return trait.ways[0]

    def _takes(self, probe: Messages, ways: list[Way]) -> bool:
        """Whether all words that are not the assistant's reach the prompt."""
        try:
            prompt = self._render(_after(ways, probe))
        except RequestError:
            return False
        return all(word in prompt for word in _words_of(probe))


def strictest(messages: Messages) -> Messages:
    """For a template that refuses a conversation for reasons that no trial has shown."""
    traits = (OF_SYSTEM, *OF_TURNS, OF_ARGUMENTS, OF_OPEN_CALLS)
    return _after([trait.ways[-1] for trait in traits], messages)


@lru_cache(maxsize=16)
def adapter_of(tokenizer: Tokenizer, chat_template: str | None, has_tools: bool) -> Adapter:
    """chat_template: instead of the model's own."""
    tools = [TOOL] if has_tools else None
    render = partial(tokenizer.apply_chat_template, chat_template=chat_template, tools=tools)
    return Adapter(render)


def _after(ways: Iterable[Way], messages: Messages) -> Messages:
    for way in ways:
        messages = way(messages)
    return messages


def _is_the_same(messages: Messages, trait: Trait) -> bool:
    return all(way(messages) == messages for way in trait.ways)


def _words_of(messages: Messages) -> list[str]:
    texts = [message["content"] or "" for message in messages if message["role"] != "assistant"]
    texts += [json.dumps(message.get("tool_calls")) for message in messages]
    written = " ".join(texts)
    return [word for word in WORDS if word in written]


# Ways. Each returns the same messages where there is nothing to do.


def as_it_is(messages: Messages) -> Messages:
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
    """A short id; equal ids get equal ones."""
    if not isinstance(name, str) or (len(name) == SHORT_ID and name.isalnum() and name.isascii()):
        return name
    number = int.from_bytes(hashlib.sha256(name.encode()).digest())
    letters = []
    for _ in range(SHORT_ID):
        number, at = divmod(number, len(ALPHABET))
        letters.append(ALPHABET[at])
    return "".join(letters)


def with_written_arguments(messages: Messages) -> Messages:
    """Arguments of calls as JSON text, which some templates add to texts."""
    return [
        {**message, "tool_calls": [_written(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def with_object_arguments(messages: Messages) -> Messages:
    """Arguments that are no object, as those of a call that broke off, are a member of one."""
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
    """A message with calls has no text: the text before them becomes its own message."""
    found = []
    for message in messages:
        if message.get("tool_calls"):
            if message["content"]:
                found.append({k: v for k, v in message.items() if k != "tool_calls"})
            message = {**message, "content": None}
        found.append(message)
    return found


def with_words_in_thinking(messages: Messages) -> Messages:
    """A message that calls has thinking or a text, not both."""
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
    """Each call in a message of its own, its result after it."""
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


def with_lost_results_as_words(messages: Messages) -> Messages:
    """A result without a call before it becomes a message of the user."""
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


def with_words_in_results(messages: Messages) -> Messages:
    """What the user says after a result is a part of it."""
    found: Messages = []
    for message in messages:
        if message["role"] == "user" and found and found[-1]["role"] == "tool":
            found[-1] = with_text(found[-1], message["content"], "\n\n")
        else:
            found.append(message)
    return found


def with_bridges(messages: Messages, words: str = "") -> Messages:
    """With a message of the assistant between a tool call and the next turn of the user."""
    found: Messages = []
    for message in messages:
        is_open = bool(found) and (found[-1].get("tool_calls") or found[-1]["role"] == "tool")
        if message["role"] == "user" and is_open:
            found.append({"role": "assistant", "content": words})
        found.append(message)
    return found


def with_system_first(messages: Messages) -> Messages:
    """One system message, at the beginning."""
    systems = [message for message in messages if message["role"] == "system"]
    if not systems or (len(systems) == 1 and messages[0] is systems[0]):
        return messages
    text = "\n\n".join(message["content"] for message in systems if message["content"])
    others = joined_turns(message for message in messages if message["role"] != "system")
    return [{**systems[0], "content": text}, *others]


def with_system_in_user(messages: Messages) -> Messages:
    """The system's text begins the first turn of the user."""
    messages = with_system_first(messages)
    if not messages or messages[0]["role"] != "system":
        return messages
    text, others = messages[0]["content"], messages[1:]
    if not others or others[0]["role"] != "user":
        return [{"role": "user", "content": text}, *others]
    whole = "\n\n".join(filter(None, [text, others[0]["content"]]))
    return [{**others[0], "content": whole}, *others[1:]]


def with_some_user(messages: Messages) -> Messages:
    """Without any turn of the user there is one: the system's words if they are all, or nothing."""
    roles = {message["role"] for message in messages}
    if "user" in roles:
        return messages
    if roles == {"system"}:
        return [{**message, "role": "user"} for message in messages]
    return with_user_first(messages)


def with_user_first(messages: Messages) -> Messages:
    """The user begins, if with nothing."""
    at = 1 if messages and messages[0]["role"] == "system" else 0
    if len(messages) > at and messages[at]["role"] == "user":
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def without_empty_answers(messages: Messages) -> Messages:
    """An answer without any text is left out."""
    kept = [
        message
        for message in messages
        if message["role"] != "assistant" or message["content"] or message.get("tool_calls")
    ]
    return messages if len(kept) == len(messages) else joined_turns(kept)


def with_turns_of_anybody(messages: Messages) -> Messages:
    return joined_turns(messages, whoever=True)


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
    (as_it_is, with_system_first, with_system_in_user),
)
BROKEN = _assistant("", B)
BROKEN["tool_calls"][0]["function"]["arguments"] = f'{{"key": "{B}'
OF_ARGUMENTS = Trait(
    ([_user(A), BROKEN, _result(C, B)],),
    (as_it_is, with_object_arguments),
)
OF_TOOLS = (
    Trait(
        (CALLED,),
        (
            as_it_is,
            with_short_ids,
            with_written_arguments,
            lambda messages: with_short_ids(with_written_arguments(messages)),
            lambda messages: with_calls_alone(with_written_arguments(messages)),
        ),
    ),
    OF_ARGUMENTS,
    Trait((TEXT_AND_CALL,), (as_it_is, with_calls_alone)),
    Trait((THOUGHT,), (as_it_is, with_words_in_thinking)),
    Trait(
        ([_user(A), _assistant("", B, C), _result(D, B), _result(E, C)],),
        (as_it_is, with_one_call_each),
    ),
)
OF_TURNS = (
    Trait(([_result(A, B)], [_user(C), _result(A, B)]), (as_it_is, with_lost_results_as_words)),
    Trait(
        ([*CALLED, _user(D)], [*CALLED, _user(D), _assistant(E), _user(F)]),
        (as_it_is, with_words_in_results),
    ),
    Trait(([_system(A)],), (as_it_is, with_some_user)),
    Trait(
        ([_assistant(A), _user(B)], [_system(C), _assistant(A), _user(B)]),
        (as_it_is, with_user_first),
    ),
    Trait(([_user(A), _assistant(""), _user(B)],), (as_it_is, without_empty_answers)),
    Trait(([_user(A, name="ann"), _user(B, name="bob")],), (as_it_is, with_turns_of_anybody)),
)
OF_OPEN_CALLS = Trait(
    ([_user(A), _assistant("", B), _user(C)],),
    (as_it_is, with_bridges, partial(with_bridges, words="...")),
)
OF_FIRST_CALLS = Trait(
    ([_assistant("", A), _result(B, A), _assistant(C), _user(D)],), (as_it_is, with_user_first)
)
TRAITS = (
    OF_SYSTEM,
    *OF_TURNS,
    *OF_TOOLS,
    OF_FIRST_CALLS,
    OF_OPEN_CALLS,
)  # those last that part what others join
