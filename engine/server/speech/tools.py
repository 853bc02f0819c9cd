"""The tools of a request, and which of them must be called.

The form is OpenAI's for chat completions; requests of other APIs are brought into it.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from engine.server.errors import ApiError
from engine.server.speech.families import TOOL_FAMILIES
from engine.server.speech.turns import Speech

MAX_TOOLS = 512
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema
    is_strict: bool  # its arguments follow the schema whatever the model likes
    told: dict[str, Any]  # as chat templates see it


class Tools(NamedTuple):
    """What may be called, and whether something must be."""

    all: list[Tool]
    choice: Literal["auto", "required"]
    is_single: bool  # one call in an answer

    @property
    def told(self) -> list[dict[str, Any]]:
        return [tool.told for tool in self.all]

    @property
    def has_strict(self) -> bool:
        return any(tool.is_strict for tool in self.all)


def tools_of(
    given: list[dict[str, Any]] | None, choice: Any, parallel: bool | None
) -> Tools | None:
    """``None`` if there are none or none may be called. Raises ``ApiError``."""
    if not given:
        if choice not in (None, "none", "auto"):
            raise ApiError(
                400, f"tool_choice is {choice!r:.80} without tools: give some", param="tool_choice"
            )
        return None
    if len(given) > MAX_TOOLS:
        raise ApiError(
            400, f"tools has {len(given)} entries, the limit is {MAX_TOOLS}", param="tools"
        )
    tools = [_tool(each) for each in given]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ApiError(400, f"tools has {twice[0]!r} twice: names must differ", param="tools")
    allowed, must = _choice(choice, names)
    if not allowed:
        return None
    chosen = [tool for tool in tools if tool.name in allowed]
    return Tools(chosen, "required" if must else "auto", parallel is False)


def check_family(speech: Speech) -> None:
    """Raises ``ApiError`` if nobody knows how this model writes tool calls."""
    if not speech.has_tools:
        raise ApiError(
            400,
            "tools are given, but the model's chat template is of no family whose tool calls are "
            f"known ({', '.join(TOOL_FAMILIES)}): leave tools out, or start the server with a "
            "--chat-template of one of them",
            param="tools",
        )


def _tool(given: dict[str, Any]) -> Tool:
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise ApiError(
            400,
            f"tools has {given!r:.80}, must have type function and a function",
            param="tools",
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            400,
            f"tools has a function named {name!r:.80}, must be 1 to 128 letters, digits, '_', '-' "
            "and '.'",
            param="tools",
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ApiError(
            400,
            f"parameters of the tool {name} are {parameters!r:.80}, must be a JSON schema of type "
            "object",
            param="tools",
        )
    parameters = {"type": "object", "properties": {}, **parameters}
    told = {"type": "function", "function": {**function, "parameters": parameters}}
    return Tool(name, parameters, function.get("strict") is True, told)


def _choice(choice: Any, names: list[str]) -> tuple[list[str], bool]:
    """Tools that may be called, and whether one of them must be."""
    if choice is None or choice in CHOICES:
        return ([] if choice == "none" else names), choice == "required"
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        return _known([name], names), True
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        about = choice.get("allowed_tools")
        if isinstance(about, dict) and about.get("mode") in ("auto", "required"):
            listed = [_listed(each) for each in about.get("tools") or []]
            return _known(listed, names), about["mode"] == "required"
    raise ApiError(
        400,
        f"tool_choice is {choice!r:.80}, must be none, auto, required, or "
        '{"type": "function", "function": {"name": ...}}',
        param="tool_choice",
    )


def _listed(each: Any) -> Any:
    function = each.get("function", each) if isinstance(each, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def _known(wanted: list[Any], names: list[str]) -> list[str]:
    if not wanted or any(name not in names for name in wanted):
        wrong = next((name for name in wanted if name not in names), None)
        raise ApiError(
            400,
            f"tool_choice names {wrong!r:.80}, tools are: {', '.join(names)}",
            param="tool_choice",
        )
    return wanted
