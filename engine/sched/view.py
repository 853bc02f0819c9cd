"""The live objects that ``SchedView`` shows."""

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
from engine.sched.columns import Columns, OwnNumbers
from engine.sched.predict.cost import NO_STEP, CostModel, LinearCost, StepShape
from engine.sched.predict.headroom import Headroom
from engine.sched.predict.ledger import Ledger
from engine.sched.predict.lengths import LengthHistory, PredictsAll, find_predictor
from engine.sched.predict.profile import ProfileCost, read_profile
from engine.sched.request import Request
from engine.sched.roster import NO_ROWS, RankedQueue, Roster, Rows, by_rank
from engine.sched.step_state import Step

UNREAD = 64  # steps that are kept until the cost model is used
FEW = 16  # requests up to which vectors cost more than they save
MAX_COUNTERS = 256  # of a policy: each goes with every message of statistics
MOST_COUNTED = 2**63 - 1  # what a message can carry

Unread = tuple[Callable[[Any, float], StepShape], Any, float]
"""A settled step: how to read its shape, what to read it from, and the seconds it took."""


class View:
    """What policies see. ``now`` and ``step`` are set by the scheduler, at the start of a step."""

    def __init__(self, config: SchedulerConfig, kv: KVManager, roster: Roster, rng: Random) -> None:
        self.config = config
        self.kv = kv
        self.rng = rng
        self.now = 0.0
        self.step = Step(0, 0, roster)
        self.ledger = Ledger(config.user_weights)
        self.lengths = LengthHistory()
        self.headroom = Headroom()
        self._cost = LinearCost()
        self._profile: CostModel | None = None  # in place of what was learned
        if config.cost_profile is not None:
            self._profile = ProfileCost(read_profile(config.cost_profile))
        self._last = NO_STEP
        self.unread: deque[Unread] = deque(maxlen=UNREAD)
        self.predictor = find_predictor(config.length_predictor, self.lengths)
        self.counters: dict[str, int] = {}  # of the policy's own
        self._own: dict[str, OwnNumbers] = {}
        self._roster = roster

    @property
    def running(self) -> Sequence[Request]:
        """In rank order."""
        return self._roster.running

    @property
    def waiting(self) -> Sequence[Request]:
        """In rank order."""
        return self._roster.waiting

    def columns(self, reqs: Sequence[Request]) -> Columns:
        """Numbers of these requests as arrays, in their order."""
        if isinstance(reqs, RankedQueue):
            return self._columns_of(reqs.rows)
        by_row = {req.row: req for req in reqs}  # one that is being added is not in the roster yet
        rows = np.array([req.row for req in reqs], dtype=np.intp)
        return self._columns_of(rows, lambda rows: [by_row[row] for row in rows.tolist()])

    def _columns_of(
        self, rows: Rows, requests: Callable[[Rows], list[Request]] | None = None
    ) -> Columns:
        roster = self._roster
        requests = requests or roster.requests
        return Columns(rows, roster.table, self._predict_all, self._cached_all, requests)

    def _predict_all(self, columns: Columns) -> NDArray[np.int64]:
        if isinstance(self.predictor, PredictsAll):
            return self.predictor.predict_all(columns)
        predicted = [self.predictor.predict(req) for req in columns.requests]
        return np.array(predicted, dtype=np.int64)

    def _cached_all(self, columns: Columns) -> NDArray[np.int64]:
        return self.kv.cached_prefixes(
            columns.rows, columns.arrival, columns.num_tokens, columns.requests_of
        )

    def own(self, name: str, default: float = 0.0) -> OwnNumbers:
        """A number of the policy's own for each request."""
        if name not in self._own:
            self._own[name] = OwnNumbers(self._roster.table.facts.own_column(name, default))
        return self._own[name]

    def count(self, name: str, value: int = 1) -> None:
        """Add to a counter of the policy's own. Raises ``ValueError`` for one too many, or what is
        no whole number from 0 on."""
        known = self.counters.get(name, 0)
        if not (isinstance(name, str) and isinstance(value, Integral) and int(value) >= 0):
            raise ValueError(
                f"count({name!r:.80}, {value!r:.80}) needs a str and a whole number from 0 on"
            )
        if name not in self.counters and len(self.counters) >= MAX_COUNTERS:
            raise ValueError(f"count({name!r:.80}): the limit is {MAX_COUNTERS} names; use fewer")
        self.counters[name] = min(MOST_COUNTED, known + int(value))

    def decodes_first(self) -> list[Request]:
        """Running requests: those that lack one token, then the others; by rank in both."""
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
        """Running requests by rank. Prompts leave each decode one token of the step budget."""
        running = list(self._roster.running)
        self.step.decodes = [req for req in running if req.num_uncomputed == 1]
        return running

    def default_order(self) -> list[Request]:
        """Running requests in the default order: decodes first; but all by rank while the free
        blocks may not cover what each of them needs."""
        return self.by_rank() if self.prompts and self.is_short() else self.decodes_first()

    def is_short(self, num_more: int = 0) -> bool:
        """Are too few blocks free? Needed are those promised to running prompts, those for decodes
        that were not offered their token yet, and those for this many further table entries."""
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
        """Waiting requests that may still be offered in this step, in rank order."""
        if not self.step.admission_open:
            return []
        considered, index = self._roster.table.considered.at, self.step.index
        return [req for req in self._roster.waiting if considered[req.row] != index]

    @property
    def unoffered_columns(self) -> Columns:
        """The same as columns."""
        rows = self._roster.waiting.rows if self.step.admission_open else NO_ROWS
        considered = self._roster.table.considered.all[rows]
        return self._columns_of(rows[considered != self.step.index])

    @property
    def holders(self) -> Sequence[Request]:
        """Requests that hold blocks and may lose them, running or waiting, by rank."""
        waiting = self._roster.waiting_holders()
        return sorted([*self._roster.running, *waiting], key=by_rank) if waiting else self.running

    @property
    def parked(self) -> Collection[Request]:
        return self._roster.parked.values()

    @property
    def by_id(self) -> Mapping[str, Request]:
        """The unfinished requests."""
        return self._roster.by_id

    @property
    def unfinished(self) -> Collection[Request]:
        """In order of arrival."""
        return self._roster.by_id.values()

    @property
    def last(self) -> StepShape:
        """The step settled last."""
        self.read_steps()
        return self._last

    @property
    def cost(self) -> CostModel:
        """Fitted to the steps measured so far, or the profile that was given."""
        if self._profile is not None:
            return self._profile
        self.read_steps()
        return self._cost

    def prefill_seconds(
        self, num_tokens: NDArray[np.int64], context: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """``cost.prefill_seconds`` of many prompts, each in a step of its own."""
        cost = self.cost
        if isinstance(cost, LinearCost):
            return cost.prefill_seconds_each(num_tokens, context)
        sizes = zip(num_tokens.tolist(), context.tolist(), strict=True)
        return np.array([cost.prefill_seconds(*size) for size in sizes], dtype=np.float64)

    def note(self, plan: StepPlan, seconds: float) -> None:
        """A step was settled. Its shape is computed lazily, when it is first read."""
        self.unread.append((StepShape.of, plan, seconds))

    def read_steps(self) -> None:
        """Bring ``last`` and the cost model up to date with the steps settled."""
        while self.unread:
            shape_of, step, seconds = self.unread.popleft()
            if seconds or not self.unread:  # an untimed step is read only if it is the latest
                self._last = shape_of(step, seconds)
                self._cost.observe(self._last)

    def knows(self, req: Request) -> bool:
        """Is this one of the unfinished requests?"""
        return self._roster.by_id.get(req.request_id) is req

    def start_of(self, req: Request) -> int:
        """Position of the first token that the request would compute next."""
        return self.kv.ready(req) if req.is_waiting else req.num_computed

    def predict(self, req: Request) -> int:
        """Output tokens the request will have in all, by the configured predictor."""
        return self.predictor.predict(req)

    @property
    def prompts(self) -> list[Request]:
        """Running requests that lack more than one known token."""
        return self._roster.running_prompts()

    @property
    def promised_blocks(self) -> int:
        """Blocks that running prompts still need before they decode."""
        return self.promised_to(self._roster.running_prompts())

    @property
    def headroom_blocks(self) -> int:
        """Blocks to leave free when a waiting request starts, if ``keeps_headroom``: those promised
        to running prompts, and one for each fourth running request. Or the watermark."""
        num_running, watermark = len(self._roster.running), self.config.watermark
        if watermark is not None:
            return int(watermark * self.kv.num_blocks) if num_running else 0
        return self.promised_blocks + num_running // 4 * self.kv.num_groups

    @property
    def keeps_headroom(self) -> bool:
        """Is headroom worth its cost? Judged by the cost model; call it only if needed."""
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
        """Blocks that these still need before they decode."""
        kv = self.kv
        if kv.tables.windows:
            return sum(kv.missing(req, req.num_tokens) for req in prompts)
        size, held = kv.block_size, kv.num_held
        missing = [max(0, -(-req.num_tokens // size) - int(held[req.row])) for req in prompts]
        return sum(missing) * kv.num_groups
