"""Finds a workload of the lab by its name, or the one that a file is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from policylab.sim.named import call
from policylab.sim.workloads import WORKLOADS, Workload, find_workload

FIRST_BYTES = 4096
# What the first line of a file has, and the kind of workload that the file is.
MARKS = (
    (b'"metronome":"workload"', "jsonl"),
    (b'"hash_ids"', "mooncake-jsonl"),
    (b"ContextTokens", "azure-csv"),
    (b"Request tokens", "burstgpt-csv"),
    (b"num_prefill_tokens", "vidur-csv"),
)


def workload_of(text: str, num_requests: int | None) -> Workload:
    """Make the workload that ``text`` names, with options or as the path of a file.

    num_requests: unless the text sets it; ``None``: the workload's own number. Raises
    ``ConfigError``.
    """
    given: dict[str, Any] = {} if num_requests is None else {"num_requests": num_requests}
    path = Path(text)
    if "(" not in text and path.is_file():
        return find_workload(_kind_of(path), path=text, **given)
    kind = WORKLOADS.get(call(text, "--workload", "azure-conv(num_requests=500)")[0])
    if kind is None and ("/" in text or path.suffix) and "(" not in text:
        raise ConfigError(f"--workload is {text!r}, which is neither a workload nor a file")
    return find_workload(text, **given)


def _kind_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            first = file.read(FIRST_BYTES).partition(b"\n")[0]
    except OSError as error:
        raise ConfigError(f"--workload {str(path)!r} cannot be read: {error.strerror}") from error
    spaced = first.replace(b": ", b":")
    return next((kind for mark, kind in MARKS if mark in spaced or mark in first), "steps-log")
