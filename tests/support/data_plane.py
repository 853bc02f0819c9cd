"""Fake data planes: what workers do with the parts of a plan, and what goes wrong if one is wrong.

Every half here trusts only what it is told through plans and reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from engine.config.kv_groups import Group
from engine.config.sched import SchedulerConfig
from engine.kv.manager import KVManager
from engine.kv_transfer.tiers import Tiers
from engine.messages.requests import AddRequest, MediaItem
from engine.messages.step import (
    NO_ADAPTER,
    DraftPart,
    MaskPart,
    Masks,
    NewSeq,
    StepPlan,
    StepResult,
)
from engine.sched.policies import POLICIES
from engine.sched.resource import Resource
from engine.sched.scheduler import Scheduler
from engine.states.decide import StateSnapshots
from policylab.verify.fake import DigestWorker, LateWorker, mix, token_after
from policylab.verify.tiers import FakeCopies
from support.simulate import Run

# -- what the model would see and say


def seen(tokens: list[int], adapter: str | None, media: list[MediaItem]) -> list[int]:
    """What is at each position: tokens, parts of media, and the adapter with the first."""
    content = list(tokens)
    for item in media:
        for place in range(item.length):
            content[item.offset + place] = crc32(f"{item.hash}/{place}".encode())
    if adapter is not None:
        content[0] = mix(content[0], crc32(adapter.encode()))
    return content


def answer(request: AddRequest, num_tokens: int | None = None) -> list[int]:
    """What the fake model says to this request."""
    content = seen(request.prompt_token_ids, request.adapter, request.media)
    num_prompt = len(content)
    for _ in range(request.max_tokens if num_tokens is None else num_tokens):
        content.append(token_after(content))
    return content[num_prompt:]


def guess(tokens: list[int], num_right: int, num_drafts: int) -> list[int]:
    """Drafts of which so many are right."""
    tokens = list(tokens)
    start = len(tokens)
    for place in range(num_drafts):
        tokens.append((token_after(tokens) + (place >= num_right)) % 1000)
    return tokens[start:]


class RightDrafts:
    """A proposer whose drafts are all right."""

    def propose(self, req, num_tokens):
        return guess(req.tokens.tolist(), num_tokens, num_tokens)

    def release(self, req):
        pass


# -- adapters and encoders: the worker


class FeatureWorker(DigestWorker):
    """Loads adapters, encodes media, verifies and proposes drafts, as its plans say.

    ``propose(tokens)`` guesses what follows. ``cache_size`` bounds the encoder outputs, in tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        propose: Callable[[list[int]], list[int]] | None = None,
        cache_size: int = 1 << 30,
        **options,
    ) -> None:
        super().__init__(num_blocks, block_size, content=self.content, **options)
        self.propose = propose
        if propose is not None:
            self.capabilities = self.capabilities | {"proposals"}
        self.cache_size = cache_size
        self.loaded: dict[int, str] = {}  # adapter slot -> adapter
        self.adapter_slots: dict[int, int] = {}  # worker slot -> adapter slot
        self.adapters: dict[int, str] = {}  # worker slot -> the adapter it began with
        self.media: dict[int, list[MediaItem]] = {}
        self.encoded: dict[str, int] = {}  # hash -> tokens
        self.freed: list[str] = []
        self.num_encoded = 0

    def content(self, new: NewSeq) -> list[int]:
        return seen(new.token_ids, self.adapters.get(new.slot), self.media.get(new.slot, []))

    def draw(self, rows, masks, result: StepResult) -> None:
        super().draw(rows, masks, result)
        if self.propose is not None:
            drafts = [
                self.propose(row.work.seq.tokens) if count else []
                for row, count in zip(rows, result.counts.tolist(), strict=True)
            ]
            result.drafts = DraftPart(
                np.array([len(row) for row in drafts], dtype=np.int32),
                np.array([token for row in drafts for token in row], dtype=np.int32),
            )

    def apply(self, plan: StepPlan) -> None:
        part, encoder = plan.adapters, plan.media
        for new in plan.new:
            self.adapters.pop(new.slot, None)
            self.media.pop(new.slot, None)
        if part is not None:
            self.loaded |= part.load
            self.adapter_slots |= part.used_by
            for slot, index in part.used_by.items():
                if index != NO_ADAPTER:
                    self.adapters[slot] = self.loaded[index]
        if encoder is not None:
            for key in encoder.free:
                del self.encoded[key]
                self.freed.append(key)
            self.media |= encoder.media
            for slot, index in encoder.encode:
                item = self.media[slot][index]
                assert item.hash not in self.encoded, f"{item} is encoded twice"
                self.encoded[item.hash] = item.length
                self.num_encoded += item.length
            assert sum(self.encoded.values()) <= self.cache_size, "the encoder cache overflows"
        super().apply(plan)
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            self._check_row(int(slot), int(start), int(start + count))

    def _check_row(self, slot: int, start: int, upto: int) -> None:
        if slot in self.adapters:
            assert self.loaded[self.adapter_slots[slot]] == self.adapters[slot], "wrong adapter"
        for item in self.media.get(slot, ()):
            if item.offset < upto and start < item.offset + item.length:
                assert item.hash in self.encoded, f"{item} is read and not there"


class LateFeatureWorker(FeatureWorker, LateWorker):
    """Computes when a result is collected, while loads go on."""


# -- grammars


