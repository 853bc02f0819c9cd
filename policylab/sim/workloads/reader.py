"""Base class of workloads that are read from a file, one line at a time."""

from __future__ import annotations

import csv
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, ClassVar, NamedTuple, TypeVar

import msgspec

from engine.errors import ConfigError
from policylab.sim.job import Job, Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.source import MAX_REQUESTS, JobSource, Workload

MAX_LENGTH = 100_000_000  # tokens in a prompt or an output
SHOWN_CHARS = 40
Line = TypeVar("Line", bound=msgspec.Struct)


class JobRow(NamedTuple):
    """A request in a file."""

    time: float
    """Arrival in seconds, from any origin."""
    body: Body
    request_id: str = ""
    """The id of the request; if empty, it is named by its number."""


class JobPlace(NamedTuple):
    """A file and a line number, for error messages."""

    path: str
    line: int

    def error(self, name: str, value: object, expected: str) -> ConfigError:
        """The error for a wrong value in this line. ``name``: its column or key; ``expected``: what
        the value must be, as text."""
        shown = repr(value)
        if len(shown) > SHOWN_CHARS:
            shown = shown[:SHOWN_CHARS] + "..."
        return ConfigError(f"{self.path}, line {self.line}: {name} is {shown}, must be {expected}")

    def tokens(self, name: str, value: object, least: int = 1) -> int:
        """Convert the value to a number of tokens. Raises ``ConfigError`` if it is no whole number
        or below ``least``."""
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = -1.0
        if isinstance(value, bool) or number != math.floor(number) or number > MAX_LENGTH:
            number = -1.0
        if number < least:
            raise self.error(name, value, f"a whole number of tokens, {least} to {MAX_LENGTH}")
        return int(number)

    def seconds(self, name: str, value: object) -> float:
        """Convert the value to a time in seconds. Raises ``ConfigError`` if it is no finite
        number."""
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number) or isinstance(value, bool):
            raise self.error(name, value, "a finite number")
        return number


class Size(NamedTuple):
    """The number of requests in a file, the first and last arrival time (seconds), and the longest
    prompt and output (tokens)."""

    number: int
    first: float
    last: float
    max_prompt: int
    max_output: int


@dataclass(frozen=True, kw_only=True)
class FileWorkload(Workload):
    """The requests recorded in a file. A rate other than the recorded one plays the file faster or
    slower. Options for users, tiers, deadlines and priorities replace the values in the file. The
    file is read once for its size, and again for each run."""

    is_from_zero: ClassVar[bool] = False
    """True if the times in the file are seconds since the start of the run; otherwise the first
    request is moved to 0."""

    path: str
    """Path of the file."""
    num_requests: int = MAX_REQUESTS
    """The most requests that are read."""
    speed: float = 1.0
    """How many times as fast as recorded the file is played, if no rate is given."""

    def __post_init__(self) -> None:
        Workload.__post_init__(self)
        self.check("speed", self.speed, 1e-9, 1e9)
        if not isinstance(self.path, str | Path):
            raise ConfigError(f"path is {self.path!r}, must be the name of a file, in quotes")

    @abstractmethod
    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        """The requests in the order of the file. Raises ``ConfigError`` for an invalid line."""

    @property
    def natural_rate(self) -> float:
        """The recorded requests per second times ``speed``; 1 if all requests arrive at once."""
        seconds = self.size.last - self.size.first
        number = self.size.number
        return self.speed * (number - 1) / seconds if number > 1 and seconds else 1.0

    @property
    def max_prompt(self) -> int:
        return self.size.max_prompt

    @property
    def max_output(self) -> int:
        return self.size.max_output

    @cached_property
    def size(self) -> Size:
        """The number of requests in the file, with their first and last arrival time and greatest
        lengths. Raises ``ConfigError`` for an invalid line or a file without requests."""
        number, first, last, max_prompt, max_output = 0, 0.0, 0.0, 1, 1
        for time, body, _ in self._read(RandomDraws(0)):
            if not number and not self.is_from_zero:
                first = time
            number, last = number + 1, time
            max_prompt = max(max_prompt, sum(span.length for span in body.prompt))
            max_output = max(max_output, body.fields.get("max_tokens") or 0, body.num_output)
        if not number:
            raise ConfigError(f"{self.path} contains no request")
        return Size(number, first, last, max_prompt, max_output)

    def source(self, seed: int, rate: float | None = None) -> JobSource:
        return JobSource(self._jobs(RandomDraws(seed), rate or self.natural_rate))

    def _jobs(self, dice: RandomDraws, rate: float) -> Iterator[Job]:
        first = self.size.first
        scale = self.natural_rate / (self.speed * rate)
        for number, (row, tag) in enumerate(
            zip(self._read(dice), self.tags.draw(dice), strict=False)
        ):
            own = {"num_output": row.body.num_output, **row.body.fields, **tag}
            yield Job(
                request_id=row.request_id or f"r{number}",
                arrival=(row.time - first) * scale,
                prompt=row.body.prompt,
                **own,
            )

    def _read(self, dice: RandomDraws) -> Iterator[JobRow]:
        return islice(self.rows(dice), self.num_requests)


@contextmanager
def opened(path: str) -> Iterator[IO[str]]:
    """Open the file as text. Raises ``ConfigError`` if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error


def table(path: str, *columns: str) -> Iterator[tuple[JobPlace, dict[str, str]]]:
    """Read a CSV file: for each line, its place and its values by column name. Raises
    ``ConfigError`` if one of ``columns`` is missing."""
    with opened(path) as file:
        lines = csv.reader(file)
        try:
            head = [name.strip() for name in next(lines, [])]
            if missing := [name for name in columns if name not in head]:
                raise JobPlace(path, 1).error(
                    "the head",
                    ",".join(head),
                    f"{','.join(columns)}, in any order, with other columns or without: "
                    f"{missing[0]!r} is missing",
                )
            for cells in lines:
                place = JobPlace(path, lines.line_num)
                if not cells:
                    continue
                if len(cells) != len(head):
                    shown = ",".join(cells)
                    raise place.error("the line", shown, f"{len(head)} values separated by commas")
                yield place, dict(zip(head, cells, strict=True))
        except csv.Error as error:
            raise ConfigError(f"{path}, line {lines.line_num}: {error}") from error


def json_lines(
    path: str, file: Iterable[str], first: int, kind: type[Line]
) -> Iterator[tuple[JobPlace, Line]]:
    """Decode each line of a JSONL file as a ``kind``, and yield it with its file and line number.
    ``first``: number of the first line. Raises ``ConfigError`` for an invalid line."""
    decode = msgspec.json.Decoder(kind).decode
    for number, text in enumerate(file, first):
        if text.strip():
            place = JobPlace(path, number)
            try:
                line = decode(text)
            except msgspec.DecodeError as error:
                raise place.error("the line", text.strip(), f"a request ({error})") from error
            yield place, line


def in_order(place: JobPlace, name: str, value: object, time: float, last: float) -> float:
    """Return ``time`` if it is not before ``last``, the time in the previous line; else raise
    ``ConfigError``. ``name``, ``value``: the column and its value, for the message."""
    if time < last:
        raise place.error(name, value, "no earlier than in the line before; sort the file")
    return time


def plain(number: int, num_prompt: int) -> tuple[Span, ...]:
    """A prompt of ``num_prompt`` tokens that shares no text with prompts of another ``number``."""
    return (Span(f"prompt {number}", num_prompt),)
