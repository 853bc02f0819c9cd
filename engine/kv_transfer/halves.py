"""Adds the two halves of KV tiers to an engine core that is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from engine.config.cache import CacheConfig
from engine.config.decide import ModelFacts
from engine.config.engine import EngineConfig, ResolvedConfig
from engine.config.model import ModelConfig
from engine.kv_transfer.group_copies import Copies, GroupCopies, OtherWorkers
from engine.kv_transfer.tiers import Tiers
from engine.sched.plugins.find import Chosen
from engine.sched.resource import Resource

if TYPE_CHECKING:
    from engine.kv_transfer.compute import TierCopies
    from engine.kv_transfer.opening import PlannedStores
    from engine.worker.feature import Feature


def planned_stores(config: EngineConfig, rank: int = 0) -> PlannedStores | None:
    """The stores of KV blocks that the options name, for a worker of this rank; ``None`` if they
    name none. Raises ``ConfigError``."""
    if not config.cache.has_tiers:
        return None
    from engine.kv_transfer.opening import PlannedStores

    return PlannedStores(config, rank)


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


def with_copies_of_rank(features: list[Feature], stores: PlannedStores | None) -> list[Feature]:
    """Add the half of KV tiers of the worker of a further rank to its features."""
    copies, features = with_tier_copies(features, stores)
    if copies is None:
        return features
    from engine.kv_transfer.compute import CopiesOfRank

    return [*features, CopiesOfRank(copies)]


def of_all_ranks(copies: TierCopies | None, worker: object) -> Copies | None:
    """The copies of all ranks together, if ``worker`` is a group of several."""
    if copies is None or not isinstance(worker, OtherWorkers):
        return copies
    return GroupCopies(copies, worker)


def open_tiers(
    copies: Copies | None,
    num_blocks: int,
    config: ResolvedConfig,
    facts: ModelFacts,
    drafting: ModelConfig | None,
) -> None:
    """Open the stores, if there are any, after all memory of the pool's ``num_blocks`` blocks is
    allocated. ``drafting``: the draft model. Raises ``ConfigError``."""
    if copies is None:
        return
    from engine.kv_transfer.opening import namespace_of

    by_content = copies.planned.is_between_hosts
    copies.open(num_blocks, namespace_of(config, facts, drafting, by_content=by_content))


def with_tiers(chosen: Chosen, copies: Copies | None, block_bytes: int) -> Chosen:
    """Add the resource for KV tiers, if there are stores. ``block_bytes``: of a block in a rank."""
    if copies is None:
        return chosen
    planned, remote = copies.planned, None
    if (options := planned.peer_options) is not None:
        from engine.kv_transfer.remote import RemotePrefill

        remote = RemotePrefill(options, copies.announce, planned.num_ranks)
    tiers = Tiers(
        copies,
        planned.num_ranks * block_bytes,
        speeds=planned.speeds,
        failure_policy=planned.failure_policy,
        remote=remote,
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
