"""Metronome's own file format for workloads: JSON with one line per request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from engine.errors import ConfigError
from policylab.sim.job import Job, Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import (
    FileWorkload,
    JobPlace,
    JobRow,
    in_order,
    json_lines,
    opened,
)

FORMAT = 1
EXAMPLE = '{"metronome":"workload","format":1,"workload":"mine","seed":0}'


class Head(msgspec.Struct, omit_defaults=True, tag_field="metronome", tag="workload"):
    """The first line of a workload file: how its requests were drawn."""

    format: int
    workload: str
    seed: int
    rate: float | None = None


class JsonLine(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One request in a workload file. ``prompt``: pieces (name, length, start) of named texts, in
    tokens. ``texts``: token ids of the texts that are not made up. The rest as in ``Job``."""

    id: str
    arrival: float
    prompt: list[tuple[str, int, int]]
    output: int
    user: str = ""
    priority: int = 0
    deadline: float | None = None
    ttft: float | None = None
    tbt: float | None = None
    tier: str = ""
    program: str = ""
    adapter: str = ""
    hints: dict[str, Any] = {}
    max_tokens: int | None = None
    texts: dict[str, list[int]] = {}


FIELDS = (
    *("user", "priority", "deadline", "ttft", "tbt", "tier", "program", "adapter", "hints"),
    "max_tokens",
)


def write(path: str | Path, head: Head, jobs: Iterable[Job]) -> None:
    """Write the jobs to a workload file. Raises ``ConfigError`` if it cannot be written."""
    encode = msgspec.json.Encoder().encode
    try:
        with Path(path).open("wb") as file:
            file.write(encode(head) + b"\n")
            for job in jobs:
                file.write(encode(line_of(job)) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def line_of(job: Job) -> JsonLine:
    """A job as a line of the file."""
    return JsonLine(
        id=job.request_id,
        arrival=job.arrival,
        prompt=[(span.text, span.length, span.start) for span in job.prompt],
        output=job.num_output,
        texts={name: list(tokens) for name, tokens in job.texts.items()},
        **{name: getattr(job, name) for name in FIELDS},
    )


@dataclass(frozen=True, kw_only=True)
class JSONL(FileWorkload):
    """Requests from a file that ``metronome workload W --out FILE`` wrote, at the arrival times in
    the file."""

    kind: ClassVar[str] = "jsonl"
    is_from_zero: ClassVar[bool] = True

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        last = -inf
        with opened(self.path) as file:
            self._check_head(next(file, ""))
            for place, line in json_lines(self.path, file, 2, JsonLine):
                last = in_order(place, "arrival", line.arrival, line.arrival, last)
                yield JobRow(last, _body(place, line), line.id)

    def _check_head(self, text: str) -> None:
        try:
            head = msgspec.json.decode(text, type=Head)
        except msgspec.DecodeError as error:
            expected = f"the head of a workload, as in {EXAMPLE}"
            raise JobPlace(self.path, 1).error("the line", text.strip(), expected) from error
        if head.format != FORMAT:
            raise ConfigError(
                f"{self.path} has format {head.format}; this version reads format {FORMAT}"
            )


def _body(place: JobPlace, line: JsonLine) -> Body:
    for text, length, start in line.prompt:
        place.tokens(f"length of {text!r}", length, least=0)
        place.tokens(f"start of {text!r}", start, least=0)
    prompt = tuple(Span(*part) for part in line.prompt)
    place.tokens("the prompt's length", sum(span.length for span in prompt))
    fields = {name: getattr(line, name) for name in FIELDS}
    return Body(prompt, place.tokens("output", line.output), {**fields, "texts": line.texts})
