"""Builds an engine core from a configuration. Only this module imports all the parts."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.config.cache import CacheConfig
from engine.config.decide import Decided, cap_drafts, decide, resolve
from engine.config.engine import EngineConfig, ResolvedConfig
from engine.config.env import use_kernel_cache
from engine.config.model import ModelConfig, ModelInfo, read_model_info
from engine.config.pooling import read_pooling
from engine.config.pooling.steps import for_pooling
from engine.config.sched import SchedulerConfig, SchedulerOptions
from engine.config.speculative import SpeculativeConfig
from engine.core.engine_core import EngineCore, Executor
from engine.core.inproc_client import InprocClient
from engine.core.rank_use import rank_uses
from engine.core.recording import describe, record
from engine.core.starting import log_pool, not_collecting, read_ahead
from engine.core.watching import CoreWatch
from engine.errors import ConfigError
from engine.hub.fetch import fetched
from engine.ipc.device_pixels import DeviceMemory
from engine.kv.events import EventLog
from engine.kv.manager import KVManager
from engine.kv.prefix_index import BlockHasher, Sha256Hasher
from engine.kv_transfer.halves import (
    num_stores,
    of_all_ranks,
    open_tiers,
    planned_stores,
    tier_methods,
    with_copies_of_rank,
    with_recorded_tiers,
    with_tier_copies,
    with_tiers,
)
from engine.lora.halves import (
    adapter_halves,
    adapter_names,
    adapters_of_rank,
    load_modules,
    with_adapters,
    with_recorded_adapters,
)
from engine.messages.step import CAPABILITIES, PARTS
from engine.messages.structured import Grammar
from engine.mm.arrivals import Arrivals
from engine.mm.decide import EncoderBudget
from engine.mm.store import PixelStore
from engine.observe.guard import Failures, ObserverGuard
from engine.observe.steplog import Header
from engine.pictures.families import family_of, sees
from engine.sched.interface import SchedulerInterface
from engine.sched.plugins.find import Chosen, choose, make_scheduler
from engine.sched.priority_steps import PrioritySteps
from engine.sched.resource import Resource
from engine.spec.decide import Drafts, NoProposer, Proposer
from engine.spec.ngram import NgramProposer
from engine.spec.payoff import Payoff
from engine.spec.worker_drafts import WorkerDrafts
from engine.spec.worth import Worth
from engine.states.decide import StateSnapshots
from engine.states.policies import find_snapshot_policy
from engine.structured.decide import (
    CompiledAtOnce,
    GrammarCompiler,
    GrammarReadiness,
    joined_by_grammars,
)
from engine.structured.guidance import CheckedOnly, fault_of, guidance_of

if TYPE_CHECKING:
    from engine.worker.feature import Feature

logger = logging.getLogger("engine.core")
POOLS = ("pooling", "only_pooling")  # capabilities of a model whose requests are all pooled


def build_core(
    config: EngineConfig,
    *,
    clock: Callable[[], float] = time.monotonic,
    open_memory: Callable[[Any], DeviceMemory] | None = None,
) -> InprocClient:
    """Load the model, and create scheduler, KV manager and worker. Raises ``ConfigError``.

    open_memory: opens the memory of the worker's ``torch.device``, to which clients may copy
    pixels; by default that of a CUDA device."""
    chosen = choose_all(config.scheduler)  # raises ConfigError before minutes of loading
    find_snapshot_policy(config.cache.state_snapshot_policy)  # the same
    stores = planned_stores(config)  # the same
    adapters, added = adapter_halves(config)
    chosen = with_adapters(chosen, adapters)
    config = replace(config, model=fetched(config.model, for_core=True, for_text=False))
    drafting = fetched_draft_model(config)
    info = read_model_info(config.model.model)
    pooling = read_pooling(info, config.model)
    if config.model.load_format != "dummy":
        read_ahead(info.path)
    if config.kernel_cache is not None:
        use_kernel_cache(config.kernel_cache)
    with not_collecting():
        from engine.core.ranks import connect, make_workers
        from engine.worker.device import cpu_products, resolve_device

    device = resolve_device(config.device)
    products = cpu_products(config.model, info, device)
    if pooling is not None:
        config = for_pooling(config, info, pooling, device, products=products)
    resolved = resolve(config, info, device, products=products)
    failures = Failures()
    media, store, encoding = media_halves(
        resolved, info, pools=pooling is not None, open_memory=open_memory
    )
    chosen = chosen._replace(resources=(*chosen.resources, *media))
    features = [*added, *encoding, *computing_halves(resolved, info, drafting)]
    own_copies, features = with_tier_copies(features, stores)
    of_others = partial(halves_of_rank, resolved, info, drafting, pools=pooling is not None)
    worker = make_workers(resolved, info, features, failures, pooling, of_others)
    copies = of_all_ranks(own_copies, worker)
    with ended_by_errors(worker):
        check_capabilities(chosen.resources, worker.capabilities)
        facts = worker.load()
        chosen = with_most_drafts(chosen, resolved.scheduler, facts.most_drafts)
        chosen = with_grammars(chosen, config, worker.capabilities, facts.vocab_size)
        chosen = with_snapshots(chosen, config.cache, facts.snapshot_blocks)
        chosen = with_tiers(chosen, copies, facts.block_bytes)
        capabilities = parts_of(chosen.resources) + (POOLS if pooling is not None else ())
        decided = decide(resolved, info, facts, worker.measure, capabilities)
        log_pool(decided, facts)
        worker.allocate(decided.num_kv_blocks)
        core = wire(resolved, decided, worker, clock=clock, chosen=chosen, failures=failures)
        uses = rank_uses(worker, config.core_index, failures)
        client = InprocClient(
            core,
            decided,
            clock=clock,
            failures=failures,
            adapters=adapters,
            methods={
                **CoreWatch(core, clock, ranks=uses).methods,
                **tier_methods(chosen.resources),
            },
            media=store,
        )
        client.loads = copies
        connect(worker, client, (adapters, store), uses)
        with ended_by_errors(client):
            open_tiers(copies, decided.num_kv_blocks, resolved, facts, drafting)
            load_modules(config.lora, adapters)
    gc.freeze()  # objects made so far live as long as the process: collections skip them
    return client


@contextmanager
def ended_by_errors(started: InprocClient | Executor[Any]) -> Iterator[None]:
    """End a core or worker if an error ends the start: it may have files, threads or processes."""
    try:
        yield
    except BaseException:
        started.shutdown()
        raise


def wire(
    config: EngineConfig,
    decided: Decided,
    executor: Executor[Any],
    *,
    clock: Callable[[], float],
    chosen: Chosen | None = None,
    failures: Failures | None = None,
) -> EngineCore:
    """Build the core around an executor, real or simulated. chosen: policy and resources, by
    default those of the options. failures: counts observers' errors."""
    sched, seed = decided.scheduler, config.model.seed
    chosen = chosen or choose_all(sched)
    check_capabilities(chosen.resources, executor.capabilities)
    failures = failures or Failures()
    kv = make_kv_manager(config, decided, failures=failures, chosen=chosen)

    def make(clock: Callable[[], float]) -> SchedulerInterface:
        return make_scheduler(
            sched, kv, clock=clock, timer=time.perf_counter, seed=seed, chosen=chosen
        )

    max_loras = config.lora.max_loras if config.lora.enable_lora else 0
    sizes, stores = encoder_sizes(chosen.resources), num_stores(chosen.resources)
    described = describe(sched, config.cache, kv, seed, max_loras, sizes, stores)
    scheduler = (
        make(clock)
        if config.step_log is None
        else record(config.step_log, described, make, clock, failures)
    )
    return EngineCore(scheduler, executor, sched.num_steps_in_flight)


