"""The traffic that an engine has served, from its step log."""

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
from policylab.sim.workloads.reader import JobRow, Reader

NOT_TAKEN = -1


@dataclass(frozen=True, kw_only=True)
class StepsLog(Reader):
    """Requests of a step log: prompts by their token ids, outputs as long as they became.

    One that was aborted or failed is as long as what it had got, one token at least. Requests that
    were refused are left out: how long their outputs would have been is not known. Lengths become
    known by replaying the log once, so it must be one that ``metronome replay`` finds identical.
    """

    kind: ClassVar[str] = "steps-log"

    allow_truncated: bool = False
    """Take what is whole of a log that breaks off."""

    def rows(self, dice: RandomDraws) -> Iterator[JobRow]:
        last = -inf
        for add, num_output in zip(self._added(), self._outputs, strict=False):
            if num_output == NOT_TAKEN:
                continue
            last = max(last, add.arrival_time)  # clients' clocks may differ a little
            yield JobRow(last, _body(add, max(1, num_output)), add.request_id)

    def _log(self) -> StepLog:
        return StepLog(self.path, allow_truncated=self.allow_truncated)

    def _added(self) -> Iterator[AddRequest]:
        """Each request that was handed to the scheduler."""
        return (record.request for record in self._log() if isinstance(record, AddCall))

    @cached_property
    def _outputs(self) -> array[int]:
        """Tokens that each of these requests got, ``NOT_TAKEN`` for those refused."""
        log = self._log()
        counted = _Counted(log)
        replayed = Replay(log.header, {}, counted.came).run(counted)  # type: ignore[arg-type]
        if replayed.difference is not None:
            raise ConfigError(
                f"{self.path} cannot be replayed, so lengths of its outputs are not known: "
                f"{replayed}; use the release that wrote it"
            )
        return counted.numbers


class _Counted:
    """The records of a log, and how many tokens each request got while they were replayed."""

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self._places: dict[str, int] = {}  # of the living
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
        """Count the tokens of a step."""
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
        "hints": hints,
        "max_tokens": add.max_tokens,
        "texts": {name: array("i", add.prompt_token_ids)},
    }
    return Body((Span(name, len(add.prompt_token_ids)),), num_output, fields)


def _number(hints: dict[str, Any], name: str) -> float | None:
    value = hints.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None
