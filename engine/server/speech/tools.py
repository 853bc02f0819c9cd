"""The tools of a request, and which of them may or must be called.

The input has the format of OpenAI's chat completions; other APIs convert theirs to it."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from engine.config.near import near_value
from engine.messages.structured import NO_RULES, ObjectRules
from engine.server.errors import field_error
from engine.server.speech.custom import function_of, schema_of_input

MAX_TOOLS = 512
MAX_DEPTH = 16  # nested references in a schema that are followed
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
CHOICES = ("none", "auto", "required")


class Tool(NamedTuple):
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema
    is_strict: bool  # whether the arguments must match the schema
    described: dict[str, Any]  # the tool for the chat template
    is_enforced: bool = True  # False: the schema cannot be enforced, any arguments are accepted
    is_custom: bool = False  # whether its input is plain text, the argument ``input``


class ValueKinds(NamedTuple):
    """The JSON types that a schema allows, and the allowed values if it lists them."""

    types: list[str]  # empty: any type
    values: list[Any]


Mode = Literal["auto", "required"]


class Choice(NamedTuple):
    """The tool names that ``tool_choice`` allows, and whether the model must call a tool."""

    names: list[str]
    mode: Mode
    is_single: bool = False


class Tools(NamedTuple):
    """The tools that the model may call, and whether it must call one."""

    all: list[Tool]
    choice: Mode
    is_single: bool  # whether an answer has at most one call
    objects: ObjectRules = NO_RULES  # rules for objects in their schemas

    @property
    def described(self) -> list[dict[str, Any]]:
        return [tool.described for tool in self.all]

    @property
    def read_as(self) -> list[dict[str, Any]]:
        """The tools as parsers of calls need them: each tool's name and the types of its
        arguments."""
        return [_types_of(tool) for tool in self.all]

    @property
    def custom(self) -> frozenset[str]:
        """The names of custom tools, whose input is plain text."""
        return frozenset(tool.name for tool in self.all if tool.is_custom)

    @property
    def has_strict(self) -> bool:
        return any(tool.is_strict for tool in self.all)


def tools_of(
    given: list[dict[str, Any]] | None, choice: Any, parallel: bool | None
) -> Tools | None:
    """The tools that the model may call, by a request's ``tools``, ``tool_choice`` and
    ``parallel_tool_calls``; ``None`` if there are none. Raises ``ApiError``."""
    if not given:
        if choice not in (None, "none", "auto"):
            raise field_error(
                "tool_choice", f"is {choice!r:.80} without tools: add tools, or leave it out"
            )
        return None
    if len(given) > MAX_TOOLS:
        raise field_error(
            "tools", f"has {len(given)} entries, the limit is {MAX_TOOLS}: send fewer"
        )
    tools = [_tool(each) for each in given]
    names = [tool.name for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise field_error("tools", f"has two tools named {twice[0]!r}: rename one of them")
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
        raise field_error(
            "tools",
            f"has {given!r:.80}, must have type function and an object in function, or type "
            "custom and an object in custom",
        )
    function = {key: value for key, value in function.items() if value is not None}
    name, parameters = _known_name(function.get("name")), function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise field_error(
            "tools",
            f"has {name} with parameters {parameters!r:.80}, must be a schema of type object",
        )
    nothing = [key for key in ("properties", "required") if parameters.get(key, "") is None]
    parameters = {key: value for key, value in parameters.items() if key not in nothing}
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise field_error(
            "tools",
            f"has {name} with properties {properties!r:.40}, must be an object, and required "
            f"{required!r:.40}, must be a list",
        )
    parameters = {"type": "object", "properties": {}, **parameters}
    if function.get("strict") not in (None, True, False):
        raise field_error(
            "tools", f"has {name} with strict {function['strict']!r:.40}, must be true or false"
        )
    described = {"type": "function", "function": {**function, "parameters": parameters}}
    return Tool(name, parameters, function.get("strict") is True, described)


def _custom(given: dict[str, Any]) -> Tool:
    """Parse a custom tool. It is strict if its input must match a grammar."""
    function, pattern = function_of(given)
    name, described = _known_name(function["name"]), {"type": "function", "function": function}
    is_strict = pattern is not None
    return Tool(name, schema_of_input(pattern), is_strict, described, is_custom=True)


def _known_name(name: Any) -> str:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise field_error(
            "tools",
            f"has a function named {name!r:.80}, names must have 1 to 128 letters, digits, "
            "'_', '-' and '.'",
        )
    return name


def _choice(choice: Any, names: list[str]) -> Choice:
    """Parse ``tool_choice`` of a request whose tools have these names. If it names one tool, the
    answer must call this tool exactly once. Raises ``ApiError``."""
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
    raise field_error(
        "tool_choice",
        f"is {choice!r:.80}, must be none, auto, required, or "
        f'{{"type": "function", "function": {{"name": ...}}}}{near_value(choice, CHOICES)}',
    )


def _listed(each: Any) -> Any:
    if not isinstance(each, dict):
        return None
    function = each.get("function") or each.get("custom") or each
    return function.get("name") if isinstance(function, dict) else None


def _known(wanted: list[Any], names: list[str]) -> list[str]:
    if not wanted or any(name not in names for name in wanted):
        wrong = next((name for name in wanted if name not in names), None)
        raise field_error(
            "tool_choice",
            f"names {wrong!r:.80}, must name one of tools: {', '.join(names)}"
            f"{near_value(wrong, names)}",
        )
    return wanted


def kinds_of(schema: Any, root: dict[str, Any], depth: int = 0) -> ValueKinds:
    """The JSON types and values that a property's schema allows. root: where to find ``$ref``."""
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
    """The schema in ``root`` that a local reference points to; ``None`` if there is none."""
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
    """The name of a tool and the types of its arguments; ``string`` is the last type, because a
    parser tries them in order."""
    properties = {}
    for name, schema in tool.parameters["properties"].items():
        types = dict.fromkeys(kinds_of(schema, tool.parameters).types)
        properties[name] = {"type": sorted(types, key=lambda each: each == "string")}
    about = {"name": tool.name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": about}