def choose_all(config: SchedulerOptions) -> Chosen:
    """Find the configured policy, resources and enabled features. Raises ``ConfigError``."""
    chosen = choose(config)
    return chosen._replace(resources=(*features_of(config), *chosen.resources))


def features_of(config: SchedulerOptions) -> list[Resource]:
    """Create the resources for the features that the scheduler's options enable."""
    drafts = drafts_of(config)
    found: list[Resource] = [] if drafts is None else [drafts]
    return [*found, PrioritySteps()] if config.scheduling_policy == "priority" else found


def drafts_of(config: SchedulerOptions) -> Drafts | WorkerDrafts | None:
    """Create the resource for drafts; ``None`` without speculative decoding."""
    if config.speculative_config is None:
        return None
    speculative = SpeculativeConfig.of(config.speculative_config)
    num = speculative.num_speculative_tokens
    worth, payoff = (Worth(num), Payoff()) if speculative.adaptive else (None, None)
    if speculative.method == "draft_model":
        return WorkerDrafts(num, worth=worth, payoff=payoff)
    return Drafts(num, proposer_of(speculative), worth=worth, payoff=payoff)


def with_most_drafts(chosen: Chosen, config: SchedulerConfig, most: int | None) -> Chosen:
    """Replace the resource for drafts if the worker verifies fewer drafts than configured.
    ``most``: drafts per decode that it verifies, ``None`` for no limit."""
    capped = cap_drafts(config, most)
    if capped.speculative_config == config.speculative_config:
        return chosen
    drafts = drafts_of(capped)
    assert drafts is not None
    resources = [
        drafts if isinstance(each, Drafts | WorkerDrafts) else each for each in chosen.resources
    ]
    return chosen._replace(resources=tuple(resources))


