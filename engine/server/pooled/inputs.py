"""Inputs of requests for vectors and scores, and errors that name the wrong one."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import numpy as np

from engine.async_engine import AsyncLLMEngine
from engine.errors import RefusedError, RequestError
from engine.frontend.encoding import Prompt
from engine.frontend.streams import OutputReader
from engine.messages.pooling import PoolingParams
from engine.messages.requests import RequestOutput
from engine.messages.vectors import Vectors
from engine.server.answers import reason_of
from engine.server.bodies import QueuedBody
from engine.server.errors import ApiError, as_api_error, field_error
from engine.server.pooled.bodies import Input, PooledUsage

MAX_INPUTS = 2048  # of one request, as OpenAI
MAX_NUMBERS = 1 << 24  # in one answer, which is built in memory
PROMPT_FIELDS = (None, "prompt", "prompt_token_ids")
"""What the engine's errors name if the input itself is wrong."""
FieldOf = Callable[[int], str]
"""The field of the body that has the prompt with this index."""


class Inputs(NamedTuple):
    """The inputs of a request: texts or token ids, and the fields of the body that have them."""

    prompts: list[Prompt]
    field_of: FieldOf


def inputs_of(name: str, given: Input) -> Inputs:
    """The inputs in field ``name`` of a body. Raises ``ApiError``."""
    every: list[Any] = given if isinstance(given, list) else [given]
    if len({type(each) for each in every}) > 1:
        raise field_error(
            name, f"is {given!r:.80}, must be a text, a list of token ids, or a list of either"
        )
    if not isinstance(given, list) or (every and isinstance(every[0], int)):
        return Inputs([given], lambda place: name)  # type: ignore[list-item]
    check_number(name, len(every))
    return Inputs(every, lambda place: f"{name}[{place}]")


def texts_of(name: str, given: str | list[str]) -> list[str]:
    """The texts in field ``name`` of a body. Raises ``ApiError``."""
    texts = given if isinstance(given, list) else [given]
    check_number(name, len(texts))
    return texts


def check_number(name: str, number: int) -> None:
    if not 0 < number <= MAX_INPUTS:
        raise field_error(name, f"has {number} entries, must have 1 to {MAX_INPUTS}")


class Results(NamedTuple):
    """The results of all inputs of a request, and the tokens that they had."""

    vectors: list[Vectors]
    usage: PooledUsage


async def compute(
    engine: AsyncLLMEngine,
    name: str,
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    body: QueuedBody,
    field_of: FieldOf,
) -> AsyncGenerator[RequestOutput, None]:
    """Compute all inputs of a request together, and yield their outputs in order. The first error
    ends all of them and is raised as an ``ApiError``. name: begins the ids of the engine's
    requests."""
    if body.cache_salt is not None:
        prompts = [_salted(each, body.cache_salt) for each in prompts]
    try:
        readers = await engine.open_together(name, prompts, params, **body.options())
    except RequestError as error:
        raise _with_field(error, error.index, field_of) from error
    try:
        for place, reader in enumerate(readers):
            yield await _output(reader, place, field_of)
    finally:
        for reader in readers:
            reader.close()


async def gathered(
    name: str, outputs: AsyncGenerator[RequestOutput, None], most: int = MAX_NUMBERS
) -> Results:
    """All results of the inputs in field ``name``. Raises ``ApiError`` if they have more than
    ``most`` numbers together."""
    vectors: list[Vectors] = []
    num_tokens = num_numbers = 0
    async with aclosing(outputs) as source:
        async for output in source:
            assert output.pooled is not None
            num_numbers += output.pooled.size
            if num_numbers > most:
                raise field_error(
                    name,
                    f"has results of over {most} numbers together, the limit: send fewer "
                    "inputs in one request",
                )
            vectors.append(output.pooled)
            num_tokens += len(output.prompt_token_ids)
    return Results(vectors, PooledUsage(num_tokens, num_tokens))


async def _output(reader: OutputReader, place: int, field_of: FieldOf) -> RequestOutput:
    try:
        output = await reader.next()
        reason_of(output.outputs[0])  # raises the error of a request that has failed
    except (RequestError, ApiError) as error:
        raise _with_field(error, place, field_of) from error
    return output


def _with_field(error: RequestError | ApiError, place: int | None, field_of: FieldOf) -> Exception:
    """The error for the client. If the input itself is wrong, it names the input's field."""
    if isinstance(error, RefusedError) or place is None:
        return error
    shown = as_api_error(error)
    if shown.status < 500 and shown.param in PROMPT_FIELDS:
        shown.param = field_of(place)
        shown.message = f"{shown.param}: {shown.message}"
    return shown


def _salted(prompt: Prompt, salt: str) -> Prompt:
    if isinstance(prompt, str):
        return {"prompt": prompt, "cache_salt": salt}
    ids = prompt if isinstance(prompt, list) else prompt["prompt_token_ids"]
    return {"prompt_token_ids": ids, "cache_salt": salt}


def as_base64(vectors: Vectors) -> str:
    """The numbers as float32, little-endian, in base64."""
    return base64.b64encode(np.ascontiguousarray(vectors, "<f4").tobytes()).decode()
