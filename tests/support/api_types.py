"""Bodies of requests from the parameter types of the packages ``openai`` and ``anthropic``.

A body is the least that a type demands; each optional parameter, however deep, is tried as null
against the same body without it. Needs nothing but these packages, so that it walks the newest ones
in an environment of their own.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_origin

import typing_extensions

CREATE = {
    "/v1/completions": ("openai.types.completion_create_params", "CompletionCreateParamsBase"),
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params",
        "CompletionCreateParamsBase",
    ),
    "/v1/responses": (
        "openai.types.responses.response_create_params",
        "ResponseCreateParamsBase",
    ),
    "/v1/messages": ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
    "/v1/messages?beta=true": (
        "anthropic.types.beta.message_create_params",
        "MessageCreateParamsBase",
    ),
    "/v1/messages/count_tokens": (
        "anthropic.types.message_count_tokens_params",
        "MessageCountTokensParams",
    ),
}
"""The type of a body, by path."""
HEADERS = ("betas", "user_profile_id", "workspace_id")
"""Parameters that clients send as headers."""
NEEDED = ("input", "prompt")
"""Parameters that no request does without, whatever its type says."""
MAX_DEPTH = 7
TEXTS = {
    "role": "user",
    "name": "lookup",
    "arguments": "{}",
    "model": "box",
    "prompt": "Say it",
    "input": "Say it",
    "max_tokens": 2,
}
"""Values of parameters of which not any text will do."""


class Null(NamedTuple):
    """A body with a parameter that is null, and the same without it."""

    name: str
    absent: Any
    null: Any


def body_type(path: str) -> Any:
    module, name = CREATE[path]
    return getattr(importlib.import_module(module), name)


def nulls_of(path: str) -> Iterator[Null]:
    """Null values for each optional parameter of a path."""
    for name, absent, null in _nulls(body_type(path), (), ""):
        if name not in (*HEADERS, *NEEDED):
            yield Null(name, _whole(path, absent), _whole(path, null))


def bodies_of(path: str) -> Iterator[tuple[str, Any]]:
    """Each optional parameter by name, and the least body that has it."""
    kind = body_type(path)
    least = _whole(path, _least(kind, ()))
    for name, hint in _fields(kind).items():
        if name not in least and name not in HEADERS:
            yield name, {**least, name: _least(hint, (), name)}


def _whole(path: str, body: Any) -> Any:
    """With what no request does without."""
    more = {"input": TEXTS["input"]} if path == "/v1/responses" else {}
    return {**more, **body, "model": "box"}


def _nulls(hint: Any, outer: tuple[Any, ...], name: str) -> Iterator[tuple[str, Any, Any]]:
    """Names of parameters, and values of this type without each and with null for it."""
    hint = _bare(hint)
    if len(outer) > MAX_DEPTH:
        return
    if _is_dict_type(hint):
        yield from _nulls_inside(hint, outer)
    elif _is_union(hint):
        for arm in get_args(hint):
            label = getattr(_bare(arm), "__name__", "")
            for path, absent, null in _nulls(arm, outer, name):
                yield f"{path} of {label}" if label else path, absent, null
    elif get_origin(hint) in (list, Iterable, Sequence):
        for path, absent, null in _nulls(get_args(hint)[0], outer, name):
            yield f"[].{path}", [absent], [null]


def _nulls_inside(kind: Any, outer: tuple[Any, ...]) -> Iterator[tuple[str, Any, Any]]:
    if kind in outer:
        return
    least = _least(kind, outer)
    for key, inner in _fields(kind).items():
        if key not in least:
            yield key, least, {**least, key: None}
        for path, absent, null in _nulls(inner, (*outer, kind), key):
            yield f"{key}.{path}", {**least, key: absent}, {**least, key: null}


def _least(hint: Any, outer: tuple[Any, ...], name: str = "") -> Any:
    """The least value of a type."""
    hint = _bare(hint)
    origin = get_origin(hint)
    if _is_dict_type(hint):
        needed = {key: inner for key, inner in _fields(hint).items() if _is_required(hint, inner)}
        return {key: _least(inner, (*outer, hint), key) for key, inner in needed.items()}
    if origin is typing.Literal:
        return get_args(hint)[0]
    if _is_union(hint):
        arms = [arm for arm in get_args(hint) if arm is not type(None)]
        texts = [arm for arm in arms if arm is str]
        return _least((texts or arms)[0], outer, name)
    if origin in (list, Iterable, Sequence):
        item = get_args(hint)[0]
        return [] if _bare(item) in outer else [_least(item, outer, name)]
    if origin is dict:
        return {}
    values: dict[Any, Any] = {str: TEXTS.get(name, "x"), int: 1, float: 1.0, bool: True}
    return TEXTS["max_tokens"] if name == "max_tokens" else values.get(hint, {})


def _fields(kind: Any) -> dict[str, Any]:
    return typing_extensions.get_type_hints(kind, include_extras=True)


def _is_required(kind: Any, hint: Any) -> bool:
    """The annotations are texts, so that the class itself does not know it."""
    origin = get_origin(hint)
    return origin is typing_extensions.Required or (
        kind.__total__ and origin is not typing_extensions.NotRequired
    )


def _bare(hint: Any) -> Any:
    """Without what only describes it."""
    while get_origin(hint) in (
        typing_extensions.Required,
        typing_extensions.NotRequired,
        typing.Annotated,
    ):
        hint = get_args(hint)[0]
    return getattr(hint, "__value__", hint)


def _is_dict_type(hint: Any) -> bool:
    return typing_extensions.is_typeddict(hint)


def _is_union(hint: Any) -> bool:
    return get_origin(hint) is typing.Union or type(hint).__name__ == "UnionType"
