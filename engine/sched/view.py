"""View: the implementation of ``SchedView``, which policies read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.messages.step import StepPlan
from engine.sched.adapters import AdapterPlaces, NoAdapters
from engine.sched.columns import Columns, OwnNumbers
from engine.sched.predict.cost import NO_STEP, CostModel, LinearCost, StepShape
from engine.sched.predict.headroom import Headroom
from engine.sched.predict.ledger import Ledger
from engine.sched.predict.lengths import LengthHistory, PredictsAll, find_predictor
from engine.sched.predict.loads import LoadChoices
from engine.sched.predict.profile import ProfileCost, read_profile
from engine.sched.request import Request
from engine.sched.roster import NO_ROWS, RankedQueue, Roster, Rows
from engine.sched.step_state import Step

UNREAD = 64  # finished steps kept until they are passed to the cost model
FEW = 16  # up to this many requests a loop is faster than numpy
MAX_COUNTERS = 256  # of a policy: all of them are part of every statistics message
MOST_COUNTED = 2**63 - 1  # the largest integer of a message

Unread = tuple[Callable[[Any, float], StepShape], Any, float]
"""A finished step as ``(function, argument, seconds)``: ``function(argument, seconds)`` computes
its shape."""


class View:
    """Implements ``SchedView``, the members that policies read. The scheduler sets ``now`` and
    ``step`` at the start of each step."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, roster: Roster, rng: Random) -> None:
        self.config = config
        self.kv = kv
        self.rng = rng
        self.now = 0.0
        self.step = Step(0, 0, roster)
        self.ledger = Ledger(config.user_weights)
        self.lengths = LengthHistory()
        self.headroom = Headroom()
        self.loads = LoadChoices()
        self.adapters: AdapterPlaces = NoAdapters()  # the resource for adapters sets its own
        self._cost = LinearCost()
        self._profile: CostModel | None = None  # given by the user, instead of the fitted model
        if config.cost_profile is not None:
            self._profile = ProfileCost(read_profile(config.cost_profile))
        self._last = NO_STEP
        self.unread: deque[Unread] = deque(maxlen=UNREAD)
        self.predictor = find_predictor(config.length_predictor, self.lengths)
        self.counters: dict[str, int] = {}  # counters of the policy
        self._own: dict[str, OwnNumbers] = {}
        self._roster = roster

    @property
    def running(self) -> Sequence[Request]:
        return self._roster.running

    @property
    def waiting(self) -> Sequence[Request]:
        return self._roster.waiting

    def columns(self, reqs: Sequence[Request]) -> Columns:
        if isinstance(reqs, RankedQueue):
            return self._columns_of(reqs.rows)
        by_row = {req.row: req for req in reqs}  # a new request is not in the roster yet
        rows = np.array([req.row for req in reqs], dtype=np.intp)
        return self._columns_of(rows, lambda rows: [by_row[row] for row in rows.tolist()])

    def _columns_of(
        self, rows: Rows, requests: Callable[[Rows], list[Request]] | None = None
    ) -> Columns:
        roster = self._roster
        requests = requests or roster.requests
        return Columns(
            rows, roster.table, self._predict_all, self._cached_all, self._load_seconds, requests
        )

    def _predict_all(self, columns: Columns) -> NDArray[np.int64]:
        if isinstance(self.predictor, PredictsAll):
            return self.predictor.predict_all(columns)
        predicted = [self.predictor.predict(req) for req in columns.requests]
        return np.array(predicted, dtype=np.int64)

    def _cached_all(self, columns: Columns) -> NDArray[np.int64]:
        return self.kv.cached_prefixes(
            columns.rows, columns.arrival, columns.num_tokens, columns.requests_of
        )

    def _load_seconds(self, columns: Columns) -> NDArray[np.float64]:
        numbers, names = columns.adapter, self._roster.table.facts.adapters
        seconds = np.zeros(len(names) + 1)  # the last one is for number -1, no adapter
        cost = self.cost
        for number in np.unique(numbers[numbers >= 0]).tolist():
            seconds[number] = cost.load_seconds(self.adapters.place(names[number]))
        found: NDArray[np.float64] = seconds[numbers]
        return found

    def own(self, name: str, default: float = 0.0) -> OwnNumbers:
        if name not in self._own:
            self._own[name] = OwnNumbers(self._roster.table.facts.own_column(name, default))
        return self._own[name]

    def count(self, name: str, value: int = 1) -> None:
        """Add ``value`` to a counter of the policy. Raises ``ValueError`` for more than
        ``MAX_COUNTERS`` names, or if ``value`` is not an integer of at least 0."""
        known = self.counters.get(name, 0)
        if not (isinstance(name, str) and isinstance(value, Integral) and int(value) >= 0):
            raise ValueError(
                f"count({name!r:.80}, {value!r:.80}) needs a str and an integer of at least 0"
            )
        if name not in self.counters and len(self.counters) >= MAX_COUNTERS:
            raise ValueError(f"count({name!r:.80}): at most {MAX_COUNTERS} names are allowed")
        self.counters[name] = min(MOST_COUNTED, known + int(value))

    def decodes_first(self) -> list[Request]:
        running, table = list(self._roster.running), self._roster.table
        if len(running) <= FEW:
            return sorted(running, key=lambda req: req.num_uncomputed != 1)
        rows = self._roster.running.rows
        upto = table.num_tokens.all[rows] + table.num_pending.all[rows]
        decode = (upto - table.num_computed.all[rows] == 1) & (upto < table.limit.all[rows])
        if np.count_nonzero(decode) == len(rows):
            return running
        marked = list(zip(running, decode.tolist(), strict=True))
        return [req for req, first in marked if first] + [req for req, first in marked if not first]

    def by_rank(self) -> list[Request]:
        running = list(self._roster.running)
        self.step.decodes = [req for req in running if req.num_uncomputed == 1]
        return running

    def default_order(self) -> list[Request]:
        return self.by_rank() if self.prompts and self.is_short() else self.decodes_first()

    def is_short(self, num_more: int = 0) -> bool:
        """True if the free blocks may not suffice for running prompts, for decodes that this step
        has not scheduled yet, and for ``num_more`` further blocks per KV group."""
        kv, size, index = self.kv, self.kv.block_size, self.step.index
        room = (kv.num_free - self.promised_blocks) // kv.num_groups - num_more
        if len(self._roster.running) <= room:
            return False
        growing = [
            req
            for req in self._roster.running
            if req.num_uncomputed == 1
            and req.considered != index
            and req.num_computed >= kv.num_held[req.row] * size
        ]
        return len(growing) > room

    @property
    def unoffered(self) -> list[Request]:
        if not self.step.admission_open:
            return []
        considered, index = self._roster.table.considered.at, self.step.index
        return [req for req in self._roster.waiting if considered[req.row] != index]

    @property
    def unoffered_columns(self) -> Columns:
        """Table columns of the waiting requests that can still be scheduled in this step."""
        rows = self._roster.waiting.rows if self.step.admission_open else NO_ROWS
        considered = self._roster.table.considered.all[rows]
        return self._columns_of(rows[considered != self.step.index])

    @property
    def parked(self) -> Collection[Request]:
        return self._roster.parked.values()

    @property
    def by_id(self) -> Mapping[str, Request]:
        """The unfinished requests by id."""
        return self._roster.by_id

    @property
    def unfinished(self) -> Collection[Request]:
        return self._roster.by_id.values()

    @property
    def last(self) -> StepShape:
        self.read_steps()
        return self._last

    @property
    def cost(self) -> CostModel:
        """The cost model: the configured profile, or one fitted to the steps measured so far."""
        if self._profile is not None:
            return self._profile
        self.read_steps()
        return self._cost

    def prefill_seconds(
        self, num_tokens: NDArray[np.int64], context: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        cost = self.cost
        if isinstance(cost, LinearCost):
            return cost.prefill_seconds_each(num_tokens, context)
        sizes = zip(num_tokens.tolist(), context.tolist(), strict=True)
        return np.array([cost.prefill_seconds(*size) for size in sizes], dtype=np.float64)

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """Record a finished step and its duration in seconds, for ``last`` and the cost model."""
        self.unread.append((StepShape.of, plan, seconds))

    def read_steps(self) -> None:
        """Update ``last`` and the cost model with the steps recorded since the last call."""
        while self.unread:
            shape_of, step, seconds = self.unread.popleft()
            if seconds or not self.unread:  # a step without a time is read only if it is the last
                self._last = shape_of(step, seconds)
                self._cost.observe(self._last)

    def knows(self, req: Request) -> bool:
        """True if ``req`` itself, not a copy, is one of the scheduler's unfinished requests."""
        return self._roster.by_id.get(req.request_id) is req

    def start_of(self, req: Request) -> int:
        return self.kv.ready(req) if req.is_waiting else req.num_computed

    def predict(self, req: Request) -> int:
        return self.predictor.predict(req)

    @property
    def prompts(self) -> list[Request]:
        """Running requests that have more than one token to compute (prefill)."""
        return self._roster.running_prompts()

    @property
    def promised_blocks(self) -> int:
        return self.promised_to(self._roster.running_prompts())

    @property
    def headroom_blocks(self) -> int:
        num_running, watermark = len(self._roster.running), self.config.watermark
        if watermark is not None:
            return int(watermark * self.kv.num_blocks) if num_running else 0
        return self.promised_blocks + num_running // 4 * self.kv.num_groups

    @property
    def keeps_headroom(self) -> bool:
        if self.config.watermark is not None:
            return self.config.watermark > 0
        roster, headroom = self._roster, self.headroom
        if headroom.is_due(self.step.index) and len(roster.running):
            self.read_steps()
            rows = roster.running_rows.columns.rows
            num_tokens = int(roster.table.num_computed.all[rows].sum()) / len(rows)
            headroom.judge(self.step.index, self._cost, num_tokens)
        return headroom.is_kept

    def promised_to(self, prompts: Iterable[Request]) -> int:
        """Number of blocks that these requests still need to complete their prompts."""
        kv = self.kv
        if kv.tables.windows:
            return sum(kv.missing(req, req.num_tokens) for req in prompts)
        size, held = kv.block_size, kv.num_held
        missing = [max(0, -(-req.num_tokens // size) - int(held[req.row])) for req in prompts]
        return sum(missing) * kv.num_groups
