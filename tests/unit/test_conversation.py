"""Any conversation reaches any chat template, and nothing of it is lost."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from support.chat_templates import HERMES
from support.turn_templates import TEMPLATES, WITHOUT_TOOLS
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from engine.errors import RequestError
from engine.server.adapt import TOOL, Adapter, adapter_of, short_id, strictest
from engine.server.conversation import plain_messages
from engine.server.errors import ApiError
from engine.server.messages_body import MessagesRequest
from engine.server.messages_body import messages_of as messages_of_claude
from engine.server.responses_body import messages_of as messages_of_items
from engine.server.speech.generic import as_text
from engine.text.tokenizer import RustBackend, Tokenizer

U = {"role": "user", "content": "task"}
A = {"role": "assistant", "content": "done"}
S = {"role": "system", "content": "rules"}
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=36ee5;"


def call(name: str = "lookup", call_id: str = "toolu_01abcdefgh", **arguments: Any) -> Any:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def written(arguments: str) -> Any:
    """A call whose arguments are this text."""
    made = call()
    made["function"]["arguments"] = arguments
    return made


def result(content: str, call_id: str = "toolu_01abcdefgh") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


CALLS = {"role": "assistant", "content": None, "tool_calls": [call(key="value")]}


class Template:
    """A chat template, and conversations rendered by it as the server does."""

    def __init__(self, name: str, *, has_tools: bool = False) -> None:
        template = TEMPLATES.get(name, HERMES)
        self._tokenizer = Tokenizer(
            RustBackend(RustTokenizer(models.BPE())), {}, {"default": template}
        )
        self._is_generic = name in WITHOUT_TOOLS
        self._tools = [TOOL] if has_tools and not self._is_generic else None
        self.adapter: Adapter = adapter_of(self._tokenizer, None, self._tools is not None)
        self.adapter.learn()

    def prompt(self, given: list[dict[str, Any]]) -> str:
        messages = plain_messages(given, [])
        if self._is_generic:
            messages = as_text(messages, [])
        adapted = self.adapter.adapt(messages)
        assert adapted is not None
        try:
            return self.plain(adapted)
        except RequestError:
            return self.plain(strictest(adapted))

    def plain(self, messages: list[dict[str, Any]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=self._tools)


CONVERSATIONS = {
    "two system messages": [S, {"role": "developer", "content": "more"}, U],
    "a late system message": [U, A, S, U],
    "a system message at the end": [S, U, {"role": "system", "content": "agents"}],
    "nothing but a system message": [S],
    "two turns of the user": [U, {"role": "user", "content": "and this"}],
    "users with names": [{**U, "name": "ann"}, {"role": "user", "content": "too", "name": "bob"}],
    "the assistant first": [S, A, U],
    "nothing but the assistant": [A],
    "an empty turn of the user": [{"role": "user", "content": ""}, A, U],
    "an empty answer": [U, {"role": "assistant", "content": ""}, U],
    "no content": [U, {"role": "assistant", "content": None}, U],
    "thinking alone": [U, {"role": "assistant", "content": "", "reasoning_content": "hm"}, U],
    "a result": [U, CALLS, result("found")],
    "a result, and words after it": [
        U,
        CALLS,
        result("found"),
        {"role": "user", "content": "stop"},
    ],
    "thinking, words and a call": [
        U,
        {**CALLS, "content": "I look.", "reasoning_content": "Where?"},
        result("found"),
        A,
        {"role": "user", "content": "thanks"},
    ],
    "several calls, results in another order": [
        U,
        {**CALLS, "tool_calls": [call(call_id="one", key="k1"), call(call_id="two", key="k2")]},
        result("r2", "two"),
        result("r1", "one"),
        {"role": "user", "content": "well"},
    ],
    "a call without a result": [U, CALLS, {"role": "user", "content": "never mind"}],
    "a result without a call": [result("found"), U],
    "calls first": [CALLS, result("found"), A, U],
    "a call that broke off": [
        U,
        {"role": "assistant", "content": "", "tool_calls": [written('{"key": "val')]},
        result("found"),
    ],
    "a call with a list": [
        U,
        {"role": "assistant", "content": "", "tool_calls": [written("[1, 2]")]},
        result("found"),
    ],
    "a call with nothing": [
        U,
        {"role": "assistant", "content": "", "tool_calls": [written("")]},
        result("found"),
    ],
    "ids that are numbers": [
        U,
        {"role": "assistant", "content": "", "tool_calls": [{**call(key="v"), "id": 7}]},
        {"role": "tool", "tool_call_id": 7, "content": "found"},
    ],
    "functions as they were": [
        U,
        {"role": "assistant", "function_call": {"name": "lookup", "arguments": "{}"}},
        {"role": "function", "name": "lookup", "content": "found"},
    ],
}


def words_of(messages: list[dict[str, Any]]) -> list[str]:
    """All that is not the assistant's own, and what it called with."""
    said = [each["content"] for each in messages if each["role"] != "assistant"]
    calls = [each for message in messages for each in message.get("tool_calls", [])]
    return [*said, *(value for each in calls for value in values_of(each))]


def values_of(call: dict[str, Any]) -> list[str]:
    """What it was called with; of arguments that are no object, their letters."""
    arguments = call.get("function", {}).get("arguments", "{}")
    try:
        found = json.loads(arguments)
    except ValueError:
        found = None
    return list(found.values()) if isinstance(found, dict) else re.findall("[a-z]+", arguments)


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", [*TEMPLATES, "hermes"])
def test_any_conversation_reaches_any_template(
    name: str, conversation: str, has_tools: bool
) -> None:
    messages = CONVERSATIONS[conversation]
    prompt = Template(name, has_tools=has_tools).prompt(messages)
    for word in words_of(messages):
        assert word in prompt, prompt


