"""The live objects behind ``SchedView``."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import cast

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.sched.builder import Step
from engine.sched.request import Request
from engine.sched.roster import Roster


class View:
    """What policies see. ``now`` and ``step`` are set by the scheduler, at the start of a step."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, roster: Roster, rng: Random) -> None:
        self.config = config
        self.kv = kv
        self.rng = rng
        self.now = 0.0
        self.step = Step(0, 0, roster)
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self._roster = roster

    @property
    def running(self) -> Sequence[Request]:
        """In rank order."""
        return cast(Sequence[Request], self._roster.running)

    @property
    def waiting(self) -> Sequence[Request]:
        """In rank order."""
        return cast(Sequence[Request], self._roster.waiting)

    @property
    def promised_blocks(self) -> int:
        """Blocks that running prompts still need before they decode."""
        table, kv, rows = self._roster.table, self.kv, self._roster.running_rows()
        tokens = table.num_tokens.all[rows]
        missing = -(-tokens // kv.block_size) - kv.num_held[rows]
        return int(missing[tokens - table.num_computed.all[rows] > 1].clip(min=0).sum())
