"""What the engine does at the moment, read at most twice a second however many pages ask.

    page ── GET /page/now ──> Now ── one reading per interval ──> engine's thread ──> each core

A reading has the requests of every key whose pages sent a poll in the last seconds, and separately
all requests if a page may see them. A core that does not answer in time is shown as it was.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from engine.async_engine import AsyncLLMEngine
from engine.core.client import CoreClient
from engine.errors import EngineDeadError, RestartingError
from engine.frontend.async_watching import LiveRequest
from engine.messages.stats import RankUse, SchedulerStats
from engine.messages.watch import WatchedCore, WatchedRequest, WatchedStep
from engine.server.callers import CALLER
from engine.server.errors import ApiError
from engine.server.page.owners import HTTP_REQUEST, HttpRequest, Viewer
from engine.server.page.shown import plain_id, rounded, shown_cause, shown_waits

INTERVAL = 0.5  # seconds between two readings
PATIENCE = 1.0  # seconds that a page waits for a reading
VIEWER_SECONDS = 5.0  # without a question, after which a viewer's requests are no longer read
MOST_REQUESTS = 200  # shown to one viewer
MOST_READ = 1000  # requests of all viewers in one reading
MOST_STEPS = 600
STEP_SECONDS = 60.0
NO_STEPS = 10**15 - 1  # as the last step that a page has: it wants none
MOST_ENCODED = 64  # answers kept of one reading

Json = dict[str, Any]
Row = tuple[int, WatchedRequest]
"""A request and its core."""


class Own(NamedTuple):
    """A viewer's requests: documents of the oldest, and how many there are."""

    requests: list[Json]
    num: int


@dataclass
class Reading:
    """What one reading has found. ``at``, ``time``: seconds of the monotonic clock, and since the
    epoch; ``core_of``: cores by the engine's ids of requests."""

    at: float
    time: float
    own: dict[Viewer, Own]
    cores: list[Json]
    waits: dict[str, float]
    core_of: dict[str, int]
    encoded: dict[tuple[Viewer, int], bytes] = field(default_factory=dict)


class Found(NamedTuple):
    """What the engine's thread has found: the unfinished requests, and each living core."""

    live: list[LiveRequest]
    cores: dict[int, WatchedCore]


