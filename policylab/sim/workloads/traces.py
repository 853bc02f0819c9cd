"""Workloads with the lengths and arrivals of public traces, without shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from policylab.sim.job import Span
from policylab.sim.workloads.arrivals import Arrivals, Minutes, Spells
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import (
    ARXIV,
    AZURE_CODE,
    AZURE_CONV,
    Lengths,
    Quantiles,
)
from policylab.sim.workloads.open_loop import TRACE, Body, OpenLoop, pairs


@dataclass(frozen=True, kw_only=True)
class LikeTrace(OpenLoop):
    """Base class of workloads that imitate a trace's lengths, without shared prefixes."""

    table: ClassVar[Lengths]

    arrivals: str = TRACE
    scale: float = 1.0
    """Factor by which all lengths are multiplied, for an engine too small for the trace."""

    def __post_init__(self) -> None:
        OpenLoop.__post_init__(self)
        self.check("scale", self.scale, 1e-4, 100)

    @cached_property
    def lengths(self) -> Lengths:
        """The trace's length distributions of prompts and outputs, multiplied by ``scale``."""
        if self.scale == 1.0:
            return self.table
        return Lengths(*(scaled(part, self.scale) for part in self.table))

    @property
    def max_prompt(self) -> int:
        return self.lengths.prompt.longest

    @property
    def max_output(self) -> int:
        return self.lengths.output.longest

    def bodies(self, dice: RandomDraws) -> Iterator[Body]:
        for number, (num_prompt, num_output) in enumerate(pairs(self.lengths, dice)):
            yield Body((Span(f"prompt {number}", num_prompt),), num_output)


def scaled(part: object, scale: float) -> Quantiles:
    assert isinstance(part, Quantiles)
    return part.scaled(scale)


@dataclass(frozen=True, kw_only=True)
class AzureConv(LikeTrace):
    """Requests like those of Azure's conversation service in 2023: 19,366 in 3,502 s; the arrival
    rate changes every minute."""

    kind: ClassVar[str] = "azure-conv"
    table: ClassVar[Lengths] = AZURE_CONV
    # Gap CV 1.09, dispersion of counts 1.39 by the second and 20.6 by the minute.
    trace: ClassVar[Arrivals] = Minutes(natural=5.53, cv=1.03, rate_cv=0.253)
    own_rate: ClassVar[float] = 5.53


@dataclass(frozen=True, kw_only=True)
class AzureCode(LikeTrace):
    """Requests like those of Azure's coding service in 2023: 8,819 in 3,436 s, in bursts; long
    prompts and short outputs."""

    kind: ClassVar[str] = "azure-code"
    table: ClassVar[Lengths] = AZURE_CODE
    # Gap CV 13.2, dispersion of counts 161 by the minute.
    trace: ClassVar[Arrivals] = Spells(natural=2.57, on=62.0, off=101.0, rate_cv=0.42)
    own_rate: ClassVar[float] = 2.57


@dataclass(frozen=True, kw_only=True)
class Arxiv(LikeTrace):
    """Summaries of arXiv papers; the trace has no arrival times."""

    kind: ClassVar[str] = "arxiv"
    table: ClassVar[Lengths] = ARXIV

    arrivals: str = "poisson"
