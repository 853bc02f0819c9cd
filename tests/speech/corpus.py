# ruff: noqa: RUF001  (DeepSeek's markers have a vertical line of their own)
"""Answers as models of each family write them, with their slips, and the right reading.

Families whose arguments are JSON share the slips of JSON (``ARGUMENTS``); each has its own of what
stands around a call. Arguments that break off are given as text, all others as values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Called = tuple[str, Any]


class Case(NamedTuple):
    """One answer; calls: names, and arguments or the text of those that break off."""

    title: str
    text: str
    calls: list[Called]
    content: str = ""
    thinking: str = ""
    reason: str = "stop"


CODE = "func a() {\n\t\treturn 1\r\n}"
EDIT = {"path": "a.go", "text": "x"}
EDIT_JSON = json.dumps(EDIT)
READ = ("files.read-all", {"path": "b"})
READ_JSON = '{"path": "b"}'
MARKED = (
    "<tool_call></tool_call> [TOOL_CALLS][ARGS] <｜tool▁call▁end｜> <|call|><|end|> ``` </think>"
)
LONG = "line <b>of</b> code\n" * 12


def values(text: str, **more: Any) -> str:
    return json.dumps({"path": "a", "text": text, **more}, ensure_ascii=False)


# Arguments of `edit` as they are written, and what they are.
ARGUMENTS: list[tuple[str, str, Any]] = [
    ("plain", EDIT_JSON, EDIT),
    ("compact", '{"path":"a.go","text":"x"}', EDIT),
    ("on lines", json.dumps(EDIT, indent=2), EDIT),
    ("empty", "{}", {}),
    (
        "real control characters",
        '{"path": "a.go", "text": "' + CODE + '"}',
        {"path": "a.go", "text": CODE},
    ),
    ("other control characters", '{"text": "\x01\x1b[0m\x7f"}', {"text": "\x01\x1b[0m\x7f"}),
    ("escapes that JSON lacks", r'{"text": "\d+\.\$ \u12 \'"}', {"text": "\\d+\\.\\$ \\u12 '"}),
    ("markers inside a string", values(MARKED), {"path": "a", "text": MARKED}),
    ("brackets inside a string", values('a"}b }}] [{"'), {"path": "a", "text": 'a"}b }}] [{"'}),
    ("escaped characters", r'{"text": "\ud83d\ude00\u00e9\u2028\/"}', {"text": "😀é\u2028/"}),
    ("half a character", r'{"text": "a\ud83db\udc00"}', {"text": "a\ufffdb\ufffd"}),
    ("other scripts", values("日本 😀 \u2028"), {"path": "a", "text": "日本 😀 \u2028"}),
    ("quotes that are not escaped", '{"text": "echo "hi" there"}', {"text": 'echo "hi" there'}),
    ("quotes and commas that are not escaped", '{"path": "a "b", "c" d", "text": "e"}',
     {"path": 'a "b", "c" d', "text": "e"}),
    ("quotes at the end that are not escaped", '{"text": "echo "hi""}', {"text": 'echo "hi"'}),
    ("single quotes", "{'path': 'it is', 'text': 'say \"hi\"'}",
     {"path": "it is", "text": 'say "hi"'}),
    ("Python's literals", '{"text": True, "path": None, "n": [False, NaN]}',
     {"text": True, "path": None, "n": [False, None]}),
    ("commas too many", '{"path": "a",, "text": ["x", "y",],}', {"path": "a", "text": ["x", "y"]}),
    ("a comma too few", '{"path": "a" "text": 1\n"n": 2}', {"path": "a", "text": 1, "n": 2}),
    ("keys without quotes", '{path: "a", text: "b"}', {"path": "a", "text": "b"}),
    ("a text without quotes", '{"path": a b, "text": "c"}', {"path": "a b", "text": "c"}),
    ("a bracket too few", '{"path": ["a", ["b"}', {"path": ["a", ["b"]]}),
    ("a key without a value", '{"path": "a", "text": }', {"path": "a", "text": None}),
    ("deep values", '{"a": {"b": [1, {"c": null}], "d": -1.5e3}, "e": []}',
     {"a": {"b": [1, {"c": None}], "d": -1500.0}, "e": []}),
    ("long", values(LONG), {"path": "a", "text": LONG}),
]  # fmt: skip


def of_arguments(write: Callable[[str], str]) -> list[Case]:
    """write: a call of `edit` with these arguments."""
    cases = [
        Case(f"arguments: {title}", write(text), [("edit", value)])
        for title, text, value in ARGUMENTS
    ]
    marked = [case for case in cases if "markers" in case.title]
    begun = write(EDIT_JSON)
    begun = begun[: begun.rindex('"x"') + 2]
    partly = '{"path": "a.go", "text": "x'
    return [
        *cases,
        *[case._replace(title=f"{case.title}, words around", text=f"So:\n{case.text}",
                        content="So:") for case in marked],
        Case("breaks off inside a text", begun, [("edit", partly)], reason="length"),
        Case("ends inside a text", begun, [("edit", partly)]),
    ]  # fmt: skip


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE = hermes("edit", EDIT_JSON)
TWO = hermes("files.read-all", READ_JSON)
BARE = '{"name": "edit", "arguments": ' + EDIT_JSON + "}"
UNKNOWN = hermes("delete", EDIT_JSON)
FLAT = '<tool_call>{"name": "edit", "path": "a.go"}</tool_call>'
# The first is an object with a name and arguments, between tags or not.
OBJECTS = [
    Case("two calls", f"{ONE}\n{TWO}", [("edit", EDIT), READ]),
    Case("the opening tag twice", f"<tool_call>\n{ONE}\n</tool_call>", [("edit", EDIT)]),
    Case("the opening tag twice, no call", "<tool_call><tool_call>", [], "<tool_call><tool_call>"),
    Case("arguments next to the name", FLAT, [], FLAT),
    Case(
        "a reason next to the name",
        f'<tool_call>{{"name": "edit", "reason": "r", "arguments": {EDIT_JSON}}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case("one call twice", f"{ONE}\n{ONE}", [("edit", EDIT)] * 2),
    Case("words before and after", f"So:\n{ONE}\nDone.", [("edit", EDIT)], "So:\nDone."),
    Case("no closing tag", ONE.removesuffix("</tool_call>"), [("edit", EDIT)]),
    Case(
        "no closing tag between two",
        f"{ONE.removesuffix('</tool_call>')}{TWO}",
        [("edit", EDIT), READ],
    ),
    Case("two in one region", f"<tool_call>\n{BARE}\n{BARE}\n</tool_call>", [("edit", EDIT)] * 2),
    Case("a list", f"<tool_call>[{BARE}, {BARE}]</tool_call>", [("edit", EDIT)] * 2),
    Case("a fence inside", f"<tool_call>\n```json\n{BARE}\n```\n</tool_call>", [("edit", EDIT)]),
    Case("a brace too many", f"<tool_call>{BARE}}}</tool_call>Done.", [("edit", EDIT)], "Done."),
    Case("a brace too few", f"<tool_call>{BARE[:-1]}</tool_call>Done.", [("edit", EDIT)], "Done."),
    Case("two braces too few", f"<tool_call>{BARE[:-2]}\n</tool_call>", [("edit", EDIT)]),
    Case("braces too few at the end", f"<tool_call>{BARE[:-2]}", [("edit", EDIT)]),
    Case("no arguments", '<tool_call>{"name": "noargs"}</tool_call>', [("noargs", {})]),
    Case(
        "null for arguments",
        '<tool_call>{"name": "noargs", "arguments": null}</tool_call>',
        [("noargs", {})],
    ),
    Case(
        "an empty text for arguments",
        '<tool_call>{"name": "noargs", "arguments": ""}</tool_call>',
        [("noargs", {})],
    ),
    Case(
        "arguments as a text",
        hermes("edit", json.dumps(EDIT_JSON)),
        [("edit", EDIT)],
    ),
    Case(
        "arguments as a text with real new lines",
        hermes("edit", json.dumps('{"text": "a\\nb"}').replace("\\\\n", "\n")),
        [("edit", {"text": "a\nb"})],
    ),
    Case(
        "arguments first",
        f'<tool_call>{{"arguments": {EDIT_JSON}, "name": "edit"}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case(
        "arguments as a text, first",
        f'<tool_call>{{"arguments": {json.dumps(EDIT_JSON)}, "name": "edit"}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case(
        "no JSON as a text, first",
        '<tool_call>{"arguments": "Rome", "name": "edit"}</tool_call>',
        [],
        '<tool_call>{"arguments": "Rome", "name": "edit"}</tool_call>',
    ),
    Case(
        "an empty text, first",
        '<tool_call>{"arguments": "", "name": "noargs"}</tool_call>',
        [("noargs", {})],
    ),
    Case(
        "parameters",
        f'<tool_call>{{"name": "edit", "parameters": {EDIT_JSON}}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case(
        "as OpenAI writes it",
        f'<tool_call>{{"type": "function", "function": {BARE}}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case(
        "a name with a prefix",
        hermes("functions.edit", EDIT_JSON),
        [("edit", EDIT)],
    ),
    Case(
        "more members",
        f'<tool_call>{{"id": 3, "name": "edit", "arguments": {EDIT_JSON}, "x": [1]}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case(
        "a list of calls, as OpenAI writes it",
        f'{{"tool_calls": [{{"type": "function", "function": {BARE}}}, {{"function": {BARE}}}]}}',
        [("edit", EDIT)] * 2,
    ),
    Case(
        "as Anthropic writes it",
        f'<tool_call>{{"type": "tool_use", "name": "edit", "input": {EDIT_JSON}}}</tool_call>',
        [("edit", EDIT)],
    ),
    Case("an opening tag that should close", f"<tool_call>{BARE}\n<tool_call>", [("edit", EDIT)]),
    Case("an unknown tool", UNKNOWN, [], UNKNOWN),
    Case("an unknown tool, then a call", f"{UNKNOWN}\n{ONE}", [("edit", EDIT)], UNKNOWN),
    Case("a list for arguments", hermes("edit", "[1]"), [], hermes("edit", "[1]")),
    Case("an empty region", "<tool_call></tool_call> so", [], "<tool_call></tool_call> so"),
    Case("a closing tag alone", "Write </tool_call>.", [], "Write </tool_call>."),
    Case(
        "breaks off before arguments",
        '  <tool_call>{"name": "edit", "argum',
        [],
        '  <tool_call>{"name": "edit", "argum',
        reason="length",
    ),
    Case(
        "breaks off after a member",
        '<tool_call>{"name": "edit", "arguments": {"path": "a.go", "te',
        [("edit", '{"path": "a.go", "te')],
        reason="length",
    ),
    Case(
        "breaks off inside a number",
        '<tool_call>{"name": "run", "arguments": {"times": 12',
        [("run", '{"times": 12')],
        reason="length",
    ),
    Case("without tags", BARE, [("edit", EDIT)]),
    Case("without tags, two", f"{BARE}\n{BARE}", [("edit", EDIT)] * 2),
    Case("in a fence", f"```json\n{BARE}\n```", [("edit", EDIT)]),
    Case("without its opening tag", f"{BARE}\n</tool_call>", [("edit", EDIT)]),
]
THOUGHT = Case(
    "thinking before",
    f"<think>\nLet me\n\nsee.\n</think>\n\nSure:\n{ONE}",
    [("edit", EDIT)],
    "Sure:",
    "Let me\n\nsee.",
)
PLAIN = "\n Déjà vu <b>: 1 < 2, {x} [y] `z`\n "
ANSWERS = [
    Case("plain text", PLAIN, [], PLAIN),
    Case("JSON that is no call", '{"name": "Bob", "age": [5]}', [], '{"name": "Bob", "age": [5]}'),
    Case("a list that is no call", '[{"x": 1}]', [], '[{"x": 1}]'),
    Case("code", "```python\nx = {'name': 1}\n```", [], "```python\nx = {'name': 1}\n```"),
]  # fmt: skip


def nested(name: str, arguments: str) -> str:
    """Llama's."""
    return f'{{"name": "{name}", "parameters": {arguments}}}'