class Now:
    """Reads the engine for pages, while there are any."""

    def __init__(
        self,
        engine: AsyncLLMEngine,
        *,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._interval = interval
        self._clock = clock
        self._viewers: dict[Viewer, float] = {}  # time of each one's last poll
        self._last: Reading | None = None
        self._reading: asyncio.Task[Reading] | None = None
        self._steps: deque[Json] = deque(maxlen=MOST_STEPS)
        self._num_steps = 0  # number of the newest step, over all cores
        self._known_steps: dict[str, int] = {}  # the newest step of each start of a core

    async def document(self, viewer: Viewer, after: int) -> bytes:
        """The JSON for ``GET /page/now``. after: number of the last step that the page has. Raises
        ``ApiError`` if no core has answered yet."""
        reading = await self._reading_for(viewer)
        made = reading.encoded.get((viewer, after))
        if made is None:
            made = msgspec.json.encode(self._document(reading, viewer, after))
            if len(reading.encoded) < MOST_ENCODED:
                reading.encoded[viewer, after] = made
        return made

    def core_of(self, request_id: str) -> int | None:
        """The core of a request, if it is known: some page watches, or there is only one."""
        if self._engine.num_cores.total == 1:
            return 0
        return None if self._last is None else self._last.core_of.get(request_id)

    async def _reading_for(self, viewer: Viewer) -> Reading:
        now = self._viewers[viewer] = self._clock()
        if (known := self._known_to(viewer)) is not None and now - known.at < self._interval:
            return known
        for _ in range(2):  # a reading that has begun may be one without this viewer
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read(self._present(now)))
            reading = self._reading
            await asyncio.wait([reading], timeout=PATIENCE)
            if reading.done():
                self._last = reading.result()
            if (known := self._known_to(viewer)) is not None:
                return known
        message = "the core has not answered yet: it computes a long step, see Retry-After"
        raise ApiError(503, message, code="core_silent")

    def _known_to(self, viewer: Viewer) -> Reading | None:
        """The last reading, if it has this viewer's requests."""
        return self._last if self._last is not None and viewer in self._last.own else None

    def _present(self, now: float) -> list[Viewer]:
        """The viewers whose pages still ask."""
        self._viewers = {
            viewer: at for viewer, at in self._viewers.items() if now - at < VIEWER_SECONDS
        }
        return list(self._viewers)

    async def _read(self, viewers: Sequence[Viewer]) -> Reading:
        after = self._known_steps if None in viewers else None
        try:
            found = await self._engine.look(partial(begin_look, viewers, after))
        except (EngineDeadError, RestartingError):
            found = Found([], {})
        return self._interpreted(found, viewers)

    def _interpreted(self, found: Found, viewers: Sequence[Viewer]) -> Reading:
        at, since_epoch, cores = self._clock(), time.time(), self._engine.num_cores
        http_of = {
            core_id: http
            for request in found.live
            if (http := request.context.get(HTTP_REQUEST)) is not None
            for core_id in request.core_ids
        }
        rows = [
            (index, request) for index, core in found.cores.items() for request in core.requests
        ]
        rows.sort(key=lambda row: -row[1].age)
        waits: dict[str, float] = {}
        for core in found.cores.values():
            for cause, seconds in core.stats.wait_seconds.items() if core.stats else ():
                waits[cause] = waits.get(cause, 0.0) + seconds
        for index, core in found.cores.items():
            self._add_steps(index, core, since_epoch, http_of)
        self._known_steps = {
            core.core_id: core.steps[-1].number
            if core.steps
            else self._known_steps.get(core.core_id, 0)
            for core in found.cores.values()
        }
        engine_ids = {
            core_id: request.request_id for request in found.live for core_id in request.core_ids
        }
        return Reading(
            at,
            since_epoch,
            _own_by_viewer(viewers, rows, http_of, found),
            [
                _core(index, cores.role_of(index), found.cores.get(index))
                for index in range(cores.total)
            ],
            {cause: rounded(seconds) for cause, seconds in waits.items()},
            {
                engine_ids[row.request_id]: index
                for index, row in rows
                if row.request_id in engine_ids
            },
        )

    def _add_steps(
        self, index: int, core: WatchedCore, now: float, http_of: dict[str, HttpRequest]
    ) -> None:
        names = [_shown_id(name, http_of) for name in core.names]
        for step in core.steps:
            self._num_steps += 1
            self._steps.append(_step(self._num_steps, index, step, names, now))

    def _document(self, reading: Reading, viewer: Viewer, after: int) -> Json:
        own, sees_all = reading.own[viewer], viewer is None
        first = after if after <= self._num_steps else 0  # the server was started again
        oldest = reading.time - STEP_SECONDS
        steps = [step for step in self._steps if step["step"] > first and step["at"] > oldest]
        return {
            "time": reading.time,
            "scope": "all" if sees_all else "own",
            "requests": own.requests,
            "num_requests": own.num,
            "cores": reading.cores if sees_all else [],
            "steps": steps if sees_all and after < NO_STEPS else [],
            "waits": reading.waits if sees_all else {},
        }


