"""The ``kv_transfer_params`` of a request that KV tiers read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from engine.kv_transfer.awaited import AWAIT_BLOCKS, objection
from engine.kv_transfer.remote import FOREIGN, RemoteParams, read_remote


class TierParams(NamedTuple):
    """What a request allows. ``max_load_tokens``: the most tokens whose KV is loaded for it,
    ``None`` for no limit. ``store``: whether blocks that it computes are stored. ``remote``: which
    other engine has part in it."""

    max_load_tokens: int | None = None
    store: bool = True
    remote: RemoteParams = RemoteParams()


KNOWN = ("max_load_tokens", "store", AWAIT_BLOCKS)


def read_params(given: Mapping[str, Any]) -> TierParams:
    """Check the parameters of a request. Raises ``ValueError`` with a message for its user."""
    for name in given:
        if name not in KNOWN and not str(name).startswith(FOREIGN):
            raise ValueError(
                f"kv_transfer_params has {name!r:.80}, which is not known; it takes "
                f"{', '.join(KNOWN)}"
            )
    most, store = given.get("max_load_tokens"), given.get("store", True)
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise ValueError(
            f"max_load_tokens in kv_transfer_params is {most!r:.80}, must be a whole number from 0 "
            "on, or None for no limit"
        )
    if not isinstance(store, bool):
        raise ValueError(f"store in kv_transfer_params is {store!r:.80}, must be True or False")
    if wrong := objection(dict(given)):
        raise ValueError(wrong)
    remote = read_remote(given)
    if remote.sends and not store:
        raise ValueError(
            "store in kv_transfer_params is False and do_remote_decode is true: another engine can "
            "only read what is stored; leave one of them out"
        )
    return TierParams(most, store, remote)
