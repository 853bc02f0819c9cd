"""Programs tell errors apart by codes, wherever the core runs; the words of a message mean nothing
to them."""

from __future__ import annotations

import re

import pytest
from support import source_tree as tree

from engine.errors import (
    EngineError,
    PromptTooLongError,
    RefusedError,
    RequestError,
    RequestTypeError,
)
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.requests import (
    ERROR_CODES,
    CompletionOutput,
    FinishReason,
    code_of,
)
from engine.messages.wire import Refusal, Submitted, ToClient
from engine.rpc.failures import error_of, failure_of
from engine.server.answers import reason_of
from engine.server.errors import STATUS_OF_END, ApiError, as_api_error

# Where the text of an error is read: each is another library's, which has no codes.
TEXT_IS_ALL = {
    "engine/models/general.py": "transformers",
    "engine/models/general_support.py": "transformers",
    "engine/structured/guidance.py": "llguidance",
    "engine/worker/memory.py": "torch",
}
TOLD_APART = re.compile(
    r"""\bin\ str\((?:error|e|exc|exception|why)\)(?!\.)
    | \bstr\((?:error|e|exc|exception)\)\.(?:startswith|endswith|find|index)
    | \b(?:error|message|fault)\.(?:startswith|endswith)\(
    | \bin\ \w+\.(?:error|message)\b(?!s)(?!\.)""",
    re.VERBOSE,
)
WORDS = (
    "the grammar cannot be used: it has no root",
    "no token is left for position 2",
    "the core that ran this request has died",
    "anything else",
)


def ended(reason: FinishReason, error: str | None, code: str | None) -> CompletionOutput:
    output = CompletionOutput(0, "", [], finish_reason=reason, error=error)
    output.code = code  # type: ignore[assignment] # a core of another release may know more
    return output


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("code", sorted(ERROR_CODES))
def test_the_status_of_an_end_comes_from_its_code_whatever_its_words(code: str, words: str) -> None:
    with pytest.raises(ApiError) as told:
        reason_of(ended("error", words, code))
    assert told.value.code == code
    assert told.value.status == STATUS_OF_END[code]  # type: ignore[index]


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        ("error", "request_failed", 500),
        ("deadline", "deadline_exceeded", 408),
        ("abort", "aborted", 503),
    ],
)
def test_an_end_without_a_known_code_has_that_of_its_reason(
    reason: FinishReason, code: str, status: int
) -> None:
    for unknown in (None, "", "from_tomorrow"):
        with pytest.raises(ApiError) as told:
            reason_of(ended(reason, None, unknown))
        assert (told.value.code, told.value.status) == (code, status)


def test_a_complete_end_has_no_code() -> None:
    for reason in ("stop", "length"):
        assert code_of(reason) is code_of(reason, "request_failed") is None  # type: ignore[arg-type]
        assert reason_of(ended(reason, None, None)) == reason  # type: ignore[arg-type]


def test_clients_learn_the_name_of_a_dead_core_and_not_its_address() -> None:
    name = "core 1 on node 3f2a91bc, which ran this request, has died"
    with pytest.raises(ApiError) as raised:
        reason_of(ended("error", f"{name}: core 1 of 2 at tcp://10.0.0.7:5000: lost", "core_died"))
    assert raised.value.message == f"{name}: send it again"
    assert raised.value.retry_after is not None


@pytest.mark.parametrize(
    "error",
    [
        RequestError("top_p is 2, must be in (0, 1]", param="top_p"),
        RequestError("this id is in use", param="request_id", code="request_id_in_use"),
        RequestTypeError("n is 'a' (str), must be an int", param="n"),
        PromptTooLongError("the prompt is too long", param="prompt"),
        RefusedError("the queue is full", 2.5),
        RefusedError("this core ends", code="shutting_down"),
        RequestError("half a character: \udcff", param="\udcff"),
        EngineError("it fell over"),
    ],
    ids=str,
)
def test_errors_keep_class_code_and_field_on_the_wire(error: EngineError) -> None:
    frame = MessageEncoder().encode(Submitted(1, 0.0, [Refusal(0, failure_of(error))]))
    answer = MessageDecoder[ToClient](ToClient).decode([frame])
    assert isinstance(answer, Submitted)
    there = error_of(answer.refusals[0].failure)
    assert type(there) is type(error)
    assert str(there) == str(error).encode(errors="backslashreplace").decode()
    for name in ("code", "param", "retry_after"):
        sent, came = getattr(error, name, None), getattr(there, name, None)
        assert came == (
            sent.encode(errors="backslashreplace").decode() if isinstance(sent, str) else sent
        )


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (RequestError("wrong", param="top_p"), 400, "invalid_value", "top_p"),
        (PromptTooLongError("long", param="prompt"), 400, "context_length_exceeded", "prompt"),
        (RefusedError("full"), 503, "queue_full", None),
        (RefusedError("it ends", code="shutting_down"), 503, "shutting_down", None),
    ],
)
def test_http_takes_code_and_field_of_an_error(
    error: Exception, status: int, code: str | None, param: str | None
) -> None:
    told = as_api_error(error)
    assert (told.status, told.code, told.param) == (status, code, param)


def test_no_error_of_ours_is_told_apart_by_its_text() -> None:
    """Give it a code, or a class."""
    found = [
        f"{module.where}: {match[0]}"
        for module in tree.sources()
        if module.where.startswith("engine/") and module.where not in TEXT_IS_ALL
        for match in TOLD_APART.finditer(module.text)
    ]
    assert not found, found
