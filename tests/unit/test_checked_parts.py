"""Parts of a text that are JSON: where they begin, and what the checker forbids in them."""

from __future__ import annotations

import json

import pytest

from engine.messages.structured import Grammar, Opening
from engine.structured.checked.forms import checker_of

UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
SET = {"type": "object", "properties": {"s": UNIQUE}, "required": ["s"]}
ANY = {"type": "object"}


def tags(*structures: tuple[str, object], triggers: list[str]) -> Grammar:
    each = [{"begin": begin, "schema": schema, "end": "</f>"} for begin, schema in structures]
    text = json.dumps({"structures": each, "triggers": triggers})
    return Grammar("structural_tag", text)


def composed(*openings: Opening, parts: list[object]) -> Grammar:
    own = tuple(Grammar("json", json.dumps(part)) for part in parts)
    return Grammar("grammar", "start: @part_0", parts=own, openings=openings)


def outcome(form: Grammar, text: str | bytes) -> str:
    """What forbids the text, for every way to cut it; nothing if it may end so."""
    checker, data = checker_of(form), text if isinstance(text, bytes) else text.encode()
    assert checker is not None, "nothing is to be checked"
    found = set()
    for cut in (1, 2, 3, 5, len(data)):
        state = checker.begin()
        for at in range(0, len(data), cut):
            ahead = state.copy()
            assert ahead.feed(data[at : at + cut]) == state.copy().feed(data[at : at + cut])
            if not state.feed(data[at : at + cut]):
                break
        found.add(state.why if state.why else "" if state.may_end else "open")
    assert len(found) == 1, found
    return found.pop()


def test_the_schema_of_a_tag_holds_within_it_alone() -> None:
    form = tags(("<f=a>", SET), ("<f=b>", ANY), triggers=["<f="])
    assert outcome(form, 'so [1, 1] <f=a>{"s": [1, 2]}</f> and [1, 1] {') == ""
    assert outcome(form, 'so <f=a>{"s": [1, 2, 1]}</f>') == "uniqueItems"
    assert outcome(form, 'a <f=b>{"s": [1, 1]}</f> <f=a>{"s": [1]}</f> <f=a>{"s": [2]}</f>') == ""
    assert outcome(form, '<f=a>{"s": [1]}</f> <f=a>{"s": [2, 2]}</f>') == "uniqueItems"
    assert outcome(form, 'so <f=a>{"s": [1, 2') == "open"


def test_a_tag_whose_beginning_begins_another() -> None:
    form = tags(("<f=a", ANY), ("<f=ab", SET), triggers=["<f="])
    assert outcome(form, '<f=ab{"s": [1, 1]}</f>') == "uniqueItems"
    assert outcome(form, '<f=ab{"s": [1, 2]}</f>') == ""
    assert outcome(form, '<f=a{"s": [1, 1]}</f>') == ""


def test_of_several_calls_that_begin_alike_one_must_be_right() -> None:
    schemas = [
        {"type": "object", "properties": {"name": {"const": name}, "arguments": part}}
        for name, part in (("a", SET), ("b", ANY))
    ]
    openings = [Opening("<tool_call>\n", 0), Opening("<tool_call>\n", 1)]
    form = composed(*openings, parts=schemas)
    state = checker_of(form).begin()
    assert state.feed(b'text <tool_call>\n{"name": "a", "arg') and state.feed(
        b'uments": {"s": [1, '
    )
    assert not state.feed(b"1]") and state.why == "uniqueItems"
    other = json.dumps({"name": "b", "arguments": {"s": [1, 1]}})
    assert outcome(form, f"text <tool_call>\n{other}\n</tool_call>") == ""
    fine = json.dumps({"name": "a", "arguments": {"s": [1, 2]}})
    assert outcome(form, f"text <tool_call>\n{fine}\n</tool_call>") == ""


def test_calls_in_a_list_and_what_is_no_call() -> None:
    openings = [Opening("[CALLS] [", 0), Opening(", ", 0, follows=True)]
    form = composed(*openings, parts=[SET])
    assert outcome(form, b'\xff[CALLS] [{"s": [1]}, {"s": [1]}]') == ""
    assert outcome(form, b'\xff[CALLS] [{"s": [1]}, {"s": [1, 1]}]') == "uniqueItems"
    assert outcome(form, 'words, {"s": [1, 1]}') == ""


def test_an_answer_after_thinking_or_without() -> None:
    form = composed(Opening("", 0), Opening("</think>", 0), parts=[SET])
    assert outcome(form, '<think>{"s": [1, 1]}</think>\n\n{"s": [1, 2]}') == ""
    assert outcome(form, '<think>{"s": [1, 1]}</think>\n\n{"s": [1, 1]}') == "uniqueItems"
    assert outcome(form, b'\xff<think>no\xff</think>\n\n{"s": [1, 1]}') == "uniqueItems"
    assert outcome(form, '{"s": [1, 1]}') == "uniqueItems"


def test_arguments_between_tags_belong_to_the_call_around_them() -> None:
    openings = [Opening("<p=x>\n", 0, "<f=a>"), Opening("<p=x>\n", 1, "<f=b>")]
    form = composed(*openings, parts=[UNIQUE, {"type": "array"}])
    assert outcome(form, "<f=a>\n<p=x>\n[1, 1]\n</p>") == "uniqueItems"
    assert outcome(form, "<f=b>\n<p=x>\n[1, 1]\n</p>") == ""
    assert outcome(form, "<f=b>\n<p=x>\n[1, 1]\n</p></f><f=a>\n<p=x>\n[1]\n</p>") == ""


@pytest.mark.parametrize("text", ["12", "-1.5e3", '"a"', "null"])
def test_a_value_without_brackets_ends_where_other_text_begins(text) -> None:
    form = tags(("<v>", {"not": {"const": 13}}), triggers=["<v>"])
    assert outcome(form, f"<v>{text}</f> and 13") == ""
    assert outcome(form, "<v>13</f>") == "not"


def test_a_form_without_such_keywords_has_no_checker() -> None:
    assert checker_of(tags(("<f=a>", {"type": "object"}), triggers=["<f="])) is None
    assert checker_of(composed(Opening("x", 0), parts=[{"type": "string"}])) is None
    assert checker_of(Grammar("regex", "a+")) is None
