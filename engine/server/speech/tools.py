"""The tools of a request, and which of them must be called.

The form is OpenAI's for chat completions; requests of other APIs are brought into it.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from engine.config.near import near_value
from engine.messages.structured import NO_RULES, ObjectRules
from engine.server.errors import ApiError
from engine.server.speech.custom import function_of, schema_of_input

MAX_TOOLS = 512
MAX_DEPTH = 16  # of references in a schema that are followed
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema
    is_strict: bool  # its arguments follow the schema whatever the model likes
    described: dict[str, Any]  # as chat templates see it
    is_enforced: bool = True  # no: the schema cannot be, and any arguments will do
    is_custom: bool = False  # its input is a text, which is all its arguments


class ValueKinds(NamedTuple):
    """What a schema admits: types, and the values if it lists them."""

    types: list[str]  # none: any
    values: list[Any]


Mode = Literal["auto", "required"]


class Choice(NamedTuple):
    """What ``tool_choice`` leaves of the tools."""

    names: list[str]
    mode: Mode
    is_single: bool = False


class Tools(NamedTuple):
    """What may be called, and whether something must be."""

    all: list[Tool]
    choice: Mode
    is_single: bool  # one call in an answer at most
    objects: ObjectRules = NO_RULES  # of their arguments

    @property
    def described(self) -> list[dict[str, Any]]:
        return [tool.described for tool in self.all]

    @property
    def read_as(self) -> list[dict[str, Any]]:
        """These tools for reading their calls: only the types of each argument."""
        return [_types_of(tool) for tool in self.all]

    @property
    def custom(self) -> frozenset[str]:
        """Names of those whose input is a text."""
        return frozenset(tool.name for tool in self.all if tool.is_custom)

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
    chosen = _choice(choice, names)
    if not chosen.names:
        return None
    allowed = [tool for tool in tools if tool.name in chosen.names]
    return Tools(allowed, chosen.mode, chosen.is_single or parallel is False)


def _tool(given: dict[str, Any]) -> Tool:
    if given.get("type") == "custom":
        return _custom(given)
    function = given.get("function")
    if given.get("type") != "function" or not isinstance(function, dict):
        raise ApiError(
            400,
            f"tools has {given!r:.80}, must have type function and a function, or custom",
            param="tools",
        )
    function = {key: value for key, value in function.items() if value is not None}
    name, parameters = _known_name(function.get("name")), function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ApiError(
            400,
            f"parameters of the tool {name} are {parameters!r:.80}, must be a JSON schema of type "
            "object",
            param="tools",
        )
    nothing = [key for key in ("properties", "required") if parameters.get(key, "") is None]
    parameters = {key: value for key, value in parameters.items() if key not in nothing}
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise ApiError(
            400,
            f"parameters of the tool {name} have properties {properties!r:.40} and required "
            f"{required!r:.40}, must be an object and a list",
            param="tools",
        )
    parameters = {"type": "object", "properties": {}, **parameters}
    if function.get("strict") not in (None, True, False):
        raise ApiError(
            400,
            f"strict of the tool {name} is {function['strict']!r:.40}, must be true or false",
            param="tools",
        )
    described = {"type": "function", "function": {**function, "parameters": parameters}}
    return Tool(name, parameters, function.get("strict") is True, described)


def _custom(given: dict[str, Any]) -> Tool:
    """Its input follows its grammar whatever the model likes."""
    function, pattern = function_of(given)
    name, described = _known_name(function["name"]), {"type": "function", "function": function}
    is_strict = pattern is not None
    return Tool(name, schema_of_input(pattern), is_strict, described, is_custom=True)


def _known_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ApiError(
            400,
            f"tools has a function named {name!r:.80}, must be 1 to 128 letters, digits, '_', '-' "
            "and '.'",
            param="tools",
        )
    return name


def _choice(choice: Any, names: list[str]) -> Choice:
    """What may be called, and whether it must be: a tool that is named, once."""
    if choice is None or choice in CHOICES:
        allowed = [] if choice == "none" else names
        return Choice(allowed, "required" if choice == "required" else "auto")
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return Choice(_known([_listed(choice)], names), "required", is_single=True)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        about = choice.get("allowed_tools", choice)
        if isinstance(about, dict) and about.get("mode") in ("auto", "required"):
            given = about.get("tools")
            listed = [_listed(each) for each in given] if isinstance(given, list) else []
            return Choice(_known(listed, names), about["mode"])
    raise ApiError(
        400,
        f"tool_choice is {choice!r:.80}, must be none, auto, required, or "
        f'{{"type": "function", "function": {{"name": ...}}}}{near_value(choice, CHOICES)}',
        param="tool_choice",
    )


def _listed(each: Any) -> Any:
    if not isinstance(each, dict):
        return None
    function = each.get("function") or each.get("custom") or each
    return function.get("name") if isinstance(function, dict) else None


def _known(wanted: list[Any], names: list[str]) -> list[str]:
    if not wanted or any(name not in names for name in wanted):
        wrong = next((name for name in wanted if name not in names), None)
        raise ApiError(
            400,
            f"tool_choice names {wrong!r:.80}, tools are: {', '.join(names)}"
            f"{near_value(wrong, names)}",
            param="tool_choice",
        )
    return wanted


def kinds_of(schema: Any, root: dict[str, Any], depth: int = 0) -> ValueKinds:
    """The kinds of values that a property may have; references are followed."""
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return ValueKinds([], [])
    if isinstance(schema.get("$ref"), str):
        return kinds_of(_at(root, schema["$ref"]), root, depth + 1)
    values = schema["enum"] if isinstance(schema.get("enum"), list) else []
    if "const" in schema:
        values = [schema["const"]]
    if values:
        return ValueKinds([_type_of(value) for value in values], values)
    given = schema.get("type")
    types = given if isinstance(given, list) else [given] if isinstance(given, str) else []
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            found = [kinds_of(each, root, depth + 1) for each in schema[name]]
            if not all(each.types for each in found):
                return ValueKinds([], [])
            types = [*types, *(kind for each in found for kind in each.types)]
    return ValueKinds([str(each) for each in types], [])


def _at(root: Any, reference: str) -> Any:
    """What a local reference points to; ``None`` if there is nothing."""
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or (part and name not in found):
            return None
        found = found[name] if part else found
    return found


def _type_of(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def _types_of(tool: Tool) -> dict[str, Any]:
    """The types of arguments; a text is the last that a value is taken for."""
    properties = {}
    for name, schema in tool.parameters["properties"].items():
        types = dict.fromkeys(kinds_of(schema, tool.parameters).types)
        properties[name] = {"type": sorted(types, key=lambda each: each == "string")}
    about = {"name": tool.name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": about}