LLAMA_ONE, LLAMA_TWO = nested("edit", EDIT_JSON), nested("files.read-all", READ_JSON)
LLAMA = [
    *ANSWERS,
    *of_arguments(lambda arguments: nested("edit", arguments)),
    Case("two calls", f"{LLAMA_ONE}; {LLAMA_TWO}", [("edit", EDIT), READ]),
    Case("two on lines", f"{LLAMA_ONE}\n{LLAMA_TWO}", [("edit", EDIT), READ]),
    Case("its tag", f"<|python_tag|>{LLAMA_ONE}", [("edit", EDIT)]),
    Case("words before", f"I call it.\n\n{LLAMA_ONE}", [("edit", EDIT)], "I call it."),
    Case("words after", f"{LLAMA_ONE}\nDone.", [("edit", EDIT)], "Done."),
    Case("arguments for parameters", BARE, [("edit", EDIT)]),
    Case("a type", f'{{"type": "function", {LLAMA_ONE[1:]}', [("edit", EDIT)]),
    Case("a list", f"[{LLAMA_ONE}, {LLAMA_TWO}]", [("edit", EDIT), READ]),
    Case("in a fence", f"```json\n{LLAMA_ONE}\n```", [("edit", EDIT)]),
    Case("a fence that is not closed", f"```\n{LLAMA_ONE}", [("edit", EDIT)]),
    Case("no parameters", '{"name": "noargs"}', [("noargs", {})]),
    Case("a brace too few", LLAMA_ONE[:-1], [("edit", EDIT)]),
    Case("a brace too many", LLAMA_ONE + "}", [("edit", EDIT)]),
    Case("in a line of words", f"Write {LLAMA_ONE}", [], f"Write {LLAMA_ONE}"),
    Case("an unknown tool", nested("rm", EDIT_JSON), [], nested("rm", EDIT_JSON)),
]


