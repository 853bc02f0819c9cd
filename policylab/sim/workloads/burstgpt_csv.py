"""The CSV files of BurstGPT, with or without sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import JobRow, Reader, in_order, plain, table


@dataclass(frozen=True, kw_only=True)
class BurstGPTCSV(Reader):
    """A file of BurstGPT: ``Timestamp`` (seconds), ``Model``, ``Request tokens``, ``Response
    tokens``, maybe ``Session ID``. The session is the program, the model the tier. Requests that
    failed, with no response token, are left out."""

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
