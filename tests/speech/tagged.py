"""The same for families whose arguments stand between tags."""

from __future__ import annotations

import json
from typing import Any

from .corpus import ANSWERS, BARE, CODE, EDIT, READ, Case

# Values of `run`: its argument, as it is written, and what it is.
VALUES: list[tuple[str, str, str, Any]] = [
    ("a text", "command", "ls", "ls"),
    ("a text on lines", "command", CODE.replace("\r", ""), CODE.replace("\r", "")),
    ("a text that looks like a number", "command", "007", "007"),
    ("a text that looks like null", "command", "null", "null"),
    ("a text that looks like JSON", "command", '{"a": [1]}', '{"a": [1]}'),
    ("a text in quotes", "command", '"ls"', '"ls"'),
    ("tags in a text", "command", "a </tool_call> <b> </function> b", None),
    ("the start of a call in a text", "command", "<tool_call> <function=run> so", None),
    ("backslashes", "command", 'sed "s/\\n/\\t/" \\d', None),
    ("an integer", "times", "3", 3),
    ("a text where an integer is due", "times", "three", "three"),
    ("a number", "share", "0.5", 0.5),
    ("a boolean", "is_quiet", "true", True),
    ("Python's boolean", "is_quiet", "True", True),
    ("a list", "tags", '["a", "b"]', ["a", "b"]),
    ("a list as Python writes it", "tags", "['a', 'b']", ["a", "b"]),
    ("an object", "where", '{"x": {"y": 1}}', {"x": {"y": 1}}),
    ("an object with real new lines", "where", '{"x": "a\nb"}', {"x": "a\nb"}),
    ("null where it is admitted", "note", "null", None),
    ("a text where null is admitted", "note", "nullable", "nullable"),
    ("an integer where a text is too", "either", "5", 5),
    ("a text where an integer is too", "either", "five", "five"),
    ("anything: JSON", "anything", "[1, null]", [1, None]),
    ("anything: a text", "anything", "a [b", "a [b"),
    ("an argument that no schema has", "other", "7", 7),
    ("an empty text", "command", "", ""),
]


def _meant(written: str, key: str, value: Any) -> Any:
    return written if value is None and key == "command" else value


def qwen(name: str, *arguments: tuple[str, str]) -> str:
    between = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments)
    return f"<function={name}>\n{between}</function>"


Q_ONE = qwen("edit", ("path", "a.go"), ("text", "x"))
Q_TWO = qwen("files.read-all", ("path", "b"))


def called(*parts: str) -> str:
    inside = "\n".join(parts)
    return f"<tool_call>\n{inside}\n</tool_call>"


QWEN_CODER = [
    *ANSWERS,
    *(
        Case(title, called(qwen("run", (key, written), ("times", "1"))),
             [("run", {key: _meant(written, key, value), "times": 1})
              if key != "times" else ("run", {"times": 1})])
        for title, key, written, value in VALUES
        if key != "times"
    ),
    *(
        Case(title, called(qwen("run", (key, written))), [("run", {key: value})])
        for title, key, written, value in VALUES
        if key == "times"
    ),
    Case("two calls", f"{called(Q_ONE)}\n{called(Q_TWO)}", [("edit", EDIT), READ]),
    Case("two in one region", called(Q_ONE, Q_TWO), [("edit", EDIT), READ]),
    Case("no opening tag", f"{Q_ONE}\n</tool_call>", [("edit", EDIT)]),
    Case("no tags around", Q_ONE, [("edit", EDIT)]),
    Case("the opening tag twice", f"<tool_call>\n{called(Q_ONE)}", [("edit", EDIT)]),
    Case("a name without its bracket", called(Q_ONE.replace("=edit>", "=edit")), [("edit", EDIT)]),
    Case("a key without its bracket",
         called(qwen("run", ("command", "x")).replace("command>\nx\n", "command=x")),
         [("run", {"command=x": ""})]),
    Case("no tags around, two", f"{Q_ONE}\n{Q_TWO}", [("edit", EDIT), READ]),
    Case("words before", f"I do.\n\n{Q_ONE}\n</tool_call>", [("edit", EDIT)], "I do."),
    Case("words after", f"{called(Q_ONE)}\nDone.", [("edit", EDIT)], "Done."),
    Case("no arguments", called(qwen("noargs")), [("noargs", {})]),
    Case("no end of a call", f"<tool_call>\n{Q_ONE}", [("edit", EDIT)]),
    Case("no end of a function", called(Q_ONE.removesuffix("</function>")), [("edit", EDIT)]),
    Case("no end of a function, another follows",
         f"<tool_call>\n{Q_ONE.removesuffix('</function>')}{called(Q_TWO)}",
         [("edit", EDIT), READ]),
    Case("no end of a value", called(Q_ONE.replace("a.go\n</parameter>", "a.go")),
         [("edit", EDIT)]),
    Case("no end of the last value", called(Q_ONE.replace("x\n</parameter>\n", "x\n")),
         [("edit", EDIT)]),
    Case("no ends at all", "<tool_call>\n<function=files.read-all>\n<parameter=path>\nb", [READ]),
    Case("on one line", Q_ONE.replace("\n", ""), [("edit", EDIT)]),
    Case("quotes", Q_ONE.replace("=edit", '="edit"').replace("=path", '="path"'),
         [("edit", EDIT)]),
    Case("an end of a value in it",
         called(qwen("run", ("command", "a\n</parameter>\nb"))),
         [("run", {"command": "a\n</parameter>\nb"})]),
    Case("JSON inside", called(f"<function=edit>{json.dumps(EDIT)}</function>"),
         [("edit", EDIT)]),
    Case("an object, as relatives write", called(BARE), [("edit", EDIT)]),
    Case("an unknown tool", called(qwen("rm", ("a", "b"))), [], called(qwen("rm", ("a", "b")))),
    Case("the name alone", "Write <function=edit> so.", [], "Write <function=edit> so."),
    Case("an example", "Write <function=example> so.", [], "Write <function=example> so."),
    Case("breaks off in a text", called(Q_ONE)[: called(Q_ONE).index("go")],
         [("edit", '{"path": "a.')], reason="length"),
    Case("breaks off after an argument", called(Q_ONE)[: called(Q_ONE).index("<parameter=text")],
         [("edit", '{"path": "a.go"')], reason="length"),
    Case("breaks off in a list", '<tool_call><function=run><parameter=tags>["a", "b',
         [("run", '{"tags": ["a", "b')], reason="length"),
    Case("breaks off before arguments", "<tool_call>\n<function=edit>\n", [],
         "<tool_call>\n<function=edit>\n", reason="length"),
    Case("thinking", f"<think>Hm.</think>\n\n{called(Q_ONE)}", [("edit", EDIT)], thinking="Hm."),
]  # fmt: skip


