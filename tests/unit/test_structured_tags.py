"""Free text with parts that follow schemas: what the masks let pass."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structured.checks import bench

from engine.structured.tags import lark_of

NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
WORD = {**NUMBER, "properties": {"a": {"enum": ["x", "y"]}}}
TAGS: dict[str, Any] = {
    "structures": [
        {"begin": "<function=number>", "schema": NUMBER, "end": "</function>"},
        {"begin": "<function=word>", "schema": WORD, "end": "</function>"},
        {"begin": "[say", "schema": WORD, "end": ""},
    ],
    "triggers": ["<function=", "[say"],
}
ONE, OTHER = '<function=number>{"a": 3}</function>', '<function=word>{"a":"x"}</function>'
RIGHT = [
    "nothing of the kind",
    "",
    ONE,
    f"first {ONE}\nthen {OTHER} and {ONE}{OTHER}",
    "<function and <func and [sa",
    'well [say{"a":"y"} said',
]
WRONG = {
    "<function=other>": "<function=",
    '<function=number>{"a":"x"}</function>': '<function=number>{"a":',
    '<function=word>{"a":3}': '<function=word>{"a":',
    '<function=number>{"a":3}</f>': '<function=number>{"a":3}</f',
    'and [say {"a"': "and [say",
}


def asked(**options: Any) -> dict[str, Any]:
    return {"structural_tag": json.dumps(TAGS), **options}


@pytest.mark.parametrize("text", RIGHT)
def test_text_with_tags_that_follow_their_schemas_is_right(text: str) -> None:
    compilation = bench().compiled(asked())
    for tokens in bench().tokenisations(text):
        assert bench().num_accepted(compilation.wait(), tokens) == len(tokens) + 1


@pytest.mark.parametrize("text", WRONG)
def test_what_a_trigger_opens_must_go_on_as_a_tag(text: str) -> None:
    compilation = bench().compiled(asked())
    for tokens in bench().tokenisations(text):
        matcher = compilation.wait()
        accepted = tokens[: bench().num_accepted(matcher, tokens)]
        assert bench().tokenizer.decode(accepted) in (WRONG[text], WRONG[text][:-1])


def test_a_tag_that_is_open_must_be_closed() -> None:
    matcher = bench().compiled(asked()).wait()
    (tokens, *_) = bench().tokenisations('<function=number>{"a":3}')
    assert bench().num_accepted(matcher, tokens) == len(tokens)


def test_options_of_schemas_are_those_of_tags() -> None:
    dense = bench().compiled(asked(disable_any_whitespace=True))
    (tokens, *_) = bench().tokenisations(ONE)
    assert bench().num_accepted(dense.wait(), tokens) < len(tokens)


def test_a_trigger_that_is_a_special_token_is_that_token() -> None:
    """No text spells one, so a model that writes it could never open the tag."""
    structure = {"begin": "<|tool|>!", "schema": NUMBER, "end": "."}
    tags = {"structures": [structure], "triggers": ["<|tool|>"]}
    rules = lark_of(tags, {"<|tool|>": 7}.get).splitlines()
    assert 'tag_0: TEXT <[7]> "!" @of_0 "."' in rules
    assert not any("lazy" in rule for rule in rules)
