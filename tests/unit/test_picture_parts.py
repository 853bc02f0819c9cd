"""Pictures in conversations reach any chat template, in the order of the conversation."""

from __future__ import annotations

from typing import Any

import pytest
from support.chat_templates import HERMES
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models

from engine.errors import RequestError
from engine.pictures.chat import taken
from engine.pictures.sources import Given
from engine.server.adapt import TOOL, Adapter, adapter_of
from engine.server.conversation import plain_messages
from engine.server.errors import ApiError
from engine.server.messages_body import MessagesRequest
from engine.server.messages_body import messages_of as messages_of_claude
from engine.server.ollama.turns import messages_of as messages_of_ollama
from engine.server.responses_items import messages_of as messages_of_items
from engine.text.plain_specials import render_plainly
from engine.text.tokenizer import RustBackend, Tokenizer

# Templates of published models: the first and the third drop contents that are texts.
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
MIXED = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
)
LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}"
    "{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}"
    "{{ '<image>\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' '}}{% endfor %}{% endfor %}"
)
NO_RESULTS = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'tool' or m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}<image>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
)
SHOWING = {"smolvlm": SMOLVLM, "mixed": MIXED, "llava": LLAVA, "no results": NO_RESULTS}


class Showing:
    """A chat template of a model that reads pictures."""

    def __init__(self, template: str, *, has_tools: bool = False, shows: bool = True) -> None:
        backend = RustBackend(RustTokenizer(models.BPE()))
        self.tokenizer = Tokenizer(backend, {}, {"default": template})
        self._tools = [TOOL] if has_tools else None
        self.adapter: Adapter = adapter_of(self.tokenizer, None, has_tools, shows=shows)
        self.adapter.learn()

    def prompt(self, given: list[dict[str, Any]]) -> tuple[str, list[Any]]:
        """The rendered prompt, and the pictures in the order of its image tokens."""
        pictures: list[Given] = []
        adapted = self.adapter.adapt(plain_messages(given, pictures))
        assert adapted is not None
        messages, shown = taken(self.adapter.with_parts(adapted, pictures))
        text = self.tokenizer.apply_chat_template(messages, tools=self._tools)
        return text, [each.value for each in shown]


def image(url: str = "data:1") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize("name", SHOWING)
def test_texts_and_pictures_are_in_the_prompt(name: str) -> None:
    given = [
        {"role": "system", "content": "rules"},
        user(words("first"), image("1"), words("second"), image("2")),
        {"role": "assistant", "content": "answer"},
        user(image("3"), words("third")),
    ]
    text, shown = Showing(SHOWING[name]).prompt(given)
    assert shown == ["1", "2", "3"]
    assert text.count("<image>") == 3
    assert all(word in text for word in ("rules", "first", "second", "answer", "third"))
    text, shown = Showing(SHOWING[name]).prompt([{"role": "user", "content": "only text"}])
    assert ("only text" in text, shown) == (True, [])


CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize("name", ["mixed", "no results"])
def test_pictures_of_tool_results(name: str) -> None:
    """In the result, or after it where the template shows none there."""
    result = {"role": "tool", "tool_call_id": "c", "content": [words("seen"), image("1")]}
    text, shown = Showing(SHOWING[name], has_tools=True).prompt(
        [user(words("look"), image("0")), CALL, result, user(words("and?"), image("2"))]
    )
    assert shown == ["0", "1", "2"]
    assert text.count("<image>") == 3
    assert "tool: seen<image>" in text if name == "mixed" else "tool: seenuser: <image>" in text


def test_a_template_without_a_place_for_pictures_is_noticed() -> None:
    assert all(Showing(each).adapter.shows_pictures for each in SHOWING.values())
    for template in (HERMES, "{% for m in messages %}{{ m.content }}{% endfor %}"):
        assert not Showing(template).adapter.shows_pictures


def test_a_text_model_gets_texts() -> None:
    template = Showing(HERMES, has_tools=True, shows=False)
    given = [{"role": "user", "content": "hello"}]
    assert template.adapter.with_parts(given) == given


def test_a_begun_answer_is_continued_in_parts() -> None:
    template = Showing(SMOLVLM)
    messages = template.adapter.with_parts(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    )
    options = {"add_generation_prompt": False}
    rendered = render_plainly(template.tokenizer, messages, options, continues=True)
    assert rendered["prompt"] == "<|im_start|>User: hi<end_of_utterance>\nAssistant: well"


def test_characters_of_arguments_are_no_pictures() -> None:
    """JSON within a text may have half of a surrogate pair, which other texts cannot."""
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": '{"a":"\\udc00"}'},
    }
    given = [user(image("1")), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert Showing(MIXED).prompt(given)[1] == ["1"]


def of_claude(content: Any) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": content}]
    return messages_of_claude(MessagesRequest(model="", messages=messages))


INLINE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "YQ=="}}
BY_URL = {"type": "image", "source": {"type": "url", "url": "http://a.example/b"}}
DATA = "data:image/png;base64,YQ=="


def test_each_api_has_its_form_of_pictures() -> None:
    found: list[Any] = []
    for messages in (
        of_claude([words("a"), words("b"), INLINE, words("c"), BY_URL]),
        messages_of_items(
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "a\nb"},
                        {"type": "input_image", "image_url": DATA, "detail": "low"},
                        {"type": "input_text", "text": "c"},
                        {"type": "input_image", "image_url": "http://a.example/b"},
                    ],
                }
            ]
        ),
        [user(words("a\nb"), image(DATA), words("c"), image("http://a.example/b"))],
    ):
        pictures: list[Given] = []
        (message,) = plain_messages(messages, pictures)
        found.append(message["content"])
        assert [each.value for each in pictures] == [DATA, "http://a.example/b"]
    assert set(found) == {"a\nb\udc00c\udc01"}
    given = [{"role": "user", "content": "a", "images": ["YQ=="]}]
    pictures = []
    (message,) = plain_messages(messages_of_ollama(given), pictures)
    assert (message["content"], pictures[0].value) == ("\udc00a", "data:;base64,YQ==")


def test_results_of_claude_have_pictures() -> None:
    def result(content: Any, **about: Any) -> Any:
        block = {"type": "tool_result", "tool_use_id": "t", "content": content, **about}
        return of_claude([block])[0]["content"]

    shown = result([words("a"), words("b"), INLINE])
    assert [each["type"] for each in shown] == ["text", "image_url"]
    assert shown[0]["text"] == "a\nb"
    assert result([words("a"), words("b")], is_error=True) == "Error: a\nb"
    assert result("a", is_error=True) == "Error: a"
    assert result([]) == ""
    assert [e["type"] for e in result([INLINE], is_error=True)] == ["text", "image_url"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"type": "file", "file_id": "file_9"}, "file_id 'file_9'"),
        ({"type": "base64", "media_type": "image/tiff", "data": "YQ=="}, "media_type 'image/tiff'"),
        ({"type": "base64", "media_type": "image/png"}, "whose data is None"),
        ({"type": "url"}, "whose url is None"),
        ({"type": "other"}, "source 'other'"),
        (None, "source None"),
    ],
)
def test_a_wrong_source_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        of_claude([{"type": "image", "source": source}])
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "input_image", "file_id": "file-9"}, "file_id 'file-9'"),
        ({"type": "image_url"}, "without a picture"),
        ({"type": "image_url", "image_url": {"url": "x", "detail": "most"}}, "detail 'most'"),
    ],
)
def test_a_wrong_part_is_refused(part: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        plain_messages([user(part)], [])
