# ruff: noqa: RUF001  (DeepSeek's markers have a vertical line of their own)
"""How families of models write thinking and tool calls.

Each is a response template, the format in which tokenizers describe themselves
(``response_template`` in tokenizer_config.json, read by transformers' ``ResponseParser``): a field
is a part of the answer, between what opens and what closes it. A model whose tokenizer brings one
needs no family. The others are known by what their chat template writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

NOWHERE = "\ue000\ue001\ue002"  # an anchor that no prompt has: each answer is read from its start


@dataclass(frozen=True)
class Calls:
    """How tool calls are written when they are forced: ``begin`` call ``end``, with ``between`` two
    of them, all of it inside ``before`` and ``after``. ``{name}`` stands for the tool's name."""

    begin: str
    end: str
    form: Literal["object", "arguments", "xml", "pairs"] = "object"
    """``object``: JSON with the name and, under ``key``, the arguments; ``arguments``: these alone
    as JSON; ``xml``, ``pairs``: each of them between tags."""
    key: str = "arguments"
    before: str = ""
    between: str | None = "\n"  # None: there is one call in an answer
    after: str = ""


@dataclass(frozen=True)
class Family:
    """Models that write alike."""

    name: str
    signs: tuple[str, ...]  # all of them are in the chat template
    fields: dict[str, dict[str, Any]]
    calls: Calls
    thinking: tuple[str, str] | None = None
    short_ids: bool = False  # nine letters and digits is all that their templates take

    def template(self, *, thinks: bool) -> dict[str, Any]:
        """thinks: whether the model does; some of its relatives may."""
        fields = {k: v for k, v in self.fields.items() if thinks or k != "thinking"}
        return {"version": 1, "start_anchor": NOWHERE, "fields": fields}


THINK = ("<think>", "</think>")
THINKING = {"open": THINK[0], "close": THINK[1]}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
LAX = {"content": "json", "content_args": {"allow_non_json": True}, "repeats": True}
CONTENT: dict[str, Any] = {}
GENERIC = "generic"
"""The family of a chat template that writes no calls that are known here: the tools are listed in
the system's text, and calls are plain text in the form that is shown there (``generic.py``)."""
GENERIC_FIELD = {"open": "<tool_call>", "close": "</tool_call>", **LAX}
GENERIC_CALLS = Calls("<tool_call>\n", "\n</tool_call>")

FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|start|>"),
        {
            "thinking": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
            },
            "tool_calls": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>commentary to=functions\."
                r"(?P<name>[\w.-]+)[^<]*?(?:<\|constrain\|>\w+)?<\|message\|>",
                "close": ["<|call|>", "<|end|>", "<|return|>"],
                **LAX,
                "transform": NAMED,
            },
            "content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*"
                r"(?:<\|constrain\|>\w+)?<\|message\|>",
                "close": ["<|end|>", "<|return|>"],
                "repeats": True,
                "join": "\n",
            },
            "rest": {},
        },
        Calls(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "",
            "arguments",
            between=None,
        ),
    ),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "```json"),
        {
            "thinking": THINKING,
            "tool_calls": {
                "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>function"
                r"<｜tool▁sep｜>(?P<name>[\w.-]+)\n```json\n",
                "close_pattern": r"\n```\s*<｜tool▁call▁end｜>",
                **LAX,
                "transform": NAMED,
            },
            "after": {"open": "<｜tool▁calls▁end｜>"},
            "content": CONTENT,
        },
        Calls(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            "arguments",
            before="<｜tool▁calls▁begin｜>",
            after="<｜tool▁calls▁end｜>",
        ),
        THINK,
    ),
    Family(
        "deepseek-v3.1",
        ("<｜tool▁calls▁begin｜>",),
        {
            "thinking": THINKING,
            "tool_calls": {
                "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>"
                r"(?P<name>[\w.-]+)<｜tool▁sep｜>",
                "close": "<｜tool▁call▁end｜>",
                **LAX,
                "transform": NAMED,
            },
            "after": {"open": "<｜tool▁calls▁end｜>"},
            "content": CONTENT,
        },
        Calls(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "arguments",
            before="<｜tool▁calls▁begin｜>",
            between="",
            after="<｜tool▁calls▁end｜>",
        ),
        THINK,
    ),
    Family(
        "glm",
        ("<tool_call>", "<arg_key>"),
        {
            "thinking": THINKING,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*(?P<name>[\w.-]+)\s*",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<arg_key>(?P<key>.*?)</arg_key>\s*"
                    r"<arg_value>(?P<value>.*?)</arg_value>"
                },
                "repeats": True,
                "transform": NAMED,
            },
            "content": CONTENT,
        },
        Calls("<tool_call>{name}\n", "</tool_call>", "pairs"),
        THINK,
    ),
    Family(
        "qwen-coder",
        ("<tool_call>", "<function="),
        {
            "thinking": THINKING,
            "tool_calls": {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[\w.-]+)>\s*",
                "close": "</tool_call>",
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "repeats": True,
                "transform": NAMED,
            },
            "content": CONTENT,
        },
        Calls("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "xml"),
        THINK,
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "thinking": {"open": "[THINK]", "close": "[/THINK]"},
            "tool_calls": {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\][^\[{]*)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])",
                **LAX,
                "transform": NAMED,
            },
            "content": CONTENT,
        },
        Calls("[TOOL_CALLS]{name}[ARGS]", "", "arguments", between=""),
        ("[THINK]", "[/THINK]"),
        short_ids=True,
    ),
    Family(
        "mistral-v3",
        ("[TOOL_CALLS]",),
        {"tool_calls": {"open": "[TOOL_CALLS]", **LAX}, "content": CONTENT},
        Calls("", "", before="[TOOL_CALLS] [", between=", ", after="]"),
        short_ids=True,
    ),
    Family(
        "hermes",  # Qwen 2.5 and 3 too
        ("<tool_call>",),
        {
            "thinking": THINKING,
            "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", **LAX},
            "content": CONTENT,
        },
        Calls("<tool_call>\n", "\n</tool_call>"),
        THINK,
    ),
    Family(
        "llama3-json",
        ('"parameters"', "<|start_header_id|>"),
        {
            "tool_calls": {
                "open_pattern": r'\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"(?:name|type)")',
                **LAX,
            },
            "content": CONTENT,
        },
        Calls("", "", key="parameters", between="; "),
    ),
    *(
        Family(
            GENERIC,
            signs,
            {"thinking": THINKING, "tool_calls": GENERIC_FIELD, "content": CONTENT},
            GENERIC_CALLS,
            THINK,
        )
        for signs in (THINK[:1], THINK[1:])
    ),
    Family(GENERIC, (), {"tool_calls": GENERIC_FIELD, "content": CONTENT}, GENERIC_CALLS),
)
TOOL_FAMILIES = tuple(dict.fromkeys(family.name for family in FAMILIES))


def family_of(chat_template: str) -> Family:
    """The first family whose signs are in the chat template; the last one has none."""
    return next(f for f in FAMILIES if all(sign in chat_template for sign in f.signs))
