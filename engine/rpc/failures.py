"""Encodes errors as data and rebuilds them: a client gets the same error wherever its core runs."""

from __future__ import annotations

from engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    ModelError,
    PolicyError,
    RefusedError,
    RequestError,
    RequestTypeError,
    WireError,
)
from engine.ipc.codec import plain_text
from engine.messages.wire import Failure

KINDS: dict[str, type[EngineError]] = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        EngineError,
        ModelError,
        PolicyError,
        RefusedError,
        RequestError,
        RequestTypeError,
        WireError,
    )
}


class CoreTraceback(Exception):
    """The traceback of a core that died in another process; the cause of ``EngineDeadError``."""

    def __str__(self) -> str:
        return "in the process of the core:\n" + "\n".join(map(str, self.args))


def failure_of(error: Exception, default: type[EngineError] = EngineError) -> Failure:
    """An error as data; one that is not the engine's own becomes a ``default``."""
    if type(error).__name__ not in KINDS:
        return Failure(default.__name__, plain_text(f"{type(error).__name__}: {error}"))
    retry_after = error.retry_after if isinstance(error, RefusedError) else None
    return Failure(type(error).__name__, plain_text(str(error)), retry_after)


def error_of(failure: Failure) -> EngineError:
    """The error that was sent; an unknown kind becomes an ``EngineError`` that names it."""
    kind = KINDS.get(failure.kind)
    if kind is None:
        return EngineError(f"{failure.kind}: {failure.message}")
    if kind is RefusedError:
        return RefusedError(failure.message, failure.retry_after)
    return kind(failure.message)


def death_of(message: str, traceback: str = "") -> EngineDeadError:
    """The error for a core that died, with what is known of the cause."""
    error = EngineDeadError(message)
    if traceback:
        error.__cause__ = CoreTraceback(traceback)
    return error
