# ruff: noqa: RUF001  (DeepSeek's markers have a vertical line of their own)
"""How families of models write thinking and tool calls.

A family is known by what its chat template writes. Each names the reader of its calls and the
markers that this reader knows, and the form in which calls are written when they are forced.
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
    before_text: tuple[str, ...] = ()
    """What begins messages that may stand before a call or a text, where these are messages too;
    ``message_end`` ends them, and ``text`` begins a text."""
    message_end: str = ""
    text: str = ""


@dataclass(frozen=True)
class Family:
    """Models that write alike."""

    name: str
    signs: tuple[str, ...]  # all of them are in the chat template
    reader: type[CallReader]
    syntax: CallSyntax
    calls: Calls
    thinking: tuple[str, str] | None = None
    short_ids: bool = False  # nine letters and digits is all that their templates take

    @property
    def markers(self) -> tuple[str, ...]:
        """All that their answers have."""
        return (*self.syntax.openers, *self.syntax.closers, *self.syntax.inner)


THINK = ("<think>", "</think>")
GENERIC = "generic"
"""The family of a chat template that writes no calls that are known here: the tools are listed in
the system's text, and calls are plain text in the form that is shown there (``generic.py``)."""
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
    """The first family whose signs are in the chat template; the last one has none."""
    return next(f for f in FAMILIES if all(sign in chat_template for sign in f.signs))