def mistral(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{arguments}"


M_ONE, M_TWO = mistral("edit", EDIT_JSON), mistral("files.read-all", READ_JSON)
MISTRAL = [
    *ANSWERS,
    *of_arguments(lambda arguments: mistral("edit", arguments)),
    Case("two calls", M_ONE + M_TWO, [("edit", EDIT), READ]),
    Case("the marker twice", f"[TOOL_CALLS]{M_ONE}", [("edit", EDIT)]),
    Case("a fence", f"[TOOL_CALLS]edit[ARGS]```json\n{EDIT_JSON}\n```", [("edit", EDIT)]),
    Case("an id", f"[TOOL_CALLS]edit[CALL_ID]a1B2c3D4e[ARGS]{EDIT_JSON}", [("edit", EDIT)]),
    Case("white space", f"[TOOL_CALLS] edit [ARGS] {EDIT_JSON}\n", [("edit", EDIT)]),
    Case("no marker of arguments", f"[TOOL_CALLS]edit{EDIT_JSON}", [("edit", EDIT)]),
    Case(
        "the second without its marker",
        f"{M_ONE}files.read-all[ARGS]{READ_JSON}",
        [("edit", EDIT), READ],
    ),
    Case("words around", f"So: {M_ONE} and more", [("edit", EDIT)], "So:\n and more"),
    Case("as older models write", f"[TOOL_CALLS] [{BARE}]", [("edit", EDIT)]),
    Case("one object", f"[TOOL_CALLS]{BARE}", [("edit", EDIT)]),
    Case("no arguments", "[TOOL_CALLS]noargs[ARGS]", [("noargs", {})]),
    Case("arguments as a text", mistral("edit", json.dumps(EDIT_JSON)), [("edit", EDIT)]),
    Case("thinking", f"[THINK]Hm.[/THINK]{M_ONE}", [("edit", EDIT)], thinking="Hm."),
    Case("an unknown tool", mistral("rm", "{}"), [], mistral("rm", "{}")),
    Case("a list for arguments", mistral("edit", "[1]"), [], mistral("edit", "[1]")),
    Case("a marker alone", "Write [TOOL_CALLS] so.", [], "Write [TOOL_CALLS] so."),
]


def older(*calls: str) -> str:
    return f"[TOOL_CALLS] [{', '.join(calls)}]"


MISTRAL_V3 = [
    *ANSWERS,
    *of_arguments(lambda arguments: older(f'{{"name": "edit", "arguments": {arguments}}}')),
    Case("two calls", older(BARE, BARE), [("edit", EDIT)] * 2),
    Case("no list", f"[TOOL_CALLS]{BARE}", [("edit", EDIT)]),
    Case("a list that is not closed", older(BARE)[:-1], [("edit", EDIT)]),
    Case("two markers", older(BARE) + older(BARE), [("edit", EDIT)] * 2),
    Case("words around", f"So:{older(BARE)}\nDone.", [("edit", EDIT)], "So:\nDone."),
    Case("an id", older('{"name": "noargs", "arguments": {}, "id": "a1"}'), [("noargs", {})]),
    Case(
        "arguments as a text",
        older(f'{{"name": "edit", "arguments": {json.dumps(EDIT_JSON)}}}'),
        [("edit", EDIT)],
    ),
    Case("an unknown tool", older('{"name": "rm"}'), [], older('{"name": "rm"}')),
    Case("an empty list", "[TOOL_CALLS] []", [], "[TOOL_CALLS] []"),
    Case("no marker", f"[{BARE}]", [("edit", EDIT)]),
    Case("no marker, an object", f" {BARE}\nDone.", [("edit", EDIT)], "Done."),
]


def deepseek(name: str, arguments: str) -> str:
    fenced = f"```json\n{arguments}\n```"
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{fenced}<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def in_region(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def deepseek_cases(write: Callable[[str, str], str]) -> list[Case]:
    one, two = write("edit", EDIT_JSON), write("files.read-all", READ_JSON)
    unknown = in_region(write("rm", "{}"))
    return [
        *ANSWERS,
        *of_arguments(lambda arguments: in_region(write("edit", arguments))),
        Case("two calls", in_region(one, two), [("edit", EDIT), READ]),
        Case("a line between", in_region(one, "\n", two), [("edit", EDIT), READ]),
        Case("no region", one, [("edit", EDIT)]),
        Case("words around", f"So: {in_region(one)}Done.", [("edit", EDIT)], "So:\nDone."),
        Case("no ends", f"<｜tool▁calls▁begin｜>{one.removesuffix('<｜tool▁call▁end｜>')}",
             [("edit", EDIT)]),
        Case("no end between", in_region(one.removesuffix("<｜tool▁call▁end｜>"), two),
             [("edit", EDIT), READ]),
        Case("as relatives write", in_region(
            deepseek_v31("edit", EDIT_JSON), deepseek("edit", EDIT_JSON)), [("edit", EDIT)] * 2),
        Case("no separator", f"<｜tool▁call▁begin｜>edit\n```json\n{EDIT_JSON}\n```",
             [("edit", EDIT)]),
        Case("no fence", in_region(
            f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n{EDIT_JSON}<｜tool▁call▁end｜>"),
            [("edit", EDIT)]),
        Case("no arguments", in_region(write("noargs", "")), [("noargs", {})]),
        Case("a prefix", in_region(write("functions.edit", EDIT_JSON)), [("edit", EDIT)]),
        Case("thinking", f"<think>Hm.</think>{in_region(one)}", [("edit", EDIT)], thinking="Hm."),
        Case("an unknown tool", unknown, [], unknown),
    ]  # fmt: skip


def harmony(name: str, arguments: str, end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}{end}"


FINAL = "<|start|>assistant<|channel|>final<|message|>Answer.<|return|>"
H_ONE, H_TWO = harmony("edit", EDIT_JSON), harmony("files.read-all", READ_JSON)
H_BODY = f"<|message|>{EDIT_JSON}<|call|>"
HARMONY = [
    Case("plain text", "Déjà vu <b>\n", [], "Déjà vu <b>\n"),
    Case("messages", "<|channel|>analysis<|message|>Hm.<|end|>" + FINAL, [], "Answer.", "Hm."),
    Case(
        "no beginning of a message",
        "<|channel|>analysis<|message|>Hm.<|end|>" + FINAL.removeprefix("<|start|>"),
        [],
        "Answer.",
        "Hm.",
    ),
    Case(
        "a result that the model made up",
        '<|start|>functions.edit to=assistant<|channel|>commentary<|message|>"r"<|end|>',
        [],
        '"r"',
    ),
    *of_arguments(lambda arguments: harmony("edit", arguments)),
    Case("two calls", f"{H_ONE}<|start|>assistant{H_TWO}", [("edit", EDIT), READ]),
    Case("no end between", f"{H_ONE.removesuffix('<|call|>')}<|start|>assistant{H_TWO}",
         [("edit", EDIT), READ]),
    Case("a call, then words", f"{H_ONE}{FINAL}", [("edit", EDIT)], "Answer."),
    *(
        Case(title, header + H_BODY, [("edit", EDIT)])
        for title, header in {
            "json without its token": "<|channel|>commentary to=functions.edit json",
            "a recipient without its sign": "<|channel|>commentary functions.edit",
            "no beginning": "assistant to=functions.edit<|channel|>commentary",
            "code": "<|channel|>commentary to=functions.edit code",
            "no kind": "<|channel|>commentary to=functions.edit",
            "the kind alone": "<|channel|>commentary to=functions.edit<|constrain|>json",
            "the recipient first": " to=functions.edit<|channel|>commentary<|constrain|>json",
            "the recipient after the role":
                "<|start|>assistant to=functions.edit<|channel|>commentary <|constrain|>json",
            "the recipient before the channel": "<|start|>assistant<|channel|>to=functions.edit"
                "<|channel|>commentary json",
            "in the channel of thinking": "<|channel|>analysis to=functions.edit code",
            "in the last channel": "<|channel|>final to=functions.edit <|constrain|>json",
            "no prefix": "<|channel|>commentary to=edit <|constrain|>json",
            "a space too many": "<|channel|>commentary  to= functions.edit  json",
            "the recipient after the kind":
                "<|channel|>commentary <|constrain|>json to=functions.edit",
        }.items()
    ),
    Case("no arguments", harmony("noargs", ""), [("noargs", {})]),
    Case("an end of a message", harmony("edit", EDIT_JSON, "<|end|>"), [("edit", EDIT)]),
    Case("words after", harmony("edit", f"{EDIT_JSON} so"), [("edit", EDIT)], " so"),
    Case("a fence", harmony("edit", f"```json\n{EDIT_JSON}\n```"), [("edit", EDIT)]),
    Case("a brace too few", harmony("edit", EDIT_JSON[:-1]), [("edit", EDIT)]),
    Case("an unknown tool", harmony("rm", "{}"), [], harmony("rm", "{}")),
    Case("an unknown tool, then words", harmony("rm", "{}") + FINAL, [],
         harmony("rm", "{}") + "\nAnswer."),
    Case("no JSON", harmony("edit", "sed -i x"), [], harmony("edit", "sed -i x")),
    Case("breaks off in a header", "<|channel|>commentary to=functions.edit <|con", [],
         "<|channel|>commentary to=functions.edit <|con", reason="length"),
    Case("a broken channel", "<|channel|>commentary??<|message|>x<|end|>" + FINAL, [],
         "x\nAnswer."),
    Case("no channel", "<|message|>x<|end|>" + FINAL, [], "x\nAnswer."),
    Case("no message", "<|channel|>We need to think<|end|>" + FINAL, [],
         "We need to think\nAnswer."),
    Case("to itself", "<|channel|>commentary to=assistant<|message|>x<|end|>" + FINAL, [],
         "x\nAnswer."),
    Case("an empty channel", "<|channel|><|message|>x<|end|>" + FINAL, [], "x\nAnswer."),
    Case("a channel alone", "<|channel|>analysis<|end|>" + FINAL, [], "Answer."),
]  # fmt: skip
