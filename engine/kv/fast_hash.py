"""A fast keyed block hash, compiled with Numba. Imported only if configured.

SipHash-2-4 with 128-bit digests (Aumasson and Bernstein 2012): a pseudorandom function made for
inputs chosen by untrusted users, who cannot construct collisions as long as the key is secret.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import numpy as np
from numba import carray, cfunc, njit, types

DIGEST_BYTES = 16
U64 = np.uint64
# "somepseudorandomlygeneratedbytes": the initial state that SipHash defines.
INIT = (U64(0x736F6D6570736575), U64(0x646F72616E646F6D), U64(0x6C7967656E657261))
INIT_LAST = U64(0x7465646279746573)
LONG, LONG_SECOND = U64(0xEE), U64(0xDD)  # constants of the variant with 128-bit digests


@njit  # type: ignore[untyped-decorator]
def _rotate(word: Any, bits: int) -> Any:
    return (word << U64(bits)) | (word >> U64(64 - bits))


@njit  # type: ignore[untyped-decorator]
def _rounds(count: int, v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    for _ in range(count):
        v0, v2 = v0 + v1, v2 + v3
        v1, v3 = _rotate(v1, 13) ^ v0, _rotate(v3, 16) ^ v2
        v0, v2 = _rotate(v0, 32) + v3, v2 + v1
        v3, v1 = _rotate(v3, 21) ^ v0, _rotate(v1, 17) ^ v2
        v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@njit  # type: ignore[untyped-decorator]
def _absorb(word: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> Any:
    v0, v1, v2, v3 = _rounds(2, v0, v1, v2, v3 ^ word)
    return v0 ^ word, v1, v2, v3


@njit  # type: ignore[untyped-decorator]
def _hash_chain(tokens: Any, width: int, key: Any, parent: Any, digests: Any) -> None:
    """Hash consecutive blocks of ``width`` 32-bit tokens into ``digests``, each with the previous
    digest as its parent."""
    first, second = parent[0], parent[1]
    last_word = U64((DIGEST_BYTES + 4 * width) & 255) << U64(56)
    for index in range(len(tokens) // width):
        start = index * width
        v0, v1 = key[0] ^ INIT[0], key[1] ^ INIT[1] ^ LONG
        v2, v3 = key[0] ^ INIT[2], key[1] ^ INIT_LAST
        v0, v1, v2, v3 = _absorb(first, v0, v1, v2, v3)
        v0, v1, v2, v3 = _absorb(second, v0, v1, v2, v3)
        for at in range(start, start + width - 1, 2):
            pair = U64(tokens[at]) | U64(tokens[at + 1]) << U64(32)
            v0, v1, v2, v3 = _absorb(pair, v0, v1, v2, v3)
        odd = U64(tokens[start + width - 1]) if width & 1 else U64(0)
        v0, v1, v2, v3 = _absorb(last_word | odd, v0, v1, v2, v3)
        v0, v1, v2, v3 = _rounds(4, v0, v1, v2 ^ LONG, v3)
        first = v0 ^ v1 ^ v2 ^ v3
        v0, v1, v2, v3 = _rounds(4, v0, v1 ^ LONG_SECOND, v2, v3)
        second = v0 ^ v1 ^ v2 ^ v3
        digests[2 * index], digests[2 * index + 1] = first, second


_words = types.CPointer(types.uint64)
_signature = types.void(
    types.CPointer(types.uint32), types.int64, types.int64, _words, _words, _words
)


@cfunc(_signature, cache=True)  # type: ignore[untyped-decorator]
def _entry(tokens: Any, count: int, width: int, key: Any, parent: Any, digests: Any) -> None:
    _hash_chain(
        carray(tokens, count * width),
        width,
        carray(key, 2),
        carray(parent, 2),
        carray(digests, 2 * count),
    )


# Called through ctypes: for a single block this is twice as fast as Numba's own dispatch.
_hash_blocks = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
)(_entry.address)


class FastHasher:
    """A block hasher whose hashes are equal in all processes with the same seed. Where users do not
    trust each other, keep the seed secret or use SHA-256.

    ``key``: 16 bytes to use instead of a key derived from the seed."""

    def __init__(self, seed: int, *, key: bytes | None = None) -> None:
        secret = hashlib.sha256(b"metronome prefix cache %d" % seed).digest()
        self._key = secret[:DIGEST_BYTES] if key is None else key
        self.root = secret[DIGEST_BYTES:]
        self.secret = self._key + self.root

    @classmethod
    def of_secret(cls, secret: bytes) -> FastHasher:
        """The hasher of another process, given its ``secret``."""
        hasher = cls(0, key=secret[:DIGEST_BYTES])
        hasher.root, hasher.secret = secret[DIGEST_BYTES:], secret
        return hasher

    def extend(self, parent: bytes, data: bytes, width: int) -> list[bytes]:
        count = len(data) // width
        digests = ctypes.create_string_buffer(DIGEST_BYTES * count)
        _hash_blocks(data, count, width // 4, self._key, parent, digests)
        raw = digests.raw
        return [raw[start : start + DIGEST_BYTES] for start in range(0, len(raw), DIGEST_BYTES)]

    def extend_one(self, parent: bytes, data: bytes) -> bytes:
        return self.extend(parent, data, len(data))[0]

    def fold(self, parent: bytes, extra: bytes) -> bytes:
        return hashlib.blake2b(parent + extra, key=self._key, digest_size=DIGEST_BYTES).digest()
