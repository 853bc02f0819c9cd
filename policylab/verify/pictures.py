"""Media in random cases: the engine's own encoder budget, arrivals and store, with content that
comes late, twice, not at all or as an error, and an encoder that fails.

The hash of a media item is a text. An item whose hash ends with ``BROKEN`` cannot be encoded, one
whose hash ends with ``FLAKY`` only at every other try."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.messages.media import MediaContent, PixelArray
from engine.messages.requests import AddRequest, Finished, MediaItem
from engine.messages.step import MediaPart, NewSeq, StepPlan, StepResult
from engine.mm.arrivals import Arrivals
from engine.mm.decide import EncoderBudget, read_by
from engine.mm.store import PixelStore
from engine.sched.request import Request
from engine.sched.resource import AttachedScheduler, Fit, OnRefuse
from engine.sched.step_state import Step
from policylab.verify.needs import Answers, Need

BROKEN, FLAKY = "!", "?"
DAMAGED = "damaged"
"""The error of content whose arrays are wrong, which the store finds."""


class MediaDevice:
    """The encoder outputs that the worker has, as plans say."""

    def __init__(self, most_tokens: int, cache_tokens: int, store: PixelStore) -> None:
        """most_tokens: encoded in a step; cache_tokens: of all outputs; store: has the content."""
        self.num_encoded = self.num_failed = 0
        self.outputs: dict[str, int] = {}  # hash -> number of tokens
        # Hashes without an output, until the scheduler frees them; True once it knows.
        self.failed: dict[str, bool] = {}
        self._most_tokens, self._cache_tokens = most_tokens, cache_tokens
        self._store = store
        self._seqs: dict[int, NewSeq] = {}  # by worker slot
        self._media: dict[int, Sequence[MediaItem]] = {}  # by worker slot
        self._failed_in: dict[int, list[str]] = {}  # by step
        self._reasons: dict[tuple[int, int], str] = {}  # id of a NewSeq and end of a row

    def planned(self, plan: StepPlan) -> dict[str, str]:
        """Apply a new plan, in the order of the worker. Returns why rows fail, by request id.

        Raises ``AssertionError`` if an item is encoded whose content is not there, or a row reads
        an output that is not there, or a limit is exceeded."""
        for slot in plan.freed_slots:
            self._seqs.pop(slot)
            self._media.pop(slot, None)
        self._seqs |= {new.slot: new for new in plan.new}
        part = MediaPart() if plan.media is None else plan.media
        for key in part.free:
            self.outputs.pop(key, None)
            self.failed.pop(key, None)
        self._media |= part.media
        items = [self._media[slot][index] for slot, index in part.encode]
        num_tokens = sum(item.length for item in items)
        assert num_tokens <= self._most_tokens, f"{num_tokens} tokens of media are encoded"
        for item in items:
            if not self._encode(item):
                self._failed_in.setdefault(plan.step, []).append(item.hash)
        kept = sum(self.outputs.values())
        assert kept <= self._cache_tokens, f"{kept} tokens of encoder outputs are kept"
        return self._read(plan)

    def settled(self, plan: StepPlan) -> None:
        """Note that the scheduler knows which items a plan could not encode."""
        for key in self._failed_in.pop(plan.step, ()):
            if key in self.failed:
                self.failed[key] = True

    def reason(self, new: NewSeq, upto: int) -> str | None:
        """Why the row of a sequence that ends at ``upto`` fails; ``None`` if it does not."""
        return self._reasons.pop((id(new), upto), None)

    def _encode(self, item: MediaItem) -> bool:
        """Encode an item; False if that fails."""
        key = item.hash
        assert key not in self.outputs, f"{key!r} is encoded, but its output is there"
        assert self._store.get(key) is not None, f"{key!r} is encoded before its content is there"
        self.num_encoded += 1
        if key.endswith(BROKEN) or (key.endswith(FLAKY) and self.num_encoded % 2):
            self.num_failed += 1
            self.failed[key] = False
        else:
            self.failed.pop(key, None)
            self.outputs[key] = item.length
        return key in self.outputs

    def _read(self, plan: StepPlan) -> dict[str, str]:
        failed: dict[str, str] = {}
        columns = (plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist())
        for slot, start, count in zip(*columns, strict=True):
            for _, item in read_by(self._media.get(slot, ()), start, start + count):
                if item.hash in self.outputs:
                    continue
                new = self._seqs[slot]
                assert not self.failed.get(item.hash, True), (
                    f"{new.request_id} computes tokens of {item.hash!r} without its output"
                )
                why = failed[new.request_id] = f"{item.hash!r} cannot be encoded"
                self._reasons[id(new), start + count] = why
        return failed


class Pictures(EncoderBudget, Need):
    """The engine's encoder budget of ``amount`` tokens a step, whose content comes by ``bring``."""

    name = "pictures"

    def __init__(
        self, amount: int, answers: Answers, *, cache_size: int, whole_media: bool
    ) -> None:
        Need.__init__(self, amount, answers)
        self.store = PixelStore()
        self.arrivals = Arrivals(self.store.drop)
        EncoderBudget.__init__(
            self, amount, cache_size, whole_media=whole_media, arrivals=self.arrivals
        )
        self.device = MediaDevice(amount, cache_size, self.store)
        self._errors: dict[str, dict[str, str]] = {}  # request id -> message -> code
        self._to_come: dict[str, set[str]] = {}  # request id -> hashes, of unfinished requests

    def attach(self, scheduler: AttachedScheduler) -> None:
        Need.attach(self, scheduler)
        EncoderBudget.attach(self, scheduler)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        answer = super().fit(req, num_tokens, step)
        self.num_refusals += answer.num_tokens < num_tokens
        if answer.on_refuse is OnRefuse.FAIL:
            keys = {item.hash for item in req.media if item.hash not in self.cache}
            assert any(key not in self.arrivals for key in keys), f"all media of {req} are there"
        return answer

    def added(self, req: Request) -> None:
        super().added(req)
        self._errors[req.request_id] = {}
        self._to_come[req.request_id] = {item.hash for item in req.media}

    def release(self, req: Request) -> None:
        super().release(req)
        if req.is_finished:
            self._to_come.pop(req.request_id, None)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        super().settle(plan, result)
        self.device.settled(plan)

    # -- events

    def bring(self, key: str, request_ids: list[str], error: str = "") -> None:
        """Content arrives for these requests, or the ``error`` that is why it cannot come."""
        content = MediaContent(key, {"pixels": PixelArray("|u1", [2], b"\0\0")})
        if error == DAMAGED:
            content = MediaContent(key, {"pixels": PixelArray("|u1", [3], b"\0\0")})
        elif error:
            content = MediaContent(key, error=error)
        arrival = self.store.take(request_ids, content)
        for request_id in request_ids:
            self._to_come.get(request_id, set()).discard(key)
            if arrival.fault and request_id in self._errors:
                self._errors[request_id][arrival.fault] = arrival.code
        self.scheduler.arrived(arrival)

    def bring_next(self) -> bool:
        """Bring content for which an unfinished request still waits, if there is any."""
        for request_id, keys in self._to_come.items():
            for key in sorted(keys):
                self.bring(key, [request_id])
                return True
        return False

    def planned(self, plan: StepPlan) -> None:
        """Apply a new plan to the encoder outputs of the worker."""
        for request_id, why in self.device.planned(plan).items():
            self._errors[request_id][why] = "request_failed"
        known = self.device.outputs.keys() | self.device.failed.keys()
        assert self.cache.entries.keys() == known, (
            f"pictures: {list(self.cache.entries)} are cached, the worker has {known}"
        )

    # -- checks

    def can_serve(self, add: AddRequest) -> bool:
        """True if no media item of the request exceeds a limit."""
        limits = [self.amount, self.cache.num_tokens]
        if self.whole_media:
            limits.append(self.scheduler.config.max_num_batched_tokens)
        return all(item.length <= min(limits) for item in add.media)

    def may_fail(self, request_id: str, end: Finished) -> bool:
        """True if the request may end so: with the error of content that came for it, or of an item
        that could not be encoded when it was computed."""
        return self._errors[request_id].get(end.message, "none") == end.code

    def check(self, running: Iterable[Request]) -> None:
        alive = {req.request_id for req in running}
        cache, here = self.cache, self.store
        assert self._uses.keys() <= alive, f"pictures: {list(self._uses)} use outputs"
        uses = {use for each in self._uses.values() for use in each.values() if not use.is_over}
        kept = {use for entry in cache.entries.values() for use in entry.uses}
        assert uses == kept, f"pictures: {kept - uses} are used, but not by running requests"
        used = sum(entry.num_tokens for entry in cache.entries.values() if entry.uses)
        total = sum(entry.num_tokens for entry in cache.entries.values())
        assert used == cache.num_used, f"pictures: {cache.num_used} tokens are used, not {used}"
        assert total <= cache.num_tokens, f"pictures: {total} tokens of outputs are cached"
        wanted = {key for key in self.needed() if key in self.arrivals}
        assert len(here) == len(wanted), f"pictures: {len(here)} contents are kept for {wanted}"
        lost = [key for key in wanted if here.get(key) is None]
        assert not lost, f"pictures: the contents of {lost} are lost"

    def needed(self) -> set[str]:
        """Hashes of the media of unfinished requests."""
        roster = self.scheduler.roster
        return {item.hash for req in roster.by_id.values() for item in req.media}

    @property
    def counts(self) -> tuple[int, int]:
        """Items that were encoded, and those of them that failed."""
        return self.device.num_encoded, self.device.num_failed

    def check_over(self) -> None:
        """Check that nothing is kept of ended requests but idle outputs."""
        kept = {**vars(self.arrivals), "uses": self._uses, "to come": self._to_come}
        kept |= {"last reads": self._last_reads, "encoded in": self._encoded_in}
        kept |= {"contents": len(self.store), "tokens in use": self.cache.num_used}
        kept.pop("_drop")
        left = {name: value for name, value in kept.items() if value}
        assert not left, f"pictures: kept of ended requests: {left}"
