"""Which schemas of tools can be enforced: found out before a request runs."""

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

MAX_KEPT_CHARS = 1 << 15  # of a schema whose fault is remembered
MAX_KEPT_WHOLE = 1 << 18  # the same, of all that an answer must be

logger = logging.getLogger("engine.server")


def enforceable(tools: Tools) -> Tools:
    """These tools; one whose schema cannot be enforced takes any arguments if it is not strict.
    Raises ``ApiError`` for one that is. Takes milliseconds for each schema that is new."""
    return tools._replace(all=[_enforceable(tool, tools.objects) for tool in tools.all])


def is_too_large(form: StructuredOutputsParams, rules: ObjectRules) -> bool:
    """Whether a form cannot be compiled as a whole, though each part can."""
    whole = form_of(form).with_rules(rules)
    size = len(whole.text) + sum(len(part.text) for part in whole.parts)
    if why := (_fault_of_whole if size <= MAX_KEPT_WHOLE else fault_of_grammar)(whole):
        logger.warning("parameters of tools that are not strict are not enforced: %s", why)
    return bool(why)


def unenforced(tools: Tools) -> Tools:
    """These tools without the schemas of those that are not strict."""
    return tools._replace(all=[tool._replace(is_enforced=tool.is_strict) for tool in tools.all])


def _enforceable(tool: Tool, rules: ObjectRules) -> Tool:
    schema = tool.parameters
    try:
        text = msgspec.json.encode(schema).decode()
        look = fault_of if len(text) <= MAX_KEPT_CHARS else fault_of.__wrapped__
        why = look(text, rules, is_strict=tool.is_strict)
    except (ValueError, TypeError, RecursionError) as error:
        why = str(error)
    if not why:
        return tool
    if tool.is_strict:
        raise ApiError(
            400,
            f"parameters of the tool {tool.name}, which is strict, cannot be enforced: {why}",
            param="tools",
        )
    logger.warning(
        "parameters of the tool %s are not enforced, any arguments are taken: %s", tool.name, why
    )
    return tool._replace(is_enforced=False)


@lru_cache(maxsize=1024)
def fault_of(schema: str, rules: ObjectRules, *, is_strict: bool) -> str:
    """Why a schema, as JSON, cannot be enforced; "" if it can be."""
    if why := endless(msgspec.json.decode(schema)):
        return f"the schema {why}"
    return fault_of_grammar(schema_of_arguments(schema, is_strict=is_strict).with_rules(rules))


def schema_of_arguments(schema: Any, *, is_strict: bool) -> Grammar:
    """A schema, as a dict or as JSON, in the way in which models write calls. is_strict: a keyword
    that cannot be enforced is an error."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    return Grammar("json", text, is_as_trained=True, is_lenient=not is_strict, backend="guidance")


_fault_of_whole = lru_cache(maxsize=32)(fault_of_grammar)
