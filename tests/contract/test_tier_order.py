"""KV tiers in the worker: blocks are copied before, and filled after, other features begin."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from engine.kv_transfer.halves import with_tier_copies
from engine.kv_transfer.opening import PlannedStores
from engine.messages.kv_orders import KVOrders, LoadOrder
from engine.messages.step import StepPlan
from engine.worker.feature import Feature
from engine.worker.slots import LiveSeqs


def test_a_step_is_begun_between_the_copies_and_the_loads(monkeypatch: Any) -> None:
    """A load may fill blocks of a snapshot that the same plan reads; a copy must be made before the
    plan's sequences write."""
    done: list[str] = []

    class Other(Feature):
        part = "snapshots"

        def begin(self, plan: StepPlan, live: LiveSeqs) -> Mapping[int, str] | None:
            done.append("others begin")
            return None

    copies, features = with_tier_copies([Other()], cast(PlannedStores, object()))
    assert copies is not None
    monkeypatch.setattr(copies, "_store", lambda keys, blocks: done.append("copied"))
    monkeypatch.setattr(copies, "_load", lambda order: done.append("load begins"))
    orders = KVOrders([b"a"], [1], [LoadOrder(1, [b"b"], [2], [0])])
    plan = cast(StepPlan, SimpleNamespace(kv_transfer=orders))
    for feature in features:
        feature.begin(plan, cast(LiveSeqs, None))
    assert done == ["copied", "others begin", "load begins"]
