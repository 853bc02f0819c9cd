"""The errors that the engine raises.

    EngineError
    ├── ConfigError (ValueError)        an option, or a combination of options, that cannot work
    │   └── ModelError                  a model directory that is missing, damaged or not supported
    ├── RequestError (ValueError)       an invalid request
    │   └── RefusedError                a valid request that is refused now: try again later
    │       └── RestartingError         the core has died and is being restarted
    ├── WireError (ValueError)          an invalid message, or a value that cannot be sent
    ├── PolicyError (RuntimeError)      a scheduling policy or resource broke its contract
    └── EngineDeadError (RuntimeError)  the core has died; carries the cause

Errors that a user can cause derive from ``ValueError``. Messages name the value, the limit and what
to do.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors."""


class ConfigError(EngineError, ValueError):
    """An option, or a combination of options, that cannot work."""


class ModelError(ConfigError):
    """A model directory that is missing, damaged or of an unsupported architecture."""


class RequestError(EngineError, ValueError):
    """An invalid request.

    ``param``: the field that is wrong, by its name in the engine (a field of ``SamplingParams`` or
    ``AddRequest``, an option of a request, ``prompt``, ``messages``); ``None``: no single field.
    ``code``: a stable identifier of the kind of error for programs; messages may change.
    ``index``: which of several inputs is wrong; ``None``: unknown, or there is one."""

    code: str | None = None
    index: int | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class RequestTypeError(RequestError, TypeError):
    """A request with an argument of the wrong type."""

    code = "invalid_type"


class PromptTooLongError(RequestError):
    """A prompt that does not fit, or leaves no room for output.

    ``length``: the prompt's length as a text ("5000 tokens"), "" if unknown; ``limit``: the maximum
    number of tokens of prompt and output together, 0 if unknown; ``num_output``: tokens of output
    that must fit, 0 for a request whose result is a vector."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        length: str = "",
        limit: int = 0,
        num_output: int = 1,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.length = length
        self.limit = limit
        self.num_output = num_output


class RefusedError(RequestError):
    """A valid request that is refused now, because the queue is full or the policy decides so.

    ``retry_after``: estimated seconds after which to try again; ``None`` if unknown."""

    code = "queue_full"

    def __init__(
        self,
        message: str,
        retry_after: float | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


class RestartingError(RefusedError):
    """No core can accept a request now, because a core died and is being restarted."""

    code = "core_restarting"


class WireError(EngineError, ValueError):
    """Bytes that are not a message of the protocol, or a value that cannot be sent."""


class PolicyError(EngineError, RuntimeError):
    """A scheduling policy or resource broke its contract; the message names hook and request."""


class EngineDeadError(EngineError, RuntimeError):
    """The engine core has died; the cause is chained and part of the message."""


class RankError(EngineError, RuntimeError):
    """A group of workers that compute one model together has stopped, since one of them has failed
    or does not answer; the message names it by its rank."""


def reason_of(error: Exception) -> str:
    """The reason why a file cannot be used, in words, without the file's path."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
