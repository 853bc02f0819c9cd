"""Recognises the kind of workload that a file has, by its first line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from engine.errors import ConfigError
from engine.observe.steplog import MAGIC
from policylab.sim.workloads.jsonl import EXAMPLE

FIRST_BYTES = 4096
SHOWN_CHARS = 60
# A mark in the first line, the kind of workload, and a first line that is right.
MARKS: Iterable[tuple[bytes, str, str]] = (
    (b'"metronome":"workload"', "jsonl", EXAMPLE),
    (b'"hash_ids"', "mooncake-jsonl", ""),
    (b"ContextTokens", "azure-csv", "TIMESTAMP,ContextTokens,GeneratedTokens"),
    (b"Request tokens", "burstgpt-csv", ""),
    (b"num_prefill_tokens", "vidur-csv", "arrived_at,num_prefill_tokens,num_decode_tokens"),
)


def kind_of_file(path: str) -> str:
    """Returns the name of the kind of workload that the file has. Raises ``ConfigError`` for a file
    that cannot be read or has another format."""
    try:
        with Path(path).open("rb") as file:
            first = file.read(FIRST_BYTES)
    except OSError as error:
        raise ConfigError(f"workload {path!r} cannot be read: {error.strerror}") from error
    if first.startswith(MAGIC):
        return "steps-log"
    line = first.partition(b"\n")[0].strip()
    compact = line.replace(b": ", b":")
    for mark, kind, _ in MARKS:
        if mark in line or mark in compact:
            return kind
    shown = line.decode(errors="replace")
    shown = shown[:SHOWN_CHARS] + ("..." if len(shown) > SHOWN_CHARS else "")
    right = "; ".join(f"{example} ({kind})" for _, kind, example in MARKS if example)
    raise ConfigError(
        f"workload {path!r} is not a step log, and its first line, {shown!r}, is that of no known "
        f"format; first lines that work are: {right}"
    )
