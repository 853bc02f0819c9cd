"""Check before a request runs which tools' schemas a grammar can enforce."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

import msgspec

from engine.core.build import fault_of_grammar
from engine.messages.finite import endless
from engine.messages.structured import Grammar, ObjectRules, StructuredOutputsParams, form_of
from engine.server.errors import ApiError
from engine.server.speech.tools import Tool, Tools

MAX_CACHED_CHARS = 1 << 15  # longest schema whose result is cached
MAX_CACHED_GRAMMAR = 1 << 18  # longest grammar of a whole answer whose result is cached

logger = logging.getLogger("engine.server")


def enforceable(tools: Tools) -> Tools:
    """Mark each tool whose schema cannot be enforced, so that it accepts any arguments. Raises
    ``ApiError`` if a strict tool would be marked. Takes milliseconds for each new schema."""
    return tools._replace(all=[_enforceable(tool, tools.objects) for tool in tools.all])


def is_too_large(outputs: StructuredOutputsParams, rules: ObjectRules) -> bool:
    """Whether the grammar of a whole answer cannot be compiled; if so, the reason is logged."""
    whole = form_of(outputs).with_rules(rules)
    size = len(whole.text) + sum(len(part.text) for part in whole.parts)
    if why := (_fault_of_whole if size <= MAX_CACHED_GRAMMAR else fault_of_grammar)(whole):
        logger.warning("parameters of tools that are not strict are not enforced: %s", why)
    return bool(why)


def unenforced(tools: Tools) -> Tools:
    """Return the tools with all schemas marked as not enforced, except those of strict tools."""
    return tools._replace(all=[tool._replace(is_enforced=tool.is_strict) for tool in tools.all])


def _enforceable(tool: Tool, rules: ObjectRules) -> Tool:
    schema = tool.parameters
    try:
        text = msgspec.json.encode(schema).decode()
        find = fault_of if len(text) <= MAX_CACHED_CHARS else fault_of.__wrapped__
        why = find(text, rules, is_strict=tool.is_strict)
    except (ValueError, TypeError, RecursionError) as error:
        why = str(error)
    if not why:
        return tool
    if tool.is_strict:
        raise ApiError(
            400,
            f"parameters of the tool {tool.name}, which is strict, cannot be enforced: {why}; "
            "change them, or leave strict out",
            param="tools",
        )
    logger.warning(
        "parameters of the tool %s are not enforced, any arguments are accepted: %s", tool.name, why
    )
    return tool._replace(is_enforced=False)


@lru_cache(maxsize=1024)
def fault_of(schema: str, rules: ObjectRules, *, is_strict: bool) -> str:
    """The reason why a JSON schema cannot be enforced; "" if it can be. schema: JSON text."""
    if why := endless(msgspec.json.decode(schema)):
        return f"the schema {why}"
    return fault_of_grammar(schema_of_arguments(schema, is_strict=is_strict).with_rules(rules))


def schema_of_arguments(schema: Any, *, is_strict: bool) -> Grammar:
    """The grammar of a call's arguments by a JSON schema (dict or text), with white space as models
    write it. is_strict: a keyword that cannot be enforced is an error."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar("json", text, is_as_trained=True, is_lenient=not is_strict, backend="guidance")


_fault_of_whole = lru_cache(maxsize=32)(fault_of_grammar)
