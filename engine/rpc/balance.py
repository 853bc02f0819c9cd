"""Balancer: chooses a core for each request, by cached prefix and load.

Each core reports which blocks its prefix cache has and how much work other front ends have given it
(``CacheNews``). The front end hashes a prompt as the cores do, so it knows how many of its tokens
each core would have to compute. Blocks of its own unfinished requests count as cached, so requests
with equal prompts that arrive together go to the same core. A request goes where the fewest tokens
must be computed: those that it waits for, and its own. If several cores are equal, it goes where
the fewest blocks were stored lately, and so the fewest are evicted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from engine.kv.changes import block_ids
from engine.kv.prefix_index import BlockHasher, Chains, PlainContent, Sha256Hasher
from engine.messages.requests import AddRequest
from engine.messages.wire import CacheNews
from engine.rpc.work import Work
from engine.sched.request import as_array

PRICE = 2.0  # of a token to compute: the request waits for it, and others after it
MEMORY = 2.0  # a core's stored blocks are forgotten after this many times its cache


class Placed(NamedTuple):
    """An unfinished request: its core, the ids of its prompt's blocks, and how many tokens of the
    prompt its core lacked."""

    core: int
    ids: list[int]
    num_lacking: int


@dataclass(slots=True)
class CoreView:
    """What is known about a core."""

    own: Work = field(default_factory=Work)
    """The work of this front end's unfinished requests."""
    others: int = 0
    """Tokens that those of other front ends have yet to compute, as the core reported it."""
    cached: set[int] = field(default_factory=set)
    """Ids of the blocks in its prefix cache."""
    coming: dict[int, int] = field(default_factory=dict)
    """Ids of the blocks in prompts of unfinished requests, with the number of these requests."""
    secret: bytes = b""
    has_cache: bool = True
    num_stored: float = 0.0
    """Blocks that its cache has stored lately: where many are stored, many are evicted."""

    @property
    def load(self) -> int:
        return self.own.load + self.others

    def num_known(self, ids: Sequence[int]) -> int:
        """How many of the first blocks it has or will have."""
        cached, coming = self.cached, self.coming
        num = 0
        for each in ids:
            if each not in cached and each not in coming:
                break
            num += 1
        return num