def begin_look(
    viewers: Sequence[Viewer],
    after: dict[str, int] | None,
    client: CoreClient,
    live: list[LiveRequest],
) -> Callable[[], Found | None]:
    """Begin to read the cores, in the engine's thread: the requests that these viewers may see, and
    the steps of each core after those in ``after`` (``None``: none). Returns a function that
    gives what was found, or ``None`` until all cores have answered."""
    own: dict[bytes, list[str]] = {viewer: [] for viewer in viewers if viewer is not None}
    for request in live:
        http = request.context.get(HTTP_REQUEST)
        if http is None:
            continue
        for core_id in request.core_ids:
            http.sequences.setdefault(core_id, len(http.sequences))
        if http.owner in own:
            own[http.owner] += request.core_ids
    share = min(MOST_REQUESTS, MOST_READ // max(1, len(own)))
    names = [name for theirs in own.values() for name in theirs[:share]]
    num_oldest = 0 if after is None else MOST_REQUESTS
    take = client.begin_each("watch", after, num_oldest, names)

    def found() -> Found | None:
        answers = take()
        if answers is None:
            return None
        cores = {index: msgspec.convert(each, WatchedCore) for index, each in answers.items()}
        return Found(live, cores)

    return found


def _all(rows: Sequence[Row], http_of: dict[str, HttpRequest], found: Found) -> Own:
    """All requests, the oldest first."""
    stats = [core.stats for core in found.cores.values() if core.stats is not None]
    num = sum(each.num_running + each.num_waiting + each.num_parked for each in stats)
    shown = [_request(*row, http_of, None) for row in rows[:MOST_REQUESTS]]
    senders = _senders(found.live)
    for (_, request), document in zip(rows, shown, strict=False):
        document |= senders.get(request.request_id, {})
    return Own(shown, max(num, len(shown)))


def _own_by_viewer(
    viewers: Sequence[Viewer], rows: Sequence[Row], http_of: dict[str, HttpRequest], found: Found
) -> dict[Viewer, Own]:
    """What each viewer sees of the requests, the oldest first."""
    nums = Counter(http.owner for http in http_of.values())
    own: dict[Viewer, Own] = {
        viewer: Own([], nums[viewer]) for viewer in viewers if viewer is not None
    }
    for core, request in rows:
        http = http_of.get(request.request_id)
        if http is not None and http.owner in own:
            shown = own[http.owner].requests
            if len(shown) < MOST_REQUESTS:
                shown.append(_request(core, request, http_of, http.owner))
    if None in viewers:
        own[None] = _all(rows, http_of, found)
    return own


def _senders(live: Sequence[LiveRequest]) -> dict[str, dict[str, str]]:
    """The key and the user of each request, by the core's ids of its sequences."""
    return {
        core_id: caller.fields()
        for request in live
        if (caller := request.context.get(CALLER)) is not None
        for core_id in request.core_ids
    }


def _request(
    core: int, request: WatchedRequest, http_of: dict[str, HttpRequest], viewer: Viewer
) -> Json:
    return {
        "id": _shown_id(request.request_id, http_of),
        "state": request.state,
        "priority": request.priority,
        "cause": shown_cause(request.cause, viewer),
        "since": rounded(request.since),
        "age": rounded(request.age),
        "prompt": request.num_prompt,
        "computed": request.num_computed,
        "cached": request.num_cached,
        "output": request.num_output,
        "core": core,
        "waited": shown_waits(request.waits, viewer),
    }


def _core(index: int, role: str, core: WatchedCore | None) -> Json:
    stats = None if core is None else core.stats
    kv = [] if core is None or stats is None else _kv(stats, core.num_blocks)
    prefix = {"queries": 0, "hits": 0, "missed": {}}
    if stats is not None:
        prefix = {
            "queries": stats.prefix_queries,
            "hits": stats.prefix_hits,
            "missed": stats.prefix_missed,
        }
    return {
        "core": index,
        "role": role,
        "alive": core is not None,
        "running": 0 if stats is None else stats.num_running,
        "waiting": 0 if stats is None else stats.num_waiting + stats.num_parked,
        "kv": kv,
        "prefix": prefix,
        "ranks": [] if stats is None else [_rank(use) for use in stats.ranks],
    }


def _rank(use: RankUse) -> Json:
    """Seconds of a rank in steps, and waiting for other ranks and stages in them."""
    waited = use.wait_seconds + use.stage_wait_seconds
    return {"rank": use.rank, "steps": rounded(use.step_seconds), "waited": rounded(waited)}


def _kv(stats: SchedulerStats, total: int) -> list[Json]:
    """The KV blocks in use, by kind of layers. All kinds take their blocks from one pool."""
    used: dict[str, int] = {}
    for group in stats.kv_groups:
        name = f"{group.attention} {group.window}" if group.window else group.attention
        used[name] = used.get(name, 0) + group.num_blocks
    if stats.has_snapshots:
        used["snapshots"] = round(stats.snapshot_usage * total)
    return [{"group": name, "used": num, "total": total} for name, num in used.items()]


def _step(number: int, core: int, step: WatchedStep, names: Sequence[str], now: float) -> Json:
    tokens: dict[str, int] = {}
    for place, num in zip(step.names, step.tokens, strict=True):
        tokens[names[place]] = tokens.get(names[place], 0) + num
    return {
        "step": number,
        "core": core,
        "num_steps": step.num_steps,
        "at": rounded(now - step.age),
        "seconds": round(step.seconds, 6),
        "tokens": tokens,
        "others": step.num_others,
        "causes": step.causes,
    }


def _shown_id(core_id: str, http_of: dict[str, HttpRequest]) -> str:
    http = http_of.get(core_id)
    return plain_id(core_id) if http is None else http.shown_id(core_id)
