"""Tools, calls and results reach chat templates that know none of them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from engine.server.adapt import adapter_of
from engine.server.speech.generic import as_text, call_text
from engine.text.tokenizer import RustBackend, Tokenizer

TURN = "<|{{ m.role }}|>{{ m.content }}\n"
REFUSE = "{{ raise_exception('no') }}"
ALTERNATING = f"{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}{REFUSE}{{% endif %}}"
TEMPLATES = {
    "every role": f"{{% for m in messages %}}{TURN}{{% endfor %}}",
    "no system": "{% for m in messages %}{% if m.role == 'system' %}"
    f"{REFUSE}{{% endif %}}{ALTERNATING}{TURN}{{% endfor %}}",
    "system left out": "{% for m in messages if m.role != 'system' %}"
    f"{ALTERNATING}{TURN}{{% endfor %}}",
    "two roles": "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    f"{REFUSE}{{% endif %}}{TURN}{{% endfor %}}",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a day",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALLS = [
    {"id": f"c{n}", "function": {"name": "weather", "arguments": {"city": city}}}
    for n, city in enumerate(["Rome", "Köln"])
]
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c0", "content": "sunny"},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    {"role": "user", "content": "Shorter"},
]
SYSTEM = {"role": "system", "content": "Be brief"}


def rendered(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    tokenizer = Tokenizer(
        RustBackend(RustTokenizer(models.BPE())), {}, {"default": TEMPLATES[name]}
    )
    adapter = adapter_of(tokenizer, None, False)
    adapter.learn()
    adapted = adapter.adapt(as_text(messages, tools))
    assert adapted is not None
    return tokenizer.apply_chat_template(adapted)


@pytest.mark.parametrize("name", TEMPLATES)
def test_tools_calls_and_results_are_words(name: str) -> None:
    text = rendered(name, [SYSTEM, *TALK], [TOOL])
    assert text.index("Be brief") < text.index('{"name": "weather", "description"')
    assert text.index('"Weather of a day"') < text.index("How is it?")
    written = "\n".join(call_text("weather", {"city": city}) for city in ("Rome", "Köln"))
    assert f"<|assistant|>Let me see.\n{written}\n" in text
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert text.endswith(f"<|user|>{results}\nShorter\n")
    assert ("<|system|>" in text) == (name == "every role")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_with_calls_goes_on_without_tools(name: str) -> None:
    text = rendered(name, TALK, [])
    assert text.startswith("<|user|>How is it?\n<|assistant|>Let me see.\n<tool_call>")
    assert "<tools>" not in text and text.endswith("Shorter\n")


def test_words_alone_stay_as_they_are() -> None:
    messages = [SYSTEM, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": ""}]
    assert as_text(messages, []) == messages
