"""HTTP errors in the forms of OpenAI, Anthropic and Ollama."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import msgspec
from starlette.responses import Response

from engine.errors import (
    ConfigError,
    EngineDeadError,
    PromptTooLongError,
    RefusedError,
    RequestError,
)
from engine.messages.requests import ErrorCode
from engine.server.records import note_error

INSIDE = re.compile(r"0x[0-9a-fA-F]{6,}|(?<![\w:/])/[\w.+-]+(?:/[\w.+-]+)+")
"""Memory addresses and file paths, which clients do not see."""

STATUS_OF_END: dict[ErrorCode, int] = {
    "adapter_failed": 400,
    "aborted": 503,
    "core_died": 503,
    "deadline_exceeded": 408,
    "invalid_grammar": 400,
    "invalid_media": 400,
    "kv_transfer_failed": 500,
    "no_token_is_allowed": 400,
    "request_failed": 500,
}
"""HTTP status of a request that the engine accepted and could not complete."""
PARAM_OF_END: dict[ErrorCode, str] = {
    "adapter_failed": "model",
    "invalid_grammar": "grammar",
    "invalid_media": "multi_modal_data",
}
"""The parameter that an end is about, if it is the same for all requests."""
TEXT_OF_END: dict[ErrorCode, str] = {
    "aborted": "the request was aborted, because the server is shutting down: send it again",
    "core_died": "the core that ran this request has died: send it again",
    "deadline_exceeded": "the request took longer than its timeout: send it with a longer one",
}
"""Messages by code, used where the engine's own is missing or meant for operators only."""

CODES = {
    400: "invalid_request",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    409: "conflict",
    413: "request_too_large",
    431: "headers_too_large",
    500: "internal_error",
}
"""Codes by status, for errors that have no code of their own."""
TEMPORARY = (429, 503)
RETRY_SECONDS = 1.0  # default ``Retry-After`` of temporary errors

logger = logging.getLogger("engine.server")


class ApiError(Exception):
    """An error that is answered with an HTTP status; ``param``: the field that caused it.

    retry_after: seconds after which the client may retry; 429 and 503 always have it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or CODES.get(status)
        if code is None and param is not None and status == 400:
            self.code = "invalid_value"
        if retry_after is None and status in TEMPORARY:
            retry_after = RETRY_SECONDS
        self.retry_after = retry_after

    @property
    def shown(self) -> str:
        """The message for the client, without addresses and paths if the status is 5xx."""
        return INSIDE.sub("...", self.message) if self.status >= 500 else self.message

    @property
    def type(self) -> str:
        """OpenAI's ``type`` of an error with this status."""
        if self.status >= 500:
            return "server_error"
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            429: "rate_limit_error",
        }
        return kinds.get(self.status, "invalid_request_error")

    def anthropic(self) -> dict[str, Any]:
        """This error in Anthropic's form."""
        kinds = {
            401: "authentication_error",
            403: "permission_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            503: "overloaded_error",
        }
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        about = {"type": kinds.get(self.status, other), "message": self.shown}
        return {"type": "error", "error": about}

    def ollama(self) -> dict[str, str]:
        """This error in Ollama's form."""
        return {"error": self.shown}

    def body(self) -> bytes:
        """This error in OpenAI's form: the body of a response, or the last event of a stream."""
        about = {
            "message": self.shown,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": about})


def field_error(param: str, text: str, code: str | None = None) -> ApiError:
    """The error for a wrong field of the request. Its message is the field's name and ``text``."""
    return ApiError(400, f"{param} {text}", param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """Convert an error for the client. Details of an unexpected error are only in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RefusedError):
        retry_after = error.retry_after
        return ApiError(
            503, str(error), param=error.param, code=error.code, retry_after=retry_after
        )
    if isinstance(error, PromptTooLongError):
        return ApiError(400, _too_long(error), param=error.param, code=error.code)
    if isinstance(error, RequestError):
        if error.code == "model_not_found":  # an adapter that was unloaded
            return ApiError(404, str(error), param="model", code=error.code)
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, ConfigError):  # without a tokenizer
        return ApiError(400, str(error))
    if isinstance(error, EngineDeadError):
        message = "the engine is not running: its operator must restart the server"
        return ApiError(503, message, code="engine_dead", retry_after=10.0)
    return ApiError(500, "the server failed with an unexpected error, which is in its log")


def _too_long(error: PromptTooLongError) -> str:
    """The message for a prompt that is too long. Clients recognise such errors by the words of
    OpenAI ("maximum context length is 4096 tokens") and Anthropic ("prompt is too long")."""
    if not error.length:
        return str(error)
    shared = ", for the prompt and at least one output token" if error.num_output else ""
    cut = "" if error.num_output else " set truncate_prompt_tokens to -1,"
    return (
        f"This model's maximum context length is {error.limit} tokens{shared}. However, the prompt "
        f"is too long: {error.length} > {error.limit - error.num_output} maximum; shorten it,{cut} "
        "or raise --max-model-len of the server"
    )


def error_of_end(code: ErrorCode, text: str | None) -> ApiError:
    """The error for a request that ended with this code; ``text``: the engine's message."""
    if text and code == "core_died":  # its name, without addresses
        text = f"{text.partition(':')[0]}: send it again"
    elif not text or code == "aborted":
        text = TEXT_OF_END.get(code, "the request failed")
    param = PARAM_OF_END.get(code)
    if code == "adapter_failed":
        text = INSIDE.sub("...", text)  # the adapter's path
    return ApiError(STATUS_OF_END[code], text, param=param, code=code)


def log_unforeseen(error: BaseException) -> None:
    """Log an unexpected error of a stream, since its client is referred to the log."""
    api_error = as_api_error(error)
    note_error(api_error.code or api_error.type, api_error.param)
    if api_error.status == 500 and not isinstance(error, ApiError):
        logger.error("an answer failed after it had begun", exc_info=error)


def error_response(error: ApiError, path: str = "") -> Response:
    """The response for an error; path: decides whose form it has."""
    note_error(error.code or error.type, error.param)
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408 or error.code == "request_failed":
        headers["x-should-retry"] = "false"  # clients would retry, and fail again
    if is_anthropic(path):
        body = msgspec.json.encode(error.anthropic())
    else:
        body = msgspec.json.encode(error.ollama()) if is_ollama(path) else error.body()
    return Response(body, error.status, headers, "application/json")


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return path.startswith("/v1/messages")


def is_ollama(path: str) -> bool:
    """Whether a path belongs to Ollama's API."""
    return path.startswith("/api/")
