"""Checks of requests in the core: our front end sends valid ones, other clients may not."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from engine.errors import RequestError, RequestTypeError
from engine.messages.params import check_params_for_vocab
from engine.messages.requests import AddRequest

INT32_MAX = 2**31 - 1
PLAIN = (type(None), bool, int, float, str, bytes)
MAX_PLAIN_DEPTH = 64
MAX_ID_CHARS = 4096  # every output has the id of its request
INT64 = range(-(2**63), 2**63)


FEATURES = {
    "adapter": "adapters",
    "grammar": "masks",
    "media": "media",
    "kv_transfer_params": "kv_transfer",
}
"""Fields of a request that ask for a feature, and the part of a plan that serves it."""


def in_use(request_id: str) -> RequestError:
    """The error for an id that a request still has, as far as its client was told."""
    return RequestError(
        f"request id {request_id!r:.80} is in use; wait until it has finished or choose another"
    )


def as_request_ids(request_id: object) -> list[str]:
    """One id or several as a list. Raises ``RequestTypeError`` for anything else."""
    several = isinstance(request_id, Iterable) and not isinstance(request_id, str)
    ids: list[str] = list(request_id) if several else [request_id]  # type: ignore[list-item,call-overload]
    for item in ids:
        if not isinstance(item, str):
            raise RequestTypeError(f"request_id must be a str or several, got {item!r:.80}")
    return ids


def check_request(request: AddRequest, vocab_size: int, capabilities: Collection[str] = ()) -> None:
    """Raise ``RequestError`` for what would break a scheduler or a worker later.

    ``capabilities``: parts of a plan (``engine.messages.step.PARTS``) that the core serves.
    """
    if len(request.request_id) > MAX_ID_CHARS:
        raise RequestError(
            f"request_id {request.request_id!r:.80} has {len(request.request_id)} characters, the "
            f"limit is {MAX_ID_CHARS}"
        )
    if not request.prompt_token_ids:
        raise RequestError(f"request {request.request_id!r:.80} has an empty prompt")
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    _check_ids("eos_token_ids", request.eos_token_ids, vocab_size)
    for word in request.bad_words_ids:
        _check_ids("bad_words_ids", word, vocab_size)
    if not 1 <= request.max_tokens <= INT32_MAX:
        raise RequestError(f"max_tokens is {request.max_tokens}, must be in 1..{INT32_MAX}")
    for name in ("priority", "seed"):
        if getattr(request, name) not in INT64:
            raise RequestError(f"{name} is {getattr(request, name)}, must be a number of 64 bits")
    for name, part in FEATURES.items():
        if getattr(request, name) and part not in capabilities:
            raise RequestError(
                f"{name} is {getattr(request, name)!r:.80}, which takes the capability {part!r}; "
                f"this core has {', '.join(sorted(capabilities)) or 'none'}: leave it out"
            )
    check_params_for_vocab(request.params, vocab_size)


def _check_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise RequestError(
            f"{name} has token id {wrong}, must be in [0, {vocab_size - 1}]: the model's "
            f"vocabulary has {vocab_size} tokens"
        )


def check_plain(name: str, value: Any, depth: int = 0) -> None:
    """Raise ``RequestTypeError`` for an argument that is not made of plain values only."""
    if isinstance(value, dict | list | tuple):
        if depth == MAX_PLAIN_DEPTH:
            raise RequestTypeError(
                f"an argument of utility {name!r:.80} has more than {MAX_PLAIN_DEPTH} levels"
            )
        for item in value:
            check_plain(name, item, depth + 1)
        for item in value.values() if isinstance(value, dict) else ():
            check_plain(name, item, depth + 1)
    elif type(value) not in PLAIN:
        raise RequestTypeError(
            f"an argument of utility {name!r:.80} is {value!r:.80} ({type(value).__name__}); only "
            "None, booleans, numbers, strings, bytes, lists and dicts can be handed over"
        )
    elif type(value) is int and not -(2**63) <= value < 2**64:
        raise RequestTypeError(f"an argument of utility {name!r:.80} is no number of 64 bits")
    elif type(value) is str and not _is_unicode(value):
        raise RequestTypeError(
            f"an argument of utility {name!r:.80} is {value!r:.80}, which has half a character"
        )


def _is_unicode(text: str) -> bool:
    """Python's strings may hold surrogates, which have no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