def glm(name: str, *arguments: tuple[str, str]) -> str:
    between = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments)
    return f"<tool_call>{name}\n{between}</tool_call>"


G_ONE = glm("edit", ("path", "a.go"), ("text", "x"))
G_TWO = glm("files.read-all", ("path", "b"))
GLM = [
    *ANSWERS,
    *(
        Case(title, glm("run", (key, written)), [("run", {key: _meant(written, key, value)})])
        for title, key, written, value in VALUES
    ),
    Case("two calls", f"{G_ONE}\n{G_TWO}", [("edit", EDIT), READ]),
    Case("the opening tag twice", f"<tool_call>{G_ONE}", [("edit", EDIT)]),
    Case("words around", f"So:\n{G_ONE}\nDone.", [("edit", EDIT)], "So:\nDone."),
    Case("on one line", G_ONE.replace("\n", ""), [("edit", EDIT)]),
    Case("no arguments", "<tool_call>noargs</tool_call>", [("noargs", {})]),
    Case("no arguments, a line", "<tool_call>\nnoargs\n</tool_call>", [("noargs", {})]),
    Case("no end", G_ONE.removesuffix("</tool_call>"), [("edit", EDIT)]),
    Case("no end between", f"{G_ONE.removesuffix('</tool_call>')}{G_TWO}", [("edit", EDIT), READ]),
    Case("no end of a value", G_ONE.replace("a.go</arg_value>", "a.go"), [("edit", EDIT)]),
    Case("no end of the last value", G_ONE.replace("x</arg_value>", "x"), [("edit", EDIT)]),
    Case("no ends at all", "<tool_call>files.read-all\n<arg_key>path</arg_key>\n<arg_value>b",
         [READ]),
    Case("no begin of a value", G_ONE.replace("<arg_value>", ""), [("edit", EDIT)]),
    Case("an end of a value in it", glm("run", ("command", "a</arg_value> b")),
         [("run", {"command": "a</arg_value> b"})]),
    Case("JSON inside", f"<tool_call>edit\n{json.dumps(EDIT)}\n</tool_call>", [("edit", EDIT)]),
    Case("an object, as relatives write", f"<tool_call>{BARE}</tool_call>", [("edit", EDIT)]),
    Case("an unknown tool", glm("rm", ("a", "b")), [], glm("rm", ("a", "b"))),
    Case("words in a tag", "<tool_call>edit it", [], "<tool_call>edit it"),
    Case("breaks off in a text", G_ONE[: G_ONE.index("go")], [("edit", '{"path": "a.')],
         reason="length"),
    Case("breaks off in the name", "<tool_call>ed", [], "<tool_call>ed", reason="length"),
    Case("thinking", f"<think>Hm.</think>\n{G_ONE}", [("edit", EDIT)], thinking="Hm."),
]  # fmt: skip