@pytest.mark.parametrize("has_tools", [False, True])
@pytest.mark.parametrize("name", [*TEMPLATES, "hermes"])
def test_whatever_is_said_by_whom(name: str, has_tools: bool) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    template = Template(name, has_tools=has_tools)
    for _ in range(100):
        messages = drawn(dice)
        prompt = template.prompt(messages)
        assert all(word in prompt for word in words_of(messages)), messages


def drawn(dice: random.Random) -> list[dict[str, Any]]:
    """A conversation in which every text differs."""
    messages: list[dict[str, Any]] = []
    for at in range(dice.randint(1, 8)):
        role = dice.choice(["system", "developer", "user", "user", "assistant", "call", "tool"])
        word = f"Word{at}x"
        if role == "call":
            ids = [f"toolu_{at}_{n}" for n in range(dice.randint(1, 3))]
            calls = [call(call_id=each, key=f"{word}{each}") for each in ids]
            said = dice.choice([None, "", "I look."])
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            if dice.random() < 0.8:
                messages += [result(f"{word}r{n}", each) for n, each in enumerate(ids)]
        elif role == "tool":
            messages.append(result(word, "toolu_lost"))
        else:
            messages.append({"role": role, "content": dice.choice([word, word, ""])})
    return messages


ORDINARY = {
    "two turns": [U, A, {"role": "user", "content": "more"}],
    "a system message": [S, U, A, {"role": "user", "content": "more"}],
    "a call": [U, {"role": "assistant", "content": "", "tool_calls": [call(key="v")]}, result("r")],
}


@pytest.mark.parametrize("conversation", ORDINARY)
@pytest.mark.parametrize("name", [*TEMPLATES, "hermes"])
def test_what_a_template_takes_stays_as_it_is(name: str, conversation: str) -> None:
    template = Template(name)
    messages = plain_messages(ORDINARY[conversation], [])
    try:
        plain = template.plain(messages)
    except RequestError:
        return
    if all(word in plain for word in words_of(ORDINARY[conversation])):
        assert template.adapter.adapt(messages) == messages


def test_the_systems_words_come_first_and_in_order() -> None:
    messages = [
        U,
        {"role": "system", "content": "one"},
        A,
        {"role": "developer", "content": "two"},
        U,
    ]
    for name in ("qwen-3.5", "gpt-oss", "mistral-v3"):
        prompt = Template(name).prompt(messages)
        assert prompt.index("one\n\ntwo") < prompt.index("task"), name
    prompt = Template("gemma-2").prompt(messages)
    assert prompt.startswith("<start_of_turn>user\none\n\ntwo\n\ntask<end_of_turn>")
    late = Template("qwen-2.5").prompt(messages)
    assert "<|im_start|>system\none<|im_end|>" in late and late.startswith("<|im_start|>user\ntask")


def test_consecutive_turns_are_one() -> None:
    messages = plain_messages([U, U, A, CALLS, result("r"), {**A, "reasoning_content": "x"}, A], [])
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[0]["content"] == "task\ntask"
    assert messages[1]["content"] == "done" and len(messages[1]["tool_calls"]) == 1
    assert messages[3]["content"] == "done\ndone" and messages[3]["reasoning_content"] == "x"


def test_ids_are_short_where_they_must_be() -> None:
    assert short_id("abcdefgh1") == "abcdefgh1"
    made = short_id("toolu_01abcdefgh")
    assert made == short_id("toolu_01abcdefgh") != short_id("toolu_02abcdefgh")
    assert len(made) == 9 and made.isalnum()


@pytest.mark.parametrize("role", ["tool_response", "", None, 5, "System"])
def test_unknown_roles_are_refused(role: Any) -> None:
    with pytest.raises(ApiError, match=r"has a role .*must be one of: system, developer, user"):
        plain_messages([U, {"role": role, "content": "x"}], [])
    with pytest.raises(ApiError, match=r"must be one of: user, assistant, system(;|$)"):
        claude([{"role": role, "content": "x"}])
    with pytest.raises(ApiError, match="must be one of: user, assistant, system, developer"):
        messages_of_items([{"role": role, "content": "x"}])


def claude(messages: list[dict[str, Any]], system: Any = None) -> list[dict[str, Any]]:
    asked = MessagesRequest(model="m", messages=messages, system=system)
    return plain_messages(messages_of_claude(asked), [])


def text(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize(
    ("system", "kept"),
    [
        (BILLING, None),
        (text(BILLING), None),
        (f"{BILLING}\nYou are an agent.", "You are an agent."),
        (f"{BILLING}\n\nYou are an agent.", "You are an agent."),
        (text(BILLING, "You are an agent.", "Be brief."), "You are an agent.\nBe brief."),
        (text(f"{BILLING}\nYou are an agent."), "You are an agent."),
        (text("You are an agent.", BILLING), "You are an agent."),
        ("Say x-anthropic-billing-header: to them", "Say x-anthropic-billing-header: to them"),
    ],
)
def test_metadata_of_a_client_is_no_part_of_the_conversation(system: Any, kept: str | None) -> None:
    want = [] if kept is None else [{"role": "system", "content": kept}]
    assert claude([U], system) == [*want, U]
    assert claude([U, {"role": "system", "content": system}]) == [U, *want]
    if isinstance(system, str):
        assert plain_messages([{"role": "system", "content": system}, U], []) == [*want, U]
        items = [{"role": "developer", "content": system}, U]
        assert plain_messages(messages_of_items(items), []) == [*want, U]
    said = [{"role": "user", "content": BILLING}]
    assert claude(said) == said


def test_consecutive_turns_of_a_message_are_its_blocks() -> None:
    assert claude([U, U]) == claude([{"role": "user", "content": text("task", "task")}])
