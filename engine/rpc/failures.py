"""Encodes errors and rebuilds them, so that clients get the same errors wherever the core runs."""

from __future__ import annotations

from msgspec.structs import replace

from engine.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    ModelError,
    PolicyError,
    PromptTooLongError,
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
    """Encode an error for a client. An error that is not an engine error becomes a ``default``."""
    kind = RequestError if isinstance(error, PromptTooLongError) else type(error)
    if kind.__name__ not in KINDS:
        return Failure(default.__name__, plain_text(f"{kind.__name__}: {error}"))
    failure = Failure(kind.__name__, plain_text(str(error)))
    if not isinstance(error, RequestError):
        return failure
    retry_after = error.retry_after if isinstance(error, RefusedError) else None
    param, code = (None if text is None else plain_text(text) for text in (error.param, error.code))
    return replace(failure, retry_after=retry_after, param=param, code=code)


def error_of(failure: Failure) -> EngineError:
    """Rebuild an error; an unknown kind becomes an ``EngineError`` with the kind in its message."""
    kind = KINDS.get(failure.kind)
    if kind is None:
        return EngineError(f"{failure.kind}: {failure.message}")
    param, code = failure.param, failure.code
    if issubclass(kind, RefusedError):
        return kind(failure.message, failure.retry_after, param=param, code=code)
    if kind is RequestError and code == PromptTooLongError.code:
        kind = PromptTooLongError
    if issubclass(kind, RequestError):
        return kind(failure.message, param=param, code=code)
    return kind(failure.message)


def death_of(message: str, traceback: str = "") -> EngineDeadError:
    """The error for a core that died, with its traceback if known."""
    error = EngineDeadError(message)
    if traceback:
        error.__cause__ = CoreTraceback(traceback)
    return error
