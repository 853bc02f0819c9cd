"""Media in prompts (images, sound, ...): what is encoded in a step, and what outputs are kept.

``EncoderBudget`` ends a prompt chunk before the first media item that cannot be encoded in this
step. ``EncoderCache`` keeps an encoder output until all tokens that read it are computed, and then
until its space is needed:

    absent ──add──> used ──last user ends──> idle ──space is needed─> evicted (reported once)
                      ^                        │
                      └──────── used again ────┘

After ``reset``, outputs in use are stale: requests that use them go on, others encode them again.

The content of a media item comes later than its requests: see ``engine.mm.arrivals``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.errors import ConfigError
from engine.messages.requests import AddRequest, Arrival, MediaItem
from engine.messages.step import MediaPart, StepPlan, StepResult
from engine.mm.arrivals import Arrivals
from engine.mm.store import PixelStore
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse, Resource
from engine.sched.step_state import Step


@dataclass(slots=True, eq=False)
class Use:
    """The use of an encoder output by one request, which prevents the output's eviction."""

    item: MediaItem
    is_over: bool = False


@dataclass(slots=True)
class Entry:
    """The encoder output of one media item, of ``num_tokens`` tokens."""

    num_tokens: int
    uses: set[Use] = field(default_factory=set)
    is_stale: bool = False