def proposer_of(speculative: SpeculativeConfig) -> Proposer:
    """Create the object that drafts tokens in the scheduler's process. ``draft_model`` has none,
    since the worker computes its drafts."""
    if speculative.method == "grammar":
        return NoProposer()
    if speculative.method == "ngram":
        return NgramProposer(speculative.prompt_lookup_min, speculative.prompt_lookup_max)
    from engine.spec.suffix import SuffixProposer  # imports Numba

    return SuffixProposer(
        speculative.suffix_decoding_max_tree_depth,
        speculative.suffix_decoding_max_cached_requests,
        speculative.suffix_decoding_max_spec_factor,
        speculative.suffix_decoding_min_token_prob,
    )


def with_grammars(
    chosen: Chosen, config: EngineConfig, capabilities: frozenset[str], vocab_size: int
) -> Chosen:
    """Add the resource for grammars if the worker can mask tokens and no plug-in masks them."""
    if "masks" not in capabilities:
        return chosen
    compiler = make_compiler(partial(tokenizer_json, config.model), vocab_size)
    if config.step_log is not None:
        compiler = CompiledAtOnce(compiler)
    # A replay has no tokenizer, so it could not repeat which drafts the grammars cut.
    may_cut = config.step_log is None
    resources = following_grammars(chosen.resources, compiler, vocab_size, may_cut=may_cut)
    return chosen._replace(resources=resources)


def with_snapshots(chosen: Chosen, cache: CacheConfig, snapshot_blocks: int) -> Chosen:
    """Add the resource for snapshots of recurrent states, for a model that has states.
    ``snapshot_blocks``: KV blocks of a snapshot, 0 for a model without states."""
    if not (snapshot_blocks and cache.enable_prefix_caching):
        return chosen
    policy = find_snapshot_policy(cache.state_snapshot_policy)
    return chosen._replace(resources=(*chosen.resources, StateSnapshots(policy)))


def media_halves(
    config: ResolvedConfig,
    info: ModelInfo,
    *,
    pools: bool,
    open_memory: Callable[[Any], DeviceMemory] | None,
) -> tuple[list[Resource], PixelStore | None, list[Feature]]:
    """Make the scheduler's and the worker's half of media, and the store of pixels that they share;
    nothing for a model that does not see."""
    if pools or not sees(info) or config.media.most_pictures == 0:
        return [], None, []
    try:
        from engine.mm.compute import Encoder, LargestRun
        from engine.pictures.processing import ImageProcessor, largest_picture
    except ModuleNotFoundError as error:
        logger.info(
            "pictures are refused, because %s is not installed: pip install "
            "metronome-engine[vision]",
            error.name,
        )
        return [], None, []
    options = config.media
    processor = ImageProcessor(info, options.mm_processor_kwargs)
    family = family_of(info, processor.settings)
    most = max(config.scheduler.max_num_batched_tokens, family.longest)
    most = options.max_num_encoder_input_tokens or most
    cached = options.encoder_cache_size or most
    store = PixelStore(processor.kinds)
    is_whole = family.whole or options.disable_chunked_mm_input
    longest, arrivals = family.longest if is_whole else 0, Arrivals(store.drop)
    budget = EncoderBudget(
        most, cached, whole_media=is_whole, longest_item=longest, arrivals=arrivals, store=store
    )
    largest = partial(largest_picture, processor, family.num_embedded)
    encoder = Encoder(config.model, info, store, cached, family, LargestRun(most, largest))
    if options.mm_tensor_transport != "default":
        encoder.share_device(options.pool_bytes, open_memory)
    return [budget], store, [encoder]


def halves_of_rank(
    config: ResolvedConfig,
    info: ModelInfo,
    drafting: ModelConfig | None,
    rank: int,
    *,
    pools: bool,
) -> list[Feature]:
    """The features to add to the worker of a further rank, in its process, in the order of those of
    rank 0. Pixels come through the ring, wherever clients put them, and each rank reads adapters
    itself."""
    config = replace(config, media=replace(config.media, mm_tensor_transport="default"))
    _, store, encoding = media_halves(config, info, pools=pools, open_memory=None)
    if store is not None:
        from engine.mm.compute import KeptPixels

        encoding = [*encoding, KeptPixels(store)]
    features = [*adapters_of_rank(config), *encoding, *computing_halves(config, info, drafting)]
    return with_copies_of_rank(features, planned_stores(config, rank))


