"""The CSV files of Vidur, with arrivals or with lengths alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policylab.sim.workloads.arrivals import Arrivals, find_arrivals
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import JobPlace, JobRow, Reader, in_order, plain, table

PROMPT, OUTPUT, ARRIVAL = "num_prefill_tokens", "num_decode_tokens", "arrived_at"


@dataclass(frozen=True, kw_only=True)
class VidurCSV(Reader):
    """A file of Vidur: ``num_prefill_tokens``, ``num_decode_tokens``, maybe ``arrived_at``
    (seconds). Without the last, requests come as ``arrivals`` say, one a second where no rate is
    requested."""

    kind: ClassVar[str] = "vidur-csv"

    arrivals: str = "poisson"
    """Arrivals, as of other workloads: ``poisson``, ``gamma(cv=2)``, ..., for a file without
    arrivals."""

    def __post_init__(self) -> None:
        Reader.__post_init__(self)
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
        """One a second."""
        return self._process.times(dice, 1.0, self.num_requests)