class EncoderCache:
    """A cache of encoder outputs by content hash. Sizes are in tokens (one embedding each)."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.entries: dict[str, Entry] = {}
        self.idle: dict[str, None] = {}  # entries without users, longest idle first
        self.num_used = 0  # tokens in entries with users
        self._num_idle = 0
        self._evicted: list[str] = []

    def __contains__(self, key: str) -> bool:
        """True if requests can begin to use the entry with this content hash."""
        return key in self.entries and not self.entries[key].is_stale

    @property
    def num_available(self) -> int:
        """Number of tokens whose encoder outputs can be added, if idle entries are evicted."""
        return self.num_tokens - self.num_used

    def is_used(self, key: str) -> bool:
        """True if a request uses the entry with this content hash."""
        return key in self.entries and key not in self.idle

    def use(self, item: MediaItem) -> Use:
        """Start to use the item's cache entry, added if missing; may evict unused entries. A stale
        entry is then no longer stale, since the item is encoded again."""
        entry = self.entries.get(item.hash)
        if entry is None:
            self._make_room(item.length)
            entry = self.entries[item.hash] = Entry(item.length)
        elif item.hash in self.idle:
            del self.idle[item.hash]
            self._num_idle -= entry.num_tokens
        if not entry.uses:
            self.num_used += entry.num_tokens
        if entry.is_stale:
            entry.is_stale = False
            self._evicted.append(item.hash)
        use = Use(item)
        entry.uses.add(use)
        return use

    def end(self, use: Use) -> None:
        """End a request's use of an entry. An unused entry stays until its space is needed."""
        if use.is_over:
            return
        use.is_over = True
        entry = self.entries[use.item.hash]
        entry.uses.discard(use)
        if not entry.uses:
            self.num_used -= entry.num_tokens
            self._num_idle += entry.num_tokens
            self.idle[use.item.hash] = None
            if entry.is_stale:
                self._evict(use.item.hash)

    def reset(self) -> None:
        """Evict unused entries, and make the others stale."""
        for key in list(self.idle):
            self._evict(key)
        for entry in self.entries.values():
            entry.is_stale = True

    def discard(self, key: str) -> None:
        """Remove an invalid entry. The requests that use it must encode the item again."""
        entry = self.entries.get(key)
        if entry is None:
            return
        if key in self.idle:
            self._evict(key)
        entry.is_stale = True
        for use in list(entry.uses):
            self.end(use)

    def take_evicted(self) -> list[str]:
        """Take the hashes of the entries evicted since the last call. The worker frees these
        entries before it encodes others."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def _make_room(self, num_tokens: int) -> None:
        while self.num_used + self._num_idle + num_tokens > self.num_tokens:
            self._evict(next(iter(self.idle)))

    def _evict(self, key: str) -> None:
        self._num_idle -= self.entries.pop(key).num_tokens
        del self.idle[key]
        self._evicted.append(key)


class EncoderBudget(Resource):
    """Limits media to ``max_encoder_tokens`` tokens encoded per step, and ``cache_size`` tokens
    kept.

    A chunk ends before the first item whose content is needed and has not arrived, too. Waiting
    requests wait outside the queue for it, and end with an error if it cannot be used.

    ``whole_media``: all tokens of a media item must be computed in one step, since they attend to
    each other. ``longest_item``: tokens of the model's longest media item, 0 if unknown. Raises
    ``ConfigError`` if an item of that length exceeds a limit.
    """

    name = "encoder"
    needs = ("media",)

    def __init__(
        self,
        max_encoder_tokens: int,
        cache_size: int,
        *,
        whole_media: bool = False,
        longest_item: int = 0,
        arrivals: Arrivals | None = None,
        store: PixelStore | None = None,
    ) -> None:
        """arrivals: content that has come; ``None``: all content is there. store: has it."""
        self._arrivals = arrivals
        self._store = store
        self.max_encoder_tokens = max_encoder_tokens
        self.whole_media = whole_media
        self.longest_item = longest_item
        self.cache = EncoderCache(cache_size)
        self._tokens_left = max_encoder_tokens  # that can still be encoded in this step
        self._uses: dict[str, dict[int, Use]] = {}  # request id -> index of item -> use
        self._last_reads: dict[int, list[Use]] = {}  # step -> uses whose last tokens it computes
        self._part = MediaPart()
        self._encoded_in: dict[int, list[tuple[int, str]]] = {}  # step -> row and hash

    def attach(self, scheduler: AttachedScheduler) -> None:
        self._scheduler = scheduler
        if why := self._impossible(self.longest_item):
            raise ConfigError(f"media items of this model have up to {self.longest_item} {why}")

    def objection(self, add: AddRequest) -> str | None:
        for item in add.media:
            if why := self._impossible(item.length):
                return f"the media item at token {item.offset} has {item.length} {why}"
        return None

    def added(self, req: Request) -> None:
        if self._arrivals is not None:
            self._arrivals.add(req)

    def arrived(self, arrival: Arrival) -> None:
        if self._arrivals is not None:
            for request_id in self._arrivals.take(arrival):
                self._scheduler.wake(request_id)

    def reset(self) -> None:
        self.cache.reset()

    def watches(self, req: Request) -> bool:
        """True while the request has media tokens to compute, so that its chunks are checked."""
        return any(req.num_computed < item.offset + item.length for item in req.media)

    def begin_step(self, step: Step) -> None:
        self._tokens_left = self.max_encoder_tokens

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if not req.media:
            return Fit(num_tokens)
        start = self._scheduler.view.start_of(req)
        if (fault := self._fault(req, start)) is not None:
            return Fit(0, fault.fault, OnRefuse.FAIL, code=fault.code)
        # One that was preempted while it awaited content would only do so again.
        starts_again = req.is_waiting and req.history.num_preempted > 0
        if starts_again and self._awaited(req, start, req.num_prompt) is not None:
            return Fit(0, on_refuse=OnRefuse.PARK)
        upto = self._unsplit(start, start + num_tokens, req.media)
        upto = min(upto, self._affordable(req, start, upto))
        if (awaited := self._awaited(req, start, upto)) is not None:
            if awaited <= start:
                return Fit(0, on_refuse=OnRefuse.PARK)
            upto = awaited
        return Fit(max(0, min(num_tokens, upto - start)))

    def seated(self, req: Request, step: Step) -> None:
        if req.media:
            self._part.media[req.slot] = req.media

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        if not req.media:
            return
        upto = req.num_computed
        uses = self._uses.setdefault(req.request_id, {})
        read = list(read_by(req.media, upto - num_tokens, upto))
        read.sort(key=lambda each: each[1].hash not in self.cache)  # else evicted by others
        for index, item in read:
            use = uses.get(index)
            if use is None or use.is_over:
                use = uses[index] = self._use(req, index, step)
            if item.offset + item.length <= upto:
                self._last_reads.setdefault(step.index, []).append(use)
        self._scheduler.watch_again(req)

    def parked(self, req: Request) -> None:
        assert self._arrivals is not None, "without late content no request is parked"
        self._arrivals.park(req)

    def release(self, req: Request) -> None:
        for use in self._uses.pop(req.request_id, {}).values():
            self.cache.end(use)
        if self._arrivals is not None and req.is_finished:
            self._arrivals.release(req)

    def describe(self, plan: StepPlan) -> None:
        part, self._part = self._part, MediaPart()
        part.free = self.cache.take_evicted()
        if part.free or part.media or part.encode:
            plan.media = part

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """End the uses of encoder outputs whose last tokens this step has computed, and discard the
        outputs that failed requests have encoded."""
        for use in self._last_reads.pop(plan.step, ()):
            self.cache.end(use)
        for row, key in self._encoded_in.pop(plan.step, ()):
            if any(int(plan.rows[index]) == row for index in result.errors):
                self.cache.discard(key)
            if self._store is not None:
                self._store.encoded(key)

    def counters(self) -> dict[str, int]:
        return {} if self._store is None else self._store.counters

    # -- helpers

    def _unsplit(self, start: int, upto: int, media: Sequence[MediaItem]) -> int:
        """The last position, at most ``upto``, at which a chunk from ``start`` can end without
        splitting a media item; ``upto`` if items may be split."""
        for item in media if self.whole_media else ():
            if item.offset < upto < item.offset + item.length:
                return max(start, item.offset)
        return upto

    def _affordable(self, req: Request, start: int, upto: int) -> int:
        """Where a chunk [start, upto) must end: before the first media item that does not fit in
        this step's encoder budget or in the cache, or at ``upto`` if all fit."""
        uses = self._uses.get(req.request_id, {})
        found: set[str] = set()
        room, tokens_left = self.cache.num_available, self._tokens_left
        for index, item in read_by(req.media, start, upto):
            is_held = index in uses and not uses[index].is_over
            if is_held or item.hash in found:
                continue
            found.add(item.hash)
            room -= 0 if self.cache.is_used(item.hash) else item.length
            tokens_left -= 0 if item.hash in self.cache else item.length
            if room < 0 or tokens_left < 0:
                return item.offset
        return upto

    def _awaited(self, req: Request, start: int, upto: int) -> int | None:
        """Offset of the first media item with tokens in [start, upto) that must be encoded, and
        whose content has not arrived; ``None`` if all has."""
        if self._arrivals is None:
            return None
        for _, item in read_by(req.media, start, upto):
            if item.hash not in self.cache and item.hash not in self._arrivals:
                return item.offset
        return None

    def _fault(self, req: Request, start: int) -> Arrival | None:
        """Why content that the request needs from position ``start`` on cannot come."""
        if self._arrivals is None or not self._arrivals.has_faults:
            return None
        for _, item in read_by(req.media, start, req.num_prompt):
            if item.hash not in self.cache:
                fault = self._arrivals.fault(req, item.hash)
                if fault is not None:
                    return fault
        return None

    def _use(self, req: Request, index: int, step: Step) -> Use:
        """Start to use the encoder output of the request's media item ``index``. If it is not
        cached, this step encodes it."""
        item = req.media[index]
        if item.hash not in self.cache:
            self._tokens_left -= item.length
            self._part.encode.append((req.slot, index))
            self._encoded_in.setdefault(step.index, []).append((req.row, item.hash))
        return self.cache.use(item)

    def _impossible(self, length: int) -> str | None:
        """Why a media item of ``length`` tokens exceeds a limit, for a message; else ``None``."""
        step_tokens = self._scheduler.config.max_num_batched_tokens
        if length > self.max_encoder_tokens:
            return (
                f"tokens, but at most {self.max_encoder_tokens} can be encoded in a step; raise "
                "max_num_encoder_input_tokens or send the item in a lower resolution"
            )
        if length > self.cache.num_tokens:
            return (
                f"tokens, but the encoder cache holds only {self.cache.num_tokens}; raise "
                "encoder_cache_size or send the item in a lower resolution"
            )
        if self.whole_media and length > step_tokens:
            return (
                f"tokens that must be computed in one step, but max_num_batched_tokens is "
                f"{step_tokens}; raise it or send the item in a lower resolution"
            )
        return None


def read_by(media: Sequence[MediaItem], start: int, upto: int) -> Iterator[tuple[int, MediaItem]]:
    """Index and item of each media item that has tokens at positions [start, upto)."""
    for index, item in enumerate(media):
        if item.offset < upto and start < item.offset + item.length:
            yield index, item