def encoder_sizes(resources: Iterable[Resource]) -> list[int]:
    """Tokens of media encoded in a step, and kept, and 1 if media are never split; [] without the
    resource for media."""
    for each in resources:
        if isinstance(each, EncoderBudget):
            return [each.max_encoder_tokens, each.cache.num_tokens, int(each.whole_media)]
    return []


def with_recorded_features(chosen: Chosen, header: Header, cache: CacheConfig) -> Chosen:
    """Add the resources that a recorded core had: for a replay of its step log, which computes
    nothing."""
    chosen = with_recorded_media(chosen, header.encoder_sizes)
    chosen = with_checked_grammars(chosen)
    chosen = with_snapshots(chosen, cache, header.snapshot_blocks)
    chosen = with_recorded_adapters(chosen, header.max_loras)
    return with_recorded_tiers(chosen, header.num_stores, cache)


def with_recorded_media(chosen: Chosen, sizes: Sequence[int]) -> Chosen:
    """Add the resource for media: for a replay of a step log. ``sizes``: as ``encoder_sizes``
    returned them for the recorded core."""
    if not sizes or encoder_sizes(chosen.resources):
        return chosen
    most, cached, *rest = sizes
    budget = EncoderBudget(most, cached, whole_media=bool(sum(rest)), arrivals=Arrivals())
    return chosen._replace(resources=(*chosen.resources, budget))


def make_compiler(read_tokenizer: Callable[[], str | None], vocab_size: int) -> GrammarCompiler:
    """Make the grammar compiler of a model. ``read_tokenizer`` returns its tokenizer.json."""
    return guidance_of(read_tokenizer, vocab_size)


def following_grammars(
    resources: Sequence[Resource], compiler: GrammarCompiler, vocab_size: int, *, may_cut: bool
) -> tuple[Resource, ...]:
    """Add the resource that makes outputs follow grammars. may_cut: let it remove drafts that a
    grammar forbids, and draft tokens that a grammar leaves no alternative to."""
    grammars = GrammarReadiness(compiler, vocab_size)
    for resource in resources:
        if isinstance(resource, Drafts) and may_cut:
            resource.follow_grammars(grammars.num_allowed, grammars.forced)
    return joined_by_grammars(resources, grammars)


def with_checked_grammars(chosen: Chosen) -> Chosen:
    """Add a resource that checks grammars but masks nothing: for a replay of a step log, which
    computes no tokens and has no tokenizer."""
    grammars = GrammarReadiness(CheckedOnly(), vocab_size=0)
    return chosen._replace(resources=joined_by_grammars(chosen.resources, grammars))


def tokenizer_json(config: ModelConfig) -> str | None:
    """The contents of the model's tokenizer.json; ``None`` if it has another kind of tokenizer."""
    from engine.text.tokenizer import load_tokenizer

    return load_tokenizer(fetched(config, for_core=False, for_text=True)).backend.as_json()


def fetched_draft_model(config: EngineConfig) -> ModelConfig | None:
    """The configured draft model, downloaded to a local directory; ``None`` without one."""
    options = config.scheduler.speculative_config
    speculative = None if options is None else SpeculativeConfig.of(options)
    if speculative is None or speculative.model is None:
        return None
    try:
        return fetched(
            replace(
                config.model,
                model=speculative.model,
                revision=speculative.revision,
                quantization=speculative.quantization,
                tokenizer=None,
                tokenizer_revision=None,
                batch_invariant=False,
            ),
            for_core=True,
            for_text=False,
        )
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from error


def computing_halves(
    config: ResolvedConfig, info: ModelInfo, drafting: ModelConfig | None
) -> list[Feature]:
    """The features to add to the worker: snapshots of states, and a draft model if there is one.
    info: facts about the main model; drafting: the draft model's configuration."""
    features: list[Feature] = []
    if config.cache.enable_prefix_caching:
        from engine.states.compute import StateCopies

        features.append(StateCopies())
    if drafting is None:
        return features
    from engine.spec.compute import DraftModel

    options = config.scheduler.speculative_config
    assert options is not None, "it is the draft model"
    num_drafts = SpeculativeConfig.of(options).num_speculative_tokens
    try:
        own = read_model_info(drafting.model)
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from error
    if own.vocab_size != info.vocab_size:
        raise ConfigError(
            f"speculative_config: the draft model {own.name} has {own.vocab_size} tokens and "
            f"the model has {info.vocab_size}, but the numbers must be equal: give a draft "
            "model of the same family"
        )
    return [*features, DraftModel(drafting, own, config, num_drafts)]


