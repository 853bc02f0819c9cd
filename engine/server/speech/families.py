# ruff: noqa: RUF001  (DeepSeek's markers have a vertical line of their own)
"""Model families, and how their models write thinking and tool calls.

A family is recognised by texts in the chat template. It defines the parser of tool calls, the
markers that this parser uses, and the format of calls in grammars that enforce them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.server.speech.calls import CallReader, CallSyntax
from engine.server.speech.harmony import HarmonyCalls
from engine.server.speech.named_calls import DeepSeekCalls, MistralCalls
from engine.server.speech.object_calls import ObjectCalls
from engine.server.speech.tagged_calls import GlmCalls, QwenCoderCalls


@dataclass(frozen=True)
class Calls:
    """The texts around tool calls in grammars that enforce them. Each call is ``begin``, the
    arguments and ``end``; ``between`` separates calls, ``before`` and ``after`` enclose all calls.
    ``{name}`` stands for the tool's name."""

    begin: str
    end: str
    form: Literal["object", "arguments", "xml", "pairs"] = "object"
    """``object``: a JSON object with the name and, under ``key``, the arguments; ``arguments``: the
    arguments as JSON; ``xml``, ``pairs``: each argument between tags."""
    key: str = "arguments"
    before: str = ""
    between: str | None = "\n"  # None: there is one call in an answer
    after: str = ""
    before_text: tuple[str, ...] = ()
    """Only for gpt-oss: beginnings of messages that may precede a call or the final text."""
    message_end: str = ""
    """The end of such a message."""
    text: str = ""
    """How the final text begins."""


@dataclass(frozen=True)
class Family:
    """Models that write thinking and tool calls in the same format."""

    name: str
    signs: tuple[str, ...]  # texts that the chat templates of this family contain
    reader: type[CallReader]
    syntax: CallSyntax
    calls: Calls
    thinking: tuple[str, str] | None = None
    short_ids: bool = False  # whether their templates require call ids of nine characters

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of tool calls."""
        return (*self.syntax.openers, *self.syntax.closers, *self.syntax.inner)


THINK = ("<think>", "</think>")
GENERIC = "generic"
"""The family of chat templates without a known format of calls. Tools are listed in the system
text, and calls are plain text in the format that is described there (``generic.py``)."""
GENERIC_CALLS = Calls("<tool_call>\n", "\n</tool_call>")
OBJECTS = CallSyntax(("<tool_call>",), ("</tool_call>",), bare="start")
DEEPSEEK = CallSyntax(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ("<｜tool▁sep｜>",),
)
FAMILIES = (
    Family(
        "gpt-oss",
        ("<|channel|>", "<|start|>"),
        HarmonyCalls,
        CallSyntax(
            ("<|start|>", "<|channel|>"),
            ("<|end|>", "<|return|>", "<|call|>"),
            ("<|message|>", "<|constrain|>"),
        ),
        Calls(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "",
            "arguments",
            between=None,
            before_text=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
            message_end="<|end|><|start|>assistant",
            text="<|channel|>final<|message|>",
        ),
    ),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>", "```json"),
        DeepSeekCalls,
        DEEPSEEK,
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
        DeepSeekCalls,
        DEEPSEEK,
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
        GlmCalls,
        CallSyntax(
            ("<tool_call>",),
            ("</tool_call>",),
            ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        Calls("<tool_call>{name}\n", "</tool_call>", "pairs"),
        THINK,
    ),
    Family(
        "qwen-coder",
        ("<tool_call>", "<function="),
        QwenCoderCalls,
        CallSyntax(
            ("<tool_call>", "<function="),
            ("</function>", "</tool_call>"),
            ("<parameter=", "</parameter>"),
        ),
        Calls("<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", "xml"),
        THINK,
    ),
    Family(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        MistralCalls,
        CallSyntax(("[TOOL_CALLS]",), (), ("[ARGS]", "[CALL_ID]"), bare="start"),
        Calls("[TOOL_CALLS]{name}[ARGS]", "", "arguments", between=""),
        ("[THINK]", "[/THINK]"),
        short_ids=True,
    ),
    Family(
        "mistral-v3",
        ("[TOOL_CALLS]",),
        MistralCalls,
        CallSyntax(("[TOOL_CALLS]",), bare="start"),
        Calls("", "", before="[TOOL_CALLS] [", between=", ", after="]"),
        short_ids=True,
    ),
    Family(
        "hermes",  # Qwen 2.5 and 3 too
        ("<tool_call>",),
        ObjectCalls,
        OBJECTS,
        Calls("<tool_call>\n", "\n</tool_call>"),
        THINK,
    ),
    Family(
        "llama3-json",
        ('"parameters"', "<|start_header_id|>"),
        ObjectCalls,
        CallSyntax(("<|python_tag|>",), bare="line"),
        Calls("", "", key="parameters", between="; "),
    ),
    *(
        Family(GENERIC, signs, ObjectCalls, OBJECTS._replace(bare="line"), GENERIC_CALLS, THINK)
        for signs in (THINK[:1], THINK[1:])
    ),
    Family(GENERIC, (), ObjectCalls, OBJECTS._replace(bare="line"), GENERIC_CALLS),
)
TOOL_FAMILIES = tuple(dict.fromkeys(family.name for family in FAMILIES))


def family_of(chat_template: str) -> Family:
    """The first family whose ``signs`` all occur in the template; a generic one if none fits."""
    return next(f for f in FAMILIES if all(sign in chat_template for sign in f.signs))
