"""Custom tools: functions to the model, texts to the client, grammars as expressions."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import lark
import pytest

from engine.server.errors import ApiError
from engine.server.responses_items import messages_of
from engine.server.responses_tools import ResponseTools, ToolName
from engine.server.speech.custom import InputReader, input_of
from engine.server.speech.lark_regex import LarkError, regex_of_lark
from engine.server.speech.tools import tools_of

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
?change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
SUM = """
start: expr            // a sum
expr: term (SP ADD SP term)* -> add
    | "0"
term: factor (SP MUL SP factor)*
?factor: INT | "(" expr ")"
SP: " "
ADD: "+"
MUL: "*"
%import common.INT
"""
LOOSE = """
start: "set"i NAME "=" [value] ("," value)~0..2
value: /[0-9]+/ | ESCAPED_STRING
NAME: "a".."f"+
%import common (ESCAPED_STRING, WS)
%ignore WS
"""
RIGHT = {
    PATCH: [
        "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch",
        "*** Begin Patch\n*** Update File: b\n*** Move to: c\n@@ f\n-a\n+b\n c\n*** End Patch\n",
    ],
    SUM: ["1", "1 + 22 * 3", "(1 + 2) * 3"],
    LOOSE: ["set a = 1", 'SET abc="x y",2 , 3', "seta="],
}
WRONG = {
    PATCH: [
        "*** Begin Patch\n*** End Patch",
        "*** Begin Patch\n*** Add File: a.py\nx\n*** End Patch",
        "hello",
    ],
    SUM: ["1 +", "1 + 2)", "a", ""],
    LOOSE: ["set g = 1", "set a = 1,2,3,4", "a = 1"],
}


@pytest.mark.parametrize("grammar", RIGHT)
def test_an_expression_admits_what_the_grammar_does(grammar: str) -> None:
    expression = re.compile(regex_of_lark(grammar))
    assert [each for each in RIGHT[grammar] if not expression.fullmatch(each)] == []
    assert [each for each in WRONG[grammar] if expression.fullmatch(each)] == []
    if grammar != PATCH:  # the library refuses expressions that may be empty
        parser = lark.Lark(grammar, parser="earley", lexer="dynamic")
        for text in RIGHT[grammar]:
            parser.parse(text)


NAMES = "abcdefghij"
LARGE = "start: a\n" + "".join(
    f"{name}: {(following + ' ') * 4}\n" for name, following in itertools.pairwise(NAMES)
)
LARGE += 'j: "0123456789"'


def test_a_rule_in_itself_is_unrolled_a_few_times() -> None:
    expression = regex_of_lark('start: "(" start ")" | "x"')
    assert re.fullmatch(expression, "((x))") and not re.fullmatch(expression, "(((((x)))))")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('a: "b"', "no rule named start"),
        ("start: other", "'other' is not defined"),
        ('start: ("a"', "missing"),
        ("start: start", "recursive without an end"),
        ("start: /a/u", "flags"),
        ("%import python.NAME\nstart: NAME", "not supported"),
        ('start{x}: "a"', "is not a rule"),
        (LARGE, "too large"),
    ],
)
def test_what_cannot_be_an_expression_says_why(grammar: str, said: str) -> None:
    with pytest.raises(LarkError, match=said):
        regex_of_lark(grammar)


def custom(name: str = "patch", **about: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **about}}


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    form = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "^[a-z]+$"}}
    tools = tools_of([custom(description="Edits"), custom("word", format=form)], None, None)
    assert tools is not None and tools.custom == {"patch", "word"} and tools.has_strict
    plain, word = tools.all
    assert plain.described["function"]["description"] == "Edits" and not plain.is_strict
    assert "pattern" not in json.dumps(word.described) and "[a-z]+" in json.dumps(word.described)
    assert word.parameters["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"
    newer = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    (tool,) = ResponseTools([{"type": "custom", "name": "x", "format": newer}]).described
    found = tools_of([tool], {"type": "custom", "custom": {"name": "x"}}, None)
    assert found is not None and found.choice == "required" and found.is_single


@pytest.mark.parametrize(
    "form",
    [
        5,
        {"type": "json"},
        {"type": "grammar"},
        {"type": "grammar", "syntax": "bnf", "definition": "x"},
        {"type": "grammar", "syntax": "lark", "definition": "nothing"},
    ],
)
def test_a_format_that_is_none_is_named(form: Any) -> None:
    with pytest.raises(ApiError, match="tools has 'patch' with") as refused:
        tools_of([custom(format=form)], None, None)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    "text", ["", "plain", 'a "quoted" \\ line\n\tand more', "caf\u00e9 \u65e5 \U0001f600", "\x01"]
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_an_input_comes_in_pieces(text: str, is_ascii: bool) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    for most in (1, 2, 3, 7, 100):
        reader, said, at = InputReader(), "", 0
        while at < len(arguments):
            size = random.randint(1, most)
            said += reader.feed(arguments[at : at + size])
            at += size
            assert text.startswith(said)
        assert said + reader.end() == text
    assert input_of(arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "cut he', "cut he"),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("", ""),
    ],
)
def test_arguments_that_are_no_input_are_the_text(arguments: str, text: str) -> None:
    reader = InputReader()
    assert input_of(arguments) == text == reader.feed(arguments) + reader.end()


FUNCTION = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": None}


def test_namespaces_are_flattened_and_server_tools_left_out() -> None:
    tools = ResponseTools(
        [
            FUNCTION,
            {"type": "namespace", "name": "mcp__files", "description": "d", "tools": [FUNCTION]},
            {"type": "namespace", "name": "git__", "tools": [{"type": "custom", "name": "patch"}]},
            {"type": "web_search", "external_web_access": False},
            {"type": "web_search_preview_2025_03_11"},
            {"type": "mcp", "server_label": "x"},
        ]
    )
    flat = [tool[tool["type"]]["name"] for tool in tools.described]
    assert flat == ["run", "mcp__files__run", "git__patch"]
    assert tools.called("mcp__files__run") == ToolName("run", "mcp__files")
    assert tools.called("git__patch") == ToolName("patch", "git__")
    assert tools.called("run") == ToolName("run")
    assert tools.left_out == ["web_search", "web_search_preview_2025_03_11", "mcp"]
    with pytest.raises(ApiError, match="type 'functoin'"):
        ResponseTools([{"type": "functoin", "name": "run"}])


ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"type": "web_search_call", "id": "w", "status": "completed", "action": {}},
    {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
    {
        "type": "function_call",
        "call_id": "c2",
        "name": "run",
        "namespace": "git",
        "arguments": "{}",
    },
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "done"}],
    },
    {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "id": "c3", "output": "a b"},
    {"type": "mcp_call", "id": "m", "name": "find", "arguments": "{}", "output": "found"},
    {"type": "compaction", "encrypted_content": "x"},
]


def test_items_of_every_kind_are_taken() -> None:
    messages = messages_of(ITEMS)
    calls = [call for each in messages for call in each.get("tool_calls", [])]
    names = [call["function"]["name"] for call in calls]
    assert names == ["patch", "git__run", "local_shell", "find"]
    results = [each["content"] for each in messages if each["role"] == "tool"]
    assert results == ["ok", "done", "a b", "found"]
    ids = [each["tool_call_id"] for each in messages if each["role"] == "tool"]
    assert ids == [call["id"] for call in calls]
