"""Explains why prefix hits end where they do. Nothing here runs while requests decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.config.kv_groups import Group
from engine.kv.block_pool import PrefixCache
from engine.kv.evictions import LEAST_KEPT, MOST_KEPT, Latest
from engine.kv.prefix_index import Chains, Content, PlainContent, group_keys
from engine.kv.tables import WHOLE, PrefixEnd

NEVER_SEEN = "never seen"
EVICTED = "evicted"
OTHER_SALT = "another cache salt"
OTHER_ADAPTER = "another adapter"
OTHER_MEDIA = "other media"
WINDOW_GONE = "window gone"
NO_SNAPSHOT = "no snapshot there"
CACHING_OFF = "prefix caching off"
NOT_READ = "every token wanted"  # prompt log-probabilities, results by token
MOST_VARIANTS = 4  # remembered blocks of equal tokens


NEVER = PrefixEnd(NEVER_SEEN)


class Variant(NamedTuple):
    """A cached block's hash, with the salt and the adapter of its request."""

    block_hash: bytes
    cache_salt: str | None
    adapter: str | None


def is_bare(content: Content) -> bool:
    """True for a request without salt, adapter and media."""
    return content.cache_salt is None and content.adapter is None and not content.media


class PrefixEnds:
    """Explains why a request's prefix cache hit ends where it does.

    To find blocks with the same tokens but another salt, adapter or media, each block is also
    recorded by a hash of its tokens alone."""

    def __init__(self, cache: PrefixCache, groups: Sequence[Group], chains: Chains) -> None:
        self._cache = cache
        self._groups = tuple(groups)
        self._full = [g for g, group in enumerate(groups) if not group.window]
        self._chains = chains
        num_kept = min(max(len(cache.hashes), LEAST_KEPT), MOST_KEPT)
        self._has_variants = False
        self._variants: Latest[Sequence[Variant]] = Latest(num_kept)  # by hash of tokens alone

    def explain(
        self, content: Content, chain: Sequence[bytes], num_found: int, num_blocks: int
    ) -> PrefixEnd:
        """The reason why only the first ``num_found`` blocks of ``chain`` were found in the cache.
        ``chain``: the hashes of the request's blocks, of which the first ``num_blocks`` were looked
        up."""
        if not self._has_variants and is_bare(content):
            return WHOLE if num_found >= num_blocks else self._lost(chain, num_found) or NEVER
        chain = chain[:num_blocks]
        bare = self._without_extras(content, chain)
        end = WHOLE
        if num_found < len(chain):
            end = self._lost(chain, num_found) or self._elsewhere(
                content, chain[num_found], bare[num_found]
            )
        if bare is not chain:
            self._remember(content, chain, bare)
        return end

    def _without_extras(self, content: Content, chain: Sequence[bytes]) -> Sequence[bytes]:
        """The hashes that the blocks of ``chain`` would have without salt, adapter and media."""
        if is_bare(content):
            return chain
        bare: list[bytes] = []
        self._chains.extend(
            bare, PlainContent(content.tokens), len(chain) * self._chains.block_size
        )
        return bare

    def _lost(self, chain: Sequence[bytes], num_found: int) -> PrefixEnd | None:
        """Return the reason if the block after the prefix hit was evicted, otherwise ``None``."""
        cache, next_block = self._cache, chain[num_found : num_found + 1]
        if len(self._groups) == 1:
            age = cache.evictions.age(next_block[0])
            return None if age is None else PrefixEnd(EVICTED, age)
        keys = [group_keys(next_block, g)[0] for g in range(len(self._groups))]
        missing = [key for key in keys if cache.find(key) is None]
        gone = [key for key in missing if not self._full or keys.index(key) in self._full]
        if gone and (self._full or len(gone) == len(keys)):
            age = cache.evictions.age(gone[0])
            return None if age is None else PrefixEnd(EVICTED, age)
        return PrefixEnd(WINDOW_GONE, self._age_of_windows(chain, num_found))

    def _age_of_windows(self, chain: Sequence[bytes], num_found: int) -> float | None:
        """Seconds since the eviction of the oldest evicted block that layers with sliding windows
        would need for a hit of ``num_found + 1`` blocks; ``None`` if unknown."""
        ages, size = [], self._chains.block_size
        for g, group in enumerate(self._groups):
            if group.window:
                first = group.first_needed((num_found + 1) * size, size)
                keys = group_keys(chain[first : num_found + 1], g)
                lost = [key for key in keys if self._cache.find(key) is None]
                ages += [self._cache.evictions.age(key) for key in lost]
        return max((age for age in ages if age is not None), default=None)

    def _elsewhere(self, content: Content, block_hash: bytes, bare_hash: bytes) -> PrefixEnd:
        """Explain why a block that was not evicted is not cached: its tokens were never seen, or
        are cached with another salt, adapter or media."""
        known = [*self._variants.get(bare_hash, ())]
        if bare_hash != block_hash:
            known.append(Variant(bare_hash, None, None))
        places = [
            REASONS.index(_difference(content, other))
            for other in known
            if other.block_hash != block_hash and self._cache.find(other.block_hash) is not None
        ]
        return PrefixEnd(REASONS[min(places)]) if places else NEVER

    def _remember(self, content: Content, chain: Sequence[bytes], bare: Sequence[bytes]) -> None:
        """Record the hashes of a request's blocks with and without salt, adapter and media."""
        self._has_variants = True
        for block_hash, bare_hash in zip(chain, bare, strict=True):
            if block_hash != bare_hash:
                known = self._variants.get(bare_hash, ())
                others = [each for each in known if each.block_hash != block_hash]
                variant = Variant(block_hash, content.cache_salt, content.adapter)
                self._variants.put(bare_hash, (variant, *others[: MOST_VARIANTS - 1]))


REASONS = (OTHER_MEDIA, OTHER_ADAPTER, OTHER_SALT)  # the smallest difference first


def _difference(content: Content, other: Variant) -> str:
    """The reason why a request cannot use a block that has the same tokens."""
    if content.cache_salt != other.cache_salt:
        return OTHER_SALT
    return OTHER_ADAPTER if content.adapter != other.adapter else OTHER_MEDIA
