"""Balancer: chooses a core for each request, by cached prefix and load.

The decision depends only on which requests were sent to which core. A prompt goes to the core that
has received the longest prefix of it before, unless this core has much more work than the others;
then it goes to the core with the least work. (Like SGLang's cache-aware router.)
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.messages.requests import AddRequest

MAX_REMEMBERED = 100_000
MAX_LEAD = 1.5  # a core with the prefix may have this many times the work of the least loaded core
MIN_LEAD_TOKENS = 2048  # smaller differences in work are ignored


class Balancer:
    """Chooses one of ``num_cores`` cores for each request. Call ``end`` when a request ends.

    ``max_remembered``: number of prompt blocks to remember; the oldest are dropped first.
    """

    def __init__(
        self, num_cores: int, block_size: int, *, max_remembered: int = MAX_REMEMBERED
    ) -> None:
        self.loads = [0] * num_cores
        """Tokens of each core's unfinished requests: prompts, plus the longest possible outputs."""
        self.adapters: dict[str, str] = {}
        """Digests of LoRA adapters by name, as far as they are known: prompts share nothing with
        those of a name's earlier versions."""
        self._block_size = block_size
        self._max_remembered = max_remembered
        self._seen: dict[int, int] = {}  # hash of a prompt prefix -> the last core it was sent to
        self._placed: dict[str, tuple[int, int]] = {}  # request id -> core, number of tokens
        self._here = list(range(num_cores))  # cores that can be chosen

    def choose(self, request: AddRequest) -> int:
        """Choose the core for a request, and add the request to that core's work."""
        beginnings = list(self._beginnings(request))
        core = self._fair(beginnings)
        num_tokens = len(request.prompt_token_ids) + request.max_tokens
        self.loads[core] += num_tokens
        self._placed[request.request_id] = (core, num_tokens)
        self._remember(beginnings, core)
        return core

    def core_of(self, request_id: str) -> int | None:
        """The core of an unfinished request, or None."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed[0]

    def end(self, request_id: str) -> None:
        """Remove a request that has ended or was not accepted; unknown ids are ignored."""
        core, num_tokens = self._placed.pop(request_id, (0, 0))
        self.loads[core] -= num_tokens

    def remove(self, core: int) -> list[str]:
        """Exclude a core that has died. Returns the ids of its unfinished requests."""
        self._here.remove(core)
        names = [name for name, (place, _) in self._placed.items() if place == core]
        for name in names:
            self.end(name)
        return names

    def restore(self, core: int) -> None:
        """Include a core that was restarted and has nothing cached."""
        self._here.append(core)
        self._seen = {each: place for each, place in self._seen.items() if place != core}

    def _fair(self, beginnings: list[int]) -> int:
        """The core that has received the longest prefix of this prompt and is not too busy; else
        the one with the least work. ``beginnings``: hashes of the prompt's prefixes."""
        least = min(self.loads[core] for core in self._here)
        limit = max(MAX_LEAD * least, least + MIN_LEAD_TOKENS)
        for beginning in reversed(beginnings):
            core = self._seen.get(beginning)
            if core in self._here and self.loads[core] <= limit:
                return core
        return next(core for core in self._here if self.loads[core] == least)

    def _beginnings(self, request: AddRequest) -> Iterator[int]:
        """Hashes of the prompt's prefixes of 1, 2, 3, ... whole blocks."""
        tokens, size = request.prompt_token_ids, self._block_size
        adapter = request.adapter
        if adapter is not None:
            adapter = self.adapters.get(adapter, adapter)
        digest = hash((request.cache_salt, adapter))
        for end in range(size, len(tokens) + 1, size):
            digest = hash((digest, *tokens[end - size : end]))
            yield digest

    def _remember(self, beginnings: list[int], core: int) -> None:
        for beginning in beginnings:
            self._seen.pop(beginning, None)  # to make it the newest entry
            self._seen[beginning] = core
        while len(self._seen) > self._max_remembered:
            del self._seen[next(iter(self._seen))]