class OneAnswer:
    """A matcher that allows one sequence of tokens and nothing else."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = list(tokens)

    def num_allowed(self, tokens) -> int:
        for index, (token, right) in enumerate(zip(tokens, self.tokens, strict=False)):
            if token != right:
                return index
        return min(len(tokens), len(self.tokens))

    def advance(self, tokens) -> None:
        assert self.num_allowed(tokens) == len(tokens), "advanced by what is not allowed"
        del self.tokens[: len(tokens)]

    def fill(self, masks, drafts) -> None:
        for place in range(min(len(masks), len(self.tokens))):
            token = self.tokens[place]
            masks[place, token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
            if place == len(drafts) or drafts[place] != token:
                return


@dataclass
class Compiling:
    """Ready at the ``polls``-th look, or found to be wrong then."""

    matcher: object
    polls: int
    error: str = ""

    def poll(self):
        self.polls -= 1
        if self.polls > 0:
            return None
        if self.error:
            raise ValueError(self.error)
        return self.matcher


class Compiler:
    """``grammars``: by name, what each stands for; made anew for each request."""

    def __init__(self, grammars: dict[str, Callable[[], Compiling]]) -> None:
        self.grammars = grammars
        self.num_submitted = 0

    def submit(self, grammar: str, eos_token_ids) -> Compiling:
        self.num_submitted += 1
        return self.grammars[grammar]()


class EvenTokens(Resource):
    """What requests with the grammar "even" put out is even: a mask for every token drawn of them.

    It knows nothing but the plan, so its rows may be in several steps at a time.
    """

    name = "even tokens"
    needs = ("masks",)
    words = np.packbits(np.arange(1024) % 2 == 0, bitorder="little").view(np.int32)
    words[1000 // 32 :] &= (1 << 1000 % 32) - 1  # of a vocabulary of 1000

    def attach(self, scheduler) -> None:
        self._by_row = scheduler.roster

    def watches(self, req) -> bool:
        return False

    def describe(self, plan: StepPlan) -> None:
        rows = [
            index
            for index, row in enumerate(plan.rows.tolist())
            if self._by_row.by_row[row].add.grammar == "even" and plan.samples[index]
        ]
        if rows:
            plan.masks = MaskPart(np.array(rows, dtype=np.int32))

    def masks(self, plan: StepPlan) -> Masks:
        rows = plan.masks.rows
        drafts = 0 if plan.drafts is None else int(plan.drafts.counts[rows].sum())
        return Masks(np.tile(self.words, len(rows) + drafts), len(self.words))


# -- all together


def kept_by(resource: Resource) -> dict[str, object]:
    """What a resource has in its containers, by name of the attribute, but for empty ones."""
    own = vars(resource).items()
    return {name: each for name, each in own if isinstance(each, dict | set | list) and each}


@dataclass
class FeatureRun(Run):
    """A run whose loads go on with time, whether steps are in flight or not."""

    stores: FakeCopies | None = None

    def step(self) -> bool:
        has_stepped = super().step()
        if not has_stepped:
            self.read(self.scheduler.take_outputs())
        if self.stores is not None:
            self.stores.tick()
            for report in self.stores.take_reports():
                self.scheduler.transferred(report)
        return has_stepped

    def wait(self, limit: int = 2000) -> None:
        """Step until nobody is left, parked ones included, and everything is back."""
        scheduler = self.scheduler
        for _ in range(limit):
            self.step()
            if not (scheduler.has_requests() or self.flight or scheduler.is_transferring):
                break
        self.drain()


def tiers_of(stores: FakeCopies, cls: type[Tiers] = Tiers, **options) -> Tiers:
    """The resource for these stores, from which loading is always faster than computing."""
    return cls(stores, 1, speeds=[1e12] * len(stores.names), **options)


def use_stores(worker: FeatureWorker, stores: FakeCopies) -> None:
    """Let the worker carry out orders to stores."""
    stores.kv = worker.kv
    worker.carry_out, worker.begin_loads = stores.carry_out, stores.begin_loads


def make_feature_run(  # noqa: PLR0913
    *,
    depth: int = 1,
    resources=(),
    propose=None,
    stores: FakeCopies | None = None,
    cache_size: int = 1 << 30,
    num_drafts: int = 0,
    windows=(0,),
    worker=None,
    late: bool = False,
    **options,
) -> FeatureRun:
    """A run with these resources and the data planes they need, or with a ``worker`` elsewhere.
    ``late``: steps are computed when their results are collected. ``stores``: those of a resource
    for KV tiers, if it is not among the ``resources``."""
    kv = KVManager(
        options.pop("num_blocks", 1000),
        options.pop("block_size", 16),
        enable_prefix_caching=options.pop("caching", True),
        groups=[Group(window=window) for window in windows],
    )
    resources = list(resources)
    if stores is not None and not any(isinstance(each, Tiers) for each in resources):
        resources.append(tiers_of(stores))
    if snapshot_blocks := options.pop("snapshot_blocks", 0):
        kv.keep_states(snapshot_blocks)
        resources.append(StateSnapshots())
    policy, clock = options.pop("policy", "fcfs"), options.pop("clock", float)
    policy = POLICIES[policy]() if isinstance(policy, str) else policy
    extra = {"fail": options.pop("fail")} if "fail" in options else {}
    config = {"max_num_batched_tokens": 1024, "max_num_seqs": 16, "max_model_len": 2048, **options}
    scheduler = Scheduler(SchedulerConfig(**config), kv, policy, clock=clock, resources=resources)
    worker = worker or (LateFeatureWorker if late else FeatureWorker)(
        kv.num_blocks,
        kv.block_size,
        propose=propose,
        cache_size=cache_size,
        windows=windows,
        **extra,
    )
    run = FeatureRun(scheduler, worker, depth, num_drafts=num_drafts)
    if stores is not None:
        run.stores = stores
        if isinstance(worker, FeatureWorker):
            use_stores(worker, stores)
    return run
