"""The CSV files of Azure's public traces of language model inference, 2023 and 2024."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import ClassVar

from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import JobPlace, JobRow, Reader, in_order, plain, table

STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:?\d\d)?")


@dataclass(frozen=True, kw_only=True)
class AzureCSV(Reader):
    """A file of Azure's traces: ``TIMESTAMP`` (date and time), ``ContextTokens``,
    ``GeneratedTokens``."""

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
    """Seconds of a date and time; its fractions may have any number of digits."""
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
