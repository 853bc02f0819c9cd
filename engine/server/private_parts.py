"""Check at start-up that libraries still have the private names that the server uses.

A release of a library may change a private name without notice: then the server does not start, and
its error names what is missing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from engine.errors import ConfigError

HTTP = "uvicorn.protocols.http.httptools_impl"
PARSING = "transformers.utils.chat_parsing"


class PrivateParts(NamedTuple):
    """Private functions, methods and attributes of one library that the server uses."""

    package: str
    tested: str
    """The version that the server was last tested with."""
    names: tuple[str, ...]
    """``module:name``, ``module:Class.method``, or ``module:Class.attribute`` that ``__init__``
    sets."""


def _of_class(name: str, *members: str) -> tuple[str, ...]:
    return tuple(f"{name}.{member}" for member in members)


UVICORN = PrivateParts(
    "uvicorn",
    "0.54.0",
    (
        f"{HTTP}:STATUS_LINE",
        *_of_class(
            f"{HTTP}:HttpToolsProtocol",
            *("_unset_keepalive_if_required", "cycle", "headers", "parser", "scope", "transport"),
            *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"),
            *("on_message_complete", "on_response_complete"),
        ),
        *_of_class(
            f"{HTTP}:RequestResponseCycle",
            *("disconnected", "flow", "keep_alive", "message_event", "response_complete"),
            *("response_started", "scope", "transport"),
        ),
        *_of_class("uvicorn:Server", "capture_signals", "server_state", "shutdown", "startup"),
    ),
)
TRANSFORMERS = PrivateParts(
    "transformers",
    "5.23.0",
    (
        f"{PARSING}.response_templates:load_response_template",
        *_of_class(
            f"{PARSING}.response_parser:ResponseParser", "feed", "finalize", "initial_events"
        ),
    ),
)


def check_private_parts(parts: PrivateParts) -> None:
    """Raise ``ConfigError`` if the installed version of the library lacks one of ``parts``."""
    if (missing := missing_part(parts)) is not None:
        raise ConfigError(
            f"{parts.package} {version(parts.package)} has no {missing}, which the server uses: "
            f"pip install {parts.package}=={parts.tested}, the version that it is tested with"
        )


def missing_part(parts: PrivateParts) -> str | None:
    """The first of ``parts`` that the installed version lacks; ``None`` if it has all. Raises
    ``ModuleNotFoundError`` if the library is not installed."""
    import_module(parts.package)
    return next((name for name in parts.names if not _exists(name, parts.package)), None)


def _exists(name: str, package: str) -> bool:
    module, _, path = name.partition(":")
    try:
        found: object = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise  # another library is missing
        return False
    *outer, last = path.split(".")
    for each in outer:
        found = getattr(found, each, None)
    return hasattr(found, last) or last in _set_by_init(found)


def _set_by_init(found: object) -> tuple[str, ...]:
    code = getattr(getattr(found, "__init__", None), "__code__", None)
    return () if code is None else tuple(code.co_names)
