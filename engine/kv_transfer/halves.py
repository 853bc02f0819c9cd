"""Adds the two halves of KV tiers to an engine core that is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.config.cache import CacheConfig
from engine.config.engine import EngineConfig
from engine.kv_transfer.tiers import Tiers
from engine.sched.plugins.find import Chosen
from engine.sched.resource import Resource

if TYPE_CHECKING:
    from engine.kv_transfer.compute import TierCopies
    from engine.kv_transfer.opening import PlannedStores
    from engine.worker.feature import Feature


def planned_stores(config: EngineConfig) -> PlannedStores | None:
    """The stores of KV blocks that the options name; ``None`` if they name none. Raises
    ``ConfigError``."""
    if not config.cache.has_tiers:
        return None
    from engine.kv_transfer.opening import PlannedStores

    return PlannedStores(config)


def with_tier_copies(
    features: list[Feature], stores: PlannedStores | None
) -> tuple[TierCopies | None, list[Feature]]:
    """Add the worker's half of KV tiers to the features, if there are stores: it copies blocks
    before others write to them, and fills blocks after others have read them."""
    if stores is None:
        return None, features
    from engine.kv_transfer.compute import TierCopies, TierLoads

    copies = TierCopies(stores)
    return copies, [copies, *features, TierLoads(copies)]


def with_tiers(chosen: Chosen, copies: TierCopies | None, block_bytes: int) -> Chosen:
    """Add the resource for KV tiers, if there are stores."""
    if copies is None:
        return chosen
    planned = copies.planned
    tiers = Tiers(
        copies,
        block_bytes,
        speeds=planned.speeds,
        failure_policy=planned.failure_policy,
        remote=planned.remote,
    )
    return chosen._replace(resources=(*chosen.resources, tiers))


def num_stores(resources: Iterable[Resource]) -> int:
    """Number of stores of KV blocks outside the pool."""
    return sum(each.num_stores for each in resources if isinstance(each, Tiers))


def tier_methods(resources: Iterable[Resource]) -> dict[str, Callable[..., None]]:
    """What clients may call of KV tiers, by name."""
    tiers = [each for each in resources if isinstance(each, Tiers)]
    return {name: method for each in tiers for name, method in each.methods.items()}


def with_recorded_tiers(chosen: Chosen, number: int, cache: CacheConfig) -> Chosen:
    """Add the resource for KV tiers: for a replay of a step log. ``number``: of stores."""
    if not number:
        return chosen
    policy = (cache.kv_transfer_config or {}).get("kv_load_failure_policy", "recompute")
    tiers = Tiers(None, 1, speeds=[1.0] * number, failure_policy=policy)
    return chosen._replace(resources=(*chosen.resources, tiers))
