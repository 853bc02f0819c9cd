"""Find the first wrong field in the body of a request, and describe the error."""

from __future__ import annotations

import types
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec

from engine.config.near import did_you_mean
from engine.errors import RequestError
from engine.server.errors import ApiError

SAME = (
    {"max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens"},
    {"stop", "stop_sequences"},
    {"messages", "input", "prompt"},
    {"system", "instructions"},
    {"response_format", "text", "output_config"},
    {"reasoning_effort", "reasoning", "thinking"},
    {"return_token_strs", "token_strs"},
    {"text_1", "data_1", "queries"},
    {"text_2", "data_2", "documents", "texts"},
)
"""Groups of fields that mean the same in different APIs."""


T = TypeVar("T", bound=msgspec.Struct)


def read_from(given: Any, kind: type[T], path: str = "") -> T:
    """Convert decoded JSON to a struct. ``path``: where it is in the body. Raises ``ApiError`` that
    names the wrong field, or a ``RequestError`` raised by the struct."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RequestError):
            raise error.__cause__ from error
        _refuse(given, kind, str(error), path)


def _refuse(given: Any, kind: Any, why: str, path: str = "") -> NoReturn:
    """Raise an ``ApiError`` that names what in ``given`` does not fit the type ``kind``.

    path: where ``given`` is in the body; why: msgspec's message, used if there is no better one."""
    if isinstance(given, dict) and (struct := _struct_of(kind)) is not None:
        _refuse_fields(given, struct, path)
    for arm in _arms(kind):
        for key, item, inner in _parts(given, arm):
            if (wrong := _fault(item, inner)) is not None:
                _refuse(item, inner, wrong, f"{path}{key}")
    literals = [get_args(arm) for arm in _arms(kind) if get_origin(arm) is Literal]
    choices = [choice for each in literals for choice in each]
    if choices and isinstance(given, str):
        near = did_you_mean(given, choices)
        message = f"{path} is {given!r:.80}, must be one of: {', '.join(choices)}{near}"
        raise ApiError(400, message, param=path or None, code="invalid_value")
    shown = f" {msgspec.json.encode(given)[:60].decode(errors='replace')}"
    is_plain = given is not None and not isinstance(given, dict | list)
    message = f"{why}{shown if is_plain else ''}"
    raise ApiError(
        400, f"{path}: {message}" if path else message, param=path or None, code="invalid_type"
    )


def _refuse_fields(given: dict[str, Any], kind: type[msgspec.Struct], path: str) -> None:
    """Raise ``ApiError`` for the first field that is unknown, missing or wrong, if there is one."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    before = f"{path}." if path else ""
    for name in given:
        if name not in fields and kind.__struct_config__.forbid_unknown_fields:
            raise unknown_field(name, fields, before)
    for name, field in fields.items():
        if field.required and name not in given:
            message = f"{before}{name} is missing: add it, it is required"
            code = "missing_required_parameter"
            raise ApiError(400, message, param=f"{before}{name}", code=code)
    for name, value in given.items():
        if name in fields and (wrong := _fault(value, fields[name].type)) is not None:
            _refuse(value, fields[name].type, wrong, f"{before}{name}")


def unknown_field(name: str, known: Any, before: str = "") -> ApiError:
    """The error for an unknown field. ``known``: names of the valid fields; ``before``: path of the
    object that has the field, with a dot at its end; empty for the body itself."""
    same = [other for group in SAME if name in group for other in group & {*known}]
    near = f"; did you mean {same[0]!r}?" if len(same) == 1 else did_you_mean(name, known)
    return ApiError(
        400,
        f"{before}{name:.80} is not supported: leave it out{near}",
        param=f"{before}{name:.80}",
        code="unknown_parameter",
    )


def _fault(value: Any, kind: Any) -> str | None:
    """msgspec's message if a value does not have the type ``kind``, else ``None``."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        return str(error).partition(" - at `")[0]
    return None


def _arms(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _struct_of(kind: Any) -> type[msgspec.Struct] | None:
    structs = [
        arm for arm in _arms(kind) if isinstance(arm, type) and issubclass(arm, msgspec.Struct)
    ]
    return structs[0] if len(structs) == 1 else None


def _parts(given: Any, kind: Any) -> list[tuple[str, Any, Any]]:
    """Return (path suffix, value, type) of each item of a list or dict; [] for other values."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list and isinstance(given, list):
        return [(f"[{place}]", item, inner[0]) for place, item in enumerate(given)]
    if origin is dict and isinstance(given, dict):
        return [(f".{key:.40}", item, inner[1]) for key, item in given.items()]
    return []
