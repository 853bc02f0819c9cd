"""A workload of the requests that an engine has served, from its step log."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, ClassVar

from engine.core.replay import Replay
from engine.errors import ConfigError
from engine.messages.requests import AddRequest
from engine.observe.steplog import AddCall, AddResult, StepLog
from engine.sched.interface import StepOutputs
from policylab.sim.job import Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.open_loop import Body
from policylab.sim.workloads.reader import FileWorkload, JobRow

NOT_TAKEN = -1


@dataclass(frozen=True, kw_only=True)
class StepsLog(FileWorkload):
    """The requests in a step log, with their token ids and their output lengths.

    Output lengths are found by a replay, which must give the recorded plans (``metronome replay``).
    An aborted or failed request gets the length that it reached, at least 1. Refused requests are
    left out."""

    kind: ClassVar[str] = "steps-log"

    allow_truncated: bool = False
    """If the log is truncated, use its complete records."""

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        last = -inf
        for add, num_output in zip(self._added(), self._outputs, strict=False):
            if num_output == NOT_TAKEN:
                continue
            last = max(last, add.arrival_time)  # clients' clocks may differ slightly
            yield JobRow(last, _body(add, max(1, num_output)), add.request_id)

    def _log(self) -> StepLog:
        return StepLog(self.path, allow_truncated=self.allow_truncated)

    def _added(self) -> Iterator[AddRequest]:
        """The requests in the log, in order, including refused ones."""
        return (record.request for record in self._log() if isinstance(record, AddCall))

    @cached_property
    def _outputs(self) -> array[int]:
        """The number of output tokens of each request in the log, in order; ``NOT_TAKEN`` for
        refused requests."""
        log = self._log()
        counted = _CountedRecords(log)
        replayed = Replay(log.header, {}, counted.came).run(counted)  # type: ignore[arg-type]
        if replayed.difference is not None:
            raise ConfigError(
                f"{self.path} cannot be replayed, so its output lengths are unknown: "
                f"{replayed}; use the release that wrote it"
            )
        return counted.numbers


class _CountedRecords:
    """Iterates over the records of a step log, and counts the output tokens of each request."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._places: dict[str, int] = {}  # index in ``numbers`` of unfinished requests
        self.numbers = array("i")

    def __iter__(self) -> Iterator[Any]:
        name = ""
        for record in self._log:
            if isinstance(record, AddCall):
                name = record.request.request_id
            elif isinstance(record, AddResult):
                self.numbers.append(NOT_TAKEN if record.error else 0)
                if not record.error:
                    self._places[name] = len(self.numbers) - 1
            yield record

    def came(self, outputs: StepOutputs) -> None:
        """Add the output tokens of one step to the counts of its requests."""
        for batch in outputs.values():
            ids = batch.request_ids
            if batch.token_ids:
                counts = batch.counts or [1] * len(ids)
                for name, count in zip(ids, counts, strict=True):
                    self.numbers[self._places[name]] += count
            for end in batch.finished:
                del self._places[ids[end.index]]


def _body(add: AddRequest, num_output: int) -> Body:
    name = f"log:{add.request_id}"
    hints = add.hints or {}
    deadline = None if add.deadline is None else add.deadline - add.arrival_time
    fields = {
        "user": add.user,
        "priority": add.priority,
        "deadline": deadline,
        "ttft": _number(hints, "ttft"),
        "tbt": add.tbt or _number(hints, "tbt"),
        "tier": str(hints.get("tier", "")),
        "program": str(hints.get("program", "")),
        "adapter": add.adapter or "",
        "hints": hints,
        "max_tokens": add.max_tokens,
        "is_pooled": add.pooling is not None,
        "texts": {name: array("i", add.prompt_token_ids)},
    }
    return Body((Span(name, len(add.prompt_token_ids)),), num_output, fields)


def _number(hints: dict[str, Any], name: str) -> float | None:
    value = hints.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None
