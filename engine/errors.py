"""Every error the engine raises on purpose.

    EngineError
    ├── ConfigError (ValueError)        an option, or a combination of options, that cannot work
    │   └── ModelError                  a model directory that is missing, damaged or not supported
    ├── RequestError (ValueError)       a request that can never be served as it is
    │   └── RefusedError                a good request that is not taken now: try again later
    │       └── RestartingError         the core has died and is being started again
    ├── WireError (ValueError)          bytes that are no message, or a value that cannot travel
    ├── PolicyError (RuntimeError)      a scheduling policy or resource broke its contract
    └── EngineDeadError (RuntimeError)  the core has died; carries the cause

What a user can cause derives from ``ValueError``. Messages name the value, the limit and the way
out.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(EngineError, ValueError):
    """An option, or a combination of options, that cannot work."""


class ModelError(ConfigError):
    """A model directory that is missing, damaged or of an unsupported architecture."""


class RequestError(EngineError, ValueError):
    """A request that can never be served as it is.

    ``param`` names the field to blame, as the class of the engine that has it calls it (a field of
    ``SamplingParams`` or of ``AddRequest``, an option of a request, ``prompt``, ``messages``);
    ``None``: no single one. ``code`` is a stable word for the kind of error, for programs: the text
    may change.
    """

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class RequestTypeError(RequestError, TypeError):
    """A request with an argument of the wrong type."""

    code = "invalid_type"


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for output: ``length`` ("5000 tokens") with ``limit``, the most
    tokens of a prompt with its output. Both are empty where only the text is known."""

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        length: str = "",
        limit: int = 0,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.length = length
        self.limit = limit


class RefusedError(RequestError):
    """A good request that is not taken now: the queue is full, or the policy says so.

    ``retry_after`` estimates when to try again, in seconds; ``None`` if nothing is known.
    """

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
    """No core is there to take a request: one that died is being started again."""

    code = "core_restarting"


class WireError(EngineError, ValueError):
    """Bytes that are no message of the protocol, or a value that cannot become one."""


class PolicyError(EngineError, RuntimeError):
    """A scheduling policy or resource broke its contract; names hook and request."""


class EngineDeadError(EngineError, RuntimeError):
    """The engine core has died; the cause is chained and quoted."""


def reason_of(error: Exception) -> str:
    """Why a file cannot be used, without its path, which the error that is raised names."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
