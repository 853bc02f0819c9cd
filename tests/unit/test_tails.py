"""Tails: keys of the last, partly filled blocks of preempted requests."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from engine.kv.prefix_index import Chains, Sha256Hasher
from engine.kv.tails import is_tail, tail_keys
from engine.kv_transfer.regions import MAX_KEY_BYTES


def test_hashes_that_a_client_can_choose_are_no_tails() -> None:
    """Tails are stored at once. Prompts can be found of which a hash has four given bytes: their
    blocks would be stored before they are computed."""
    for hash_bytes in (27, 28):  # group 0 has the hash alone, others a further byte
        assert not is_tail(bytes(hash_bytes) + b"tail" + bytes(1))


def test_stores_take_the_keys_of_tails() -> None:
    tokens = array("i", range(20))
    req = SimpleNamespace(arrival=1, tokens=tokens, media=(), cache_salt=None, adapter=None)
    keys = tail_keys(Chains(Sha256Hasher(), 16), [], req, 20, 2)
    assert all(is_tail(key) and len(key) <= MAX_KEY_BYTES for key in keys)
