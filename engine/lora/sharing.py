"""Lets all ranks of a group read the same adapters, each its part, and keep the same.

    rank 0: AdapterLibrary                            further ranks: KeptAdapters
        read  ──> own reader (a thread)       ring ──>    reader (a thread)
        poll  <── digest and size of each      <── line   digest and size, or an error
        store, drop                           ring ──>    the same, between the same two plans

An adapter can be used once all ranks have read the same content. If one fails, none keeps it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from engine.errors import ConfigError
from engine.lora.loading import AdapterReader, Order, Reading
from engine.worker.rank import RankReport

# Methods of the workers of further ranks.
READ, HURRY, KEEP = "read_adapter_part", "hurry_adapter_part", "keep_adapter_part"
FORGET, DROP = "forget_adapter_part", "drop_adapter_part"


class PartReport(msgspec.Struct, array_like=True, frozen=True):
    """What a rank reports of the part of an adapter that it has read."""

    digest: str  # of the whole adapter
    num_bytes: int
    share: float  # of the rank's memory for adapters on its device


class Answers(Protocol):
    """What all further ranks report of a call."""

    @property
    def are_there(self) -> bool: ...

    def wait(self) -> Sequence[RankReport]: ...


class OtherRanks(Protocol):
    """The workers of further ranks; see ``engine.core.group.WorkerGroup``."""

    def notify_others(self, name: str, *args: Any) -> None: ...

    def start_call_on_others(self, name: str, *args: Any) -> Answers: ...


class SharedReader:
    """An ``AdapterReader`` of rank 0, whose orders all ranks carry out."""

    def __init__(self, own: AdapterReader, others: OtherRanks) -> None:
        self._own = own
        self._others = others
        self._numbers = itertools.count()

    def submit(self, order: Order) -> SharedReading:
        number = next(self._numbers)
        is_here = os.path.isdir(order.path)  # other ranks may have another current directory
        path = os.path.abspath(order.path) if is_here else order.path
        answers = self._others.start_call_on_others(READ, number, order._replace(path=path))
        return SharedReading(number, order, self._own.submit(order), answers, self._others)

    def shutdown(self) -> None:
        self._own.shutdown()


class SharedReading:
    """The reading of one order by all ranks. Only the core's thread uses it.

    It ends when all have ended, so that none is still reading what rank 0 reports."""

    def __init__(
        self, number: int, order: Order, own: Reading, answers: Answers, others: OtherRanks
    ) -> None:
        self._number = number
        self._order = order
        self._own = own
        self._answers = answers
        self._others = others
        self._reports: Sequence[RankReport] | None = None  # of ranks 1, 2, ...
        self._is_alone = False

    def poll(self) -> Any:
        """The part of rank 0, with the bytes of all parts and the largest share. Called until it
        returns or raises: further ranks then keep or forget theirs."""
        if self._reports is None and not self._answers.are_there:
            return None
        self._reports = self._reports or self._answers.wait()
        try:
            own = self._own.poll()
            if own is None:
                return None
            parts = [self._part(rank, one) for rank, one in enumerate(self._reports, 1)]
            self._check(own.digest, parts)
        except Exception:
            self._others.notify_others(FORGET, self._number)
            raise
        self._others.notify_others(KEEP, self._number)
        made: Any = own
        return replace(
            made,
            num_bytes=sum((part.num_bytes for part in parts), own.num_bytes),
            share=max(made.share, *(part.share for part in parts)),
        )

    def wait(self) -> None:
        self.hurry(is_alone=True)
        self._own.wait()
        self._reports = self._answers.wait()

    def hurry(self, is_alone: bool) -> None:
        self._own.hurry(is_alone)
        if is_alone != self._is_alone:
            self._is_alone = is_alone
            self._others.notify_others(HURRY, self._number, is_alone)

    # -- helpers

    def _part(self, rank: int, report: RankReport) -> PartReport:
        if report.kind:
            raise ConfigError(
                f"adapter {self._order.name!r:.80} was read by rank 0, but not by rank {rank} "
                f"({report.message}): give all ranks the same files, and load it again"
            )
        return msgspec.msgpack.decode(report.value, type=PartReport)

    def _check(self, digest: str, parts: Sequence[PartReport]) -> None:
        others = [rank for rank, part in enumerate(parts, 1) if part.digest != digest]
        if others:
            raise ConfigError(
                f"rank {others[0]} has read other files of adapter {self._order.name!r:.80} than "
                "rank 0: do not change them while they are read, and load it again"
            )
