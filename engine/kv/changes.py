"""CacheChanges: what the prefix cache has gained and lost, for clients that choose between cores.

A block is identified by its id: the first eight bytes of its hash as an integer. Two blocks with
the same id are improbable, and would only send a request to another core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv.block_pool import PrefixCache

ID_BYTES = 8


def block_ids(hashes: Iterable[bytes]) -> bytes:
    """The ids of blocks, given their hashes: eight bytes each, little-endian."""
    return b"".join([each[:ID_BYTES] for each in hashes])


class CacheChanges:
    """Collects the blocks that enter or leave a prefix cache.

    Only blocks of one ``group`` of layers are reported; their keys end with the group's number,
    unless that is 0. ``hash_bytes``: length of a hash. ``secret``: what another process needs for
    equal hashes."""

    def __init__(
        self, cache: PrefixCache, hash_bytes: int, *, secret: bytes = b"", group: int = 0
    ) -> None:
        self.secret = secret
        self._cache = cache
        self._key_bytes = hash_bytes + (group > 0)
        self._suffix = bytes([group]) if group else b""
        self._is_in: dict[bytes, bool] = {}  # by key: whether the block has entered or left
        self._is_cleared = False

    def __bool__(self) -> bool:
        """True if there are changes to take."""
        return self._is_cleared or bool(self._is_in)

    def published(self, keys: Sequence[bytes], blocks: Sequence[int] = ()) -> None:
        """Called for cache keys that are now cached; some may have been before."""
        self._is_in.update(dict.fromkeys(keys, True))

    def lost(self, keys: Iterable[bytes]) -> None:
        """Called for cache keys that are no longer cached."""
        self._is_in.update(dict.fromkeys(keys, False))

    def withdrawn(self, keys: Iterable[bytes]) -> None:
        """Called for keys whose content is wrong; those that were cached are lost as well."""

    def cleared(self) -> None:
        """Called when the cache has been emptied."""
        self._is_in.clear()
        self._is_cleared = True

    def take(self) -> tuple[bool, bytes, bytes]:
        """Return what changed since the last call: whether the cache was emptied, and the ids of
        blocks that were stored since then and of blocks that were removed."""
        is_cleared, self._is_cleared = self._is_cleared, False
        changed, self._is_in = self._is_in, {}
        stored = block_ids(key for key in self._mine(changed) if changed[key])
        removed = block_ids(key for key in self._mine(changed) if not changed[key])
        return is_cleared, stored, b"" if is_cleared else removed

    def whole(self) -> bytes:
        """The ids of all blocks that are cached now, including changes that were not taken yet."""
        return block_ids(self._mine(self._cache.keys()))

    def stop(self) -> None:
        """Collect nothing any more."""
        if self in self._cache.followers:
            self._cache.followers.remove(self)

    def _mine(self, keys: Iterable[bytes]) -> Iterable[bytes]:
        size, suffix = self._key_bytes, self._suffix
        return (key for key in keys if len(key) == size and key.endswith(suffix))