def parts_of(resources: Iterable[Resource]) -> tuple[str, ...]:
    """Return the parts of a plan that these resources write, in the order of ``PARTS``.

    Raises ``ConfigError`` for an unknown part, a part that two resources write, or a resource that
    is given twice."""
    writers: dict[str, Resource] = {}
    seen: set[int] = set()
    for resource in resources:
        own = type(resource).__name__
        if id(resource) in seen:
            raise ConfigError(f"resources contains the same {own} object twice: leave one out")
        seen.add(id(resource))
        for part in needs_of(resource):
            if part in writers:
                raise ConfigError(
                    f"the resources {type(writers[part]).__name__} and {own} both write the plan "
                    f"part {part!r}, which only one may write: leave one out"
                )
            if part in PARTS:
                writers[part] = resource
    return tuple(part for part in PARTS if part in writers)


def needs_of(resource: Resource) -> tuple[str, ...]:
    """The resource's ``needs``, checked. Raises ``ConfigError`` for unknown capabilities."""
    needs, name = resource.needs, type(resource).__name__
    if not isinstance(needs, tuple | list | set | frozenset):
        raise ConfigError(
            f"{name}.needs is {needs!r:.80} ({type(needs).__name__}), must be a tuple of names, "
            f"e.g. ({PARTS[0]!r},)"
        )
    for part in needs:
        if part not in CAPABILITIES:
            raise ConfigError(
                f"{name}.needs has {part!r:.80}, which is not a capability; there are: "
                f"{', '.join(CAPABILITIES)}"
            )
    return tuple(needs)


def check_capabilities(resources: Sequence[Resource], capabilities: frozenset[str]) -> None:
    """Raise ``ConfigError`` for resources that conflict or need capabilities the worker lacks."""
    parts_of(resources)
    for resource in resources:
        missing = [
            part for part in CAPABILITIES if part in needs_of(resource) and part not in capabilities
        ]
        if missing:
            word = "capability" if len(missing) == 1 else "capabilities"
            own_way = "use Drafts with a proposer, or " if "proposals" in missing else ""
            raise ConfigError(
                f"resource {type(resource).__name__} needs a worker with the {word} "
                f"{' and '.join(map(repr, missing))}; this one has "
                f"{', '.join(sorted(capabilities)) or 'none'}: {own_way}leave the resource out"
            )


def make_kv_manager(
    config: EngineConfig,
    decided: Decided,
    *,
    failures: Failures,
    chosen: Chosen,
) -> KVManager:
    """Create the KV manager with the configured block hash and event publisher. ``chosen``: its
    cache policy decides on the pool; among its resources may be the one that knows adapters."""
    cache = config.cache
    events = None
    if cache.enable_kv_events:
        from engine.core.kv_publisher import KVEventPublisher

        publisher = KVEventPublisher(
            cache.kv_events_endpoint,
            topic=cache.kv_events_topic,
            rank=config.core_index,
            num_ranks=config.num_cores,
            num_remembered=cache.kv_events_buffer_steps,
            guard=ObserverGuard(
                failures, "kv_events", "events that cannot be published are dropped"
            ),
        )
        logger.info(
            "KV cache events are published at %s, past ones at %s",
            *(publisher.endpoint, publisher.replay_endpoint),
        )
        events = EventLog(
            publisher,
            block_size=decided.block_size,
            clock=time.time,
            groups=decided.kv_groups,
            name_of=adapter_names(chosen.resources),
            rank=config.core_index,
        )
    kv = KVManager(
        chosen.pool(decided.num_kv_blocks),
        decided.block_size,
        enable_prefix_caching=cache.enable_prefix_caching,
        groups=decided.kv_groups,
        hasher=make_hasher(cache, config.model.seed),
        events=events,
    )
    if decided.snapshot_blocks:
        kv.keep_states(decided.snapshot_blocks, cache.state_snapshot_interval or 0)
    return kv


def make_hasher(cache: CacheConfig, seed: int) -> BlockHasher:
    """The configured hasher of KV blocks."""
    if cache.prefix_caching_hash_algo == "fast":
        from engine.kv.fast_hash import FastHasher

        return FastHasher(seed)
    return Sha256Hasher()


def fault_of_grammar(form: Grammar) -> str:
    """The reason why a core would refuse this grammar, found without a core; "" if it is valid."""
    return fault_of(form)