class Balancer:
    """Chooses one of ``num_cores`` cores for each request. Call ``end`` when a request ends.

    Memory: an integer for each block in the caches and in the prompts of unfinished requests."""

    def __init__(self, num_cores: int, block_size: int) -> None:
        self.adapters: dict[str, str] = {}
        """Digests of LoRA adapters by name, as far as they are known: prompts share nothing with
        those of a name's earlier versions."""
        self._block_size = block_size
        self._cores = [CoreView() for _ in range(num_cores)]
        self._placed: dict[str, Placed] = {}  # by request id
        self._here = list(range(num_cores))  # cores that can be chosen
        self._chains: dict[bytes, Chains] = {}  # by secret

    @property
    def loads(self) -> list[int]:
        """Tokens that the unfinished requests of each core have yet to compute, at most."""
        return [core.load for core in self._cores]

    @property
    def num_coming(self) -> int:
        """Blocks of prompts of unfinished requests."""
        return sum(len(core.coming) for core in self._cores)

    def cached(self, core: int) -> frozenset[int]:
        """Ids of the blocks that a core has in its prefix cache, as far as it has reported."""
        return frozenset(self._cores[core].cached)

    @property
    def here(self) -> Sequence[int]:
        """The cores that can be chosen."""
        return self._here

    def choose(self, request: AddRequest, among: Sequence[int] | None = None) -> int:
        """Choose the core for a request, and add the request to that core's work. among: the cores
        to choose from; ``None``: all that can be chosen."""
        ids = self._ids(request)
        num_prompt = len(request.prompt_token_ids)
        best, num_cached, lowest = 0, 0, (inf, inf)
        for index in self._here if among is None else among:
            core = self._cores[index]
            known = min(core.num_known(ids[core.secret]) * self._block_size, num_prompt - 1)
            price = (core.load + PRICE * (num_prompt - known), core.num_stored)
            if price < lowest:
                best, num_cached, lowest = index, known, price
        core = self._cores[best]
        core.own.add(request, num_cached)
        placed = Placed(best, ids[core.secret], num_prompt - num_cached)
        self._placed[request.request_id] = placed
        for each in placed.ids:
            core.coming[each] = core.coming.get(each, 0) + 1
        return best

    def placed(self, request_id: str) -> Placed | None:
        """Where an unfinished request is."""
        return self._placed.get(request_id)

    def set_apart(self, request_id: str) -> None:
        """Record that another core computes the prompt of an unfinished request: it is no work for
        its own core, and later requests do not find its blocks there yet."""
        placed = self._placed[request_id]
        self._forget_coming(placed)
        self._placed[request_id] = placed._replace(ids=[])
        self._cores[placed.core].own.start(request_id)

    def core_of(self, request_id: str) -> int | None:
        """The core of an unfinished request, or None."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.core

    def start(self, request_id: str) -> None:
        """Record that the prompt of a request has been computed; unknown ids are ignored."""
        placed = self._placed.get(request_id)
        if placed is not None:
            self._cores[placed.core].own.start(request_id)

    def end(self, request_id: str) -> None:
        """Remove a request that has ended or was not accepted; unknown ids are ignored."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return
        self._cores[placed.core].own.end(request_id)
        self._forget_coming(placed)

    def _forget_coming(self, placed: Placed) -> None:
        coming = self._cores[placed.core].coming
        for each in placed.ids:
            num = coming[each] - 1
            if num:
                coming[each] = num
            else:
                del coming[each]

    def update(self, core: int, news: CacheNews) -> None:
        """Record what a core has reported. Messages of a core must come in their order."""
        view = self._cores[core]
        view.others, view.has_cache = news.load, news.has_cache
        self.adapters.update(news.adapters)
        if news.is_whole:
            view.cached.clear()
            view.secret = news.secret
        view.cached.difference_update(_numbers(news.removed))
        stored = _numbers(news.stored)
        view.cached.update(stored)
        view.num_stored += len(stored)
        if view.num_stored > MEMORY * max(len(view.cached), 1):
            for each in self._cores:
                each.num_stored /= 2

    def remove(self, core: int) -> list[str]:
        """Exclude a core that has died, and forget it. Returns the ids of its unfinished
        requests."""
        self._here.remove(core)
        names = [name for name, placed in self._placed.items() if placed.core == core]
        for name in names:
            self.end(name)
        self._chains.pop(self._cores[core].secret, None)  # others with it make it anew
        self._cores[core] = CoreView()
        return names

    def restore(self, core: int) -> None:
        """Include a core that was restarted and has nothing cached."""
        self._here.append(core)

    def _ids(self, request: AddRequest) -> dict[bytes, list[int]]:
        """Ids of the prompt's full blocks, by the secret of the cores' hash; one entry unless cores
        have different secrets."""
        secrets = {self._cores[index].secret for index in self._here}
        nothing: dict[bytes, list[int]] = {secret: [] for secret in secrets}
        if not any(self._cores[index].has_cache for index in self._here):
            return nothing
        try:
            tokens = as_array(request.prompt_token_ids)
        except struct.error:  # no token id, as the core will say
            return nothing
        adapter = request.adapter
        if adapter is not None:
            adapter = self.adapters.get(adapter, adapter)
        content = PlainContent(tokens, request.cache_salt, adapter, request.media)
        ids = {}
        for secret in secrets:
            chain: list[bytes] = []
            self._chains_of(secret).extend(chain, content, len(tokens))
            ids[secret] = _numbers(block_ids(chain))
        return ids

    def _chains_of(self, secret: bytes) -> Chains:
        if secret not in self._chains:
            self._chains[secret] = Chains(_hasher(secret), self._block_size)
        return self._chains[secret]


def _hasher(secret: bytes) -> BlockHasher:
    if not secret:
        return Sha256Hasher()
    from engine.kv.fast_hash import FastHasher  # imports Numba

    return FastHasher.of_secret(secret)


def _numbers(ids: bytes) -> list[int]:
    """The ids of blocks as integers."""
    return memoryview(ids).cast("Q").tolist()
