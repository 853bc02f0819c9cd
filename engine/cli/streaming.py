"""Streams text to the terminal, and summarises a run in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.errors import RequestError
from engine.llm_engine import LLMEngine
from engine.messages.requests import RequestOutput


@dataclass(frozen=True)
class RunFigures:
    """Token counts and times, in seconds, of one or several requests."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    seconds: float = 0.0
    first_token_seconds: float | None = None

    def __str__(self) -> str:
        speed = self.num_output_tokens / self.seconds if self.seconds else 0.0
        line = (
            f"{self.num_prompt_tokens} prompt tokens, {self.num_output_tokens} output tokens, "
            f"{speed:.1f} tokens/s"
        )
        if self.first_token_seconds is not None:
            line += f", first token after {self.first_token_seconds * 1e3:.0f} ms"
        return line


@dataclass(frozen=True)
class StreamedAnswer:
    """The result of a request that has ended."""

    text: str
    figures: RunFigures
    is_interrupted: bool = False


def stream(
    engine: LLMEngine, request_id: str, write: Callable[[str], None] | None = None
) -> StreamedAnswer:
    """Step the engine until this request has ended, writing its text as it arrives.

    An interrupt aborts the request and returns the text so far. Raises ``RequestError`` if the
    request failed.
    """
    write = write_out if write is None else write
    pieces: list[str] = []
    num_output = 0
    last: RequestOutput | None = None
    is_interrupted = False
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            is_interrupted = True
            engine.abort_request(request_id)
            continue
        for output in outputs:
            last = output
            completion = output.outputs[0]
            num_output += len(completion.token_ids)
            pieces.append(completion.text)
            write(completion.text)
    assert last is not None
    completion = last.outputs[0]
    if completion.error is not None:
        raise RequestError(f"the request failed: {completion.error}", code=completion.code)
    figures = replace(times_of(last), num_output_tokens=num_output)
    return StreamedAnswer("".join(pieces), figures, is_interrupted)


def times_of(output: RequestOutput) -> RunFigures:
    """Summarise one finished request; seconds count from its arrival to first and last token."""
    metrics = output.metrics
    assert metrics is not None
    arrival, first, last = (
        metrics.arrival_time,
        metrics.first_token_time,
        metrics.last_token_time,
    )
    return RunFigures(
        num_prompt_tokens=len(output.prompt_token_ids),
        num_output_tokens=len(output.outputs[0].token_ids),
        seconds=0.0 if last is None else last - arrival,
        first_token_seconds=None if first is None else first - arrival,
    )


def write_out(text: str) -> None:
    """Write to standard output immediately."""
    sys.stdout.write(text)
    sys.stdout.flush()
