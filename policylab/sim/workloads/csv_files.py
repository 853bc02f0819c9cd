"""CSV files of public traces: Azure's, BurstGPT's and Vidur's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Any, ClassVar

from policylab.sim.workloads.arrivals import Arrivals, find_arrivals
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import FileWorkload, JobPlace, JobRow, in_order, plain, table

STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")
PROMPT, OUTPUT, ARRIVAL = "num_prefill_tokens", "num_decode_tokens", "arrived_at"


@dataclass(frozen=True, kw_only=True)
class AzureCSV(FileWorkload):
    """Requests from a CSV file of Azure's traces, with the columns ``TIMESTAMP`` (date and time),
    ``ContextTokens`` and ``GeneratedTokens``."""

    kind: ClassVar[str] = "azure-csv"

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        last = -inf
        columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
        for number, (place, cells) in enumerate(table(self.path, *columns)):
            stamp, num_prompt, num_output = (cells[name] for name in columns)
            last = in_order(place, "TIMESTAMP", stamp, seconds_of(place, stamp), last)
            prompt = plain(number, place.tokens("ContextTokens", num_prompt))
            yield JobRow(last, Body(prompt, place.tokens("GeneratedTokens", num_output)))


def seconds_of(place: JobPlace, stamp: str) -> float:
    """Parse a date and time into seconds since 1970. ``place`` is named in the error message."""
    match = STAMP.fullmatch(stamp.strip())
    try:
        if match is None:
            raise ValueError(stamp)
        day, time, fraction, zone = match.groups()
        whole = datetime.fromisoformat(f"{day}T{time}{zone or ''}")
    except ValueError as error:
        expected = "a date and time as in 2023-11-16 18:15:46.6805900"
        raise place.error("TIMESTAMP", stamp, expected) from error
    if whole.tzinfo is None:
        whole = whole.replace(tzinfo=UTC)
    return whole.timestamp() + float(f"0{fraction or '.0'}")


@dataclass(frozen=True, kw_only=True)
class BurstGPTCSV(FileWorkload):
    """Requests from a CSV file of BurstGPT, with the columns ``Timestamp`` (seconds), ``Model``
    (becomes the tier), ``Request tokens``, ``Response tokens`` and optionally ``Session ID``
    (becomes the program). Failed requests, which have no response tokens, are left out."""

    kind: ClassVar[str] = "burstgpt-csv"

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        last = -inf
        columns = ("Timestamp", "Model", "Request tokens", "Response tokens")
        for number, (place, cells) in enumerate(table(self.path, *columns)):
            time = place.seconds("Timestamp", cells["Timestamp"])
            last = in_order(place, "Timestamp", cells["Timestamp"], time, last)
            num_output = place.tokens("Response tokens", cells["Response tokens"], least=0)
            if not num_output:
                continue
            prompt = plain(number, place.tokens("Request tokens", cells["Request tokens"]))
            fields: dict[str, Any] = {"tier": cells["Model"]}
            if session := cells.get("Session ID", ""):
                fields["program"] = session
            yield JobRow(last, Body(prompt, num_output, fields))


@dataclass(frozen=True, kw_only=True)
class VidurCSV(FileWorkload):
    """Requests from a CSV file of Vidur, with the columns ``num_prefill_tokens``,
    ``num_decode_tokens`` and optionally ``arrived_at`` (seconds). Without ``arrived_at``, arrivals
    are drawn from the process ``arrivals``, by default one per second."""

    kind: ClassVar[str] = "vidur-csv"

    arrivals: str = "poisson"
    """For a file without arrivals: ``poisson``, ``gamma(cv=2)``, ..., as for other workloads."""

    def __post_init__(self) -> None:
        FileWorkload.__post_init__(self)
        self._process  # noqa: B018 - it checks the option

    @property
    def _process(self) -> Arrivals:
        return find_arrivals(self.arrivals)

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        last, times = -inf, None
        for number, (place, cells) in enumerate(table(self.path, PROMPT, OUTPUT)):
            if ARRIVAL in cells:
                time = place.seconds(ARRIVAL, cells[ARRIVAL])
                last = in_order(place, ARRIVAL, cells[ARRIVAL], time, last)
            else:
                times = times or self._times(dice)
                last = next(times)
            yield JobRow(last, self._body(place, number, cells))

    def _body(self, place: JobPlace, number: int, cells: dict[str, str]) -> Body:
        prompt = plain(number, place.tokens(PROMPT, cells[PROMPT]))
        return Body(prompt, place.tokens(OUTPUT, cells[OUTPUT]))

    def _times(self, dice: RandomDraws) -> Iterator[float]:
        """Random arrival times in seconds, with a mean of one request per second."""
        return self._process.times(dice, 1.0, self.num_requests)
