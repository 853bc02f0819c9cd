"""``ModelWorker``, the worker of one device. Loads a model, allocates memory, computes plans.

    load ─> facts ─> measure ─> bytes for KV ─> allocate ─> launch, sample, collect ─> shutdown

Between these calls, ``engine.config.decide`` chooses lengths and numbers of blocks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.config.decide import ModelFacts, cap_drafts
from engine.config.engine import ResolvedConfig
from engine.config.env import default_num_threads
from engine.config.gpu import MOST_RECORDED, graph_sizes, mixed_sizes
from engine.config.gpu_memory import GIB, kv_budget, most_mixed
from engine.config.kv_groups import request_blocks
from engine.config.model import ModelInfo
from engine.config.pooling import PoolingSpec
from engine.errors import ConfigError
from engine.ipc.host_memory import free_host_bytes
from engine.kv.layout import (
    KVLayout,
    LayerCache,
    PagedKV,
    make_layout,
    one_group,
    padding,
    part_of_layout,
    state_bytes,
)
from engine.messages.step import Column, Masks, StepPlan, StepResult, check_parts
from engine.models.assemble import activation_dtype, compute_dtype
from engine.models.decoder import NativeDecoder
from engine.models.load import load_model
from engine.models.model import Model
from engine.models.pooling import load_head
from engine.models.stages import Pipeline
from engine.observe.guard import Failures
from engine.parallel.collectives import Collectives
from engine.sample.parts import vocabulary_of
from engine.sample.sampler import Sampler
from engine.worker.batches import Batches, Staging
from engine.worker.device import make_platform, resolve_device, takes_tiles
from engine.worker.feature import Feature, Machine
from engine.worker.memory import (
    PREFAULT_BYTES,
    PREFAULT_STATE_BYTES,
    PagePrefault,
    apply_kv_dtype,
    choose_kv_dtype,
    explain_shortage,
    make_kv_cache,
    stored_as,
    tensors_of,
)
from engine.worker.platform import Platform
from engine.worker.pooling import PoolingRunner
from engine.worker.profiler import TorchProfiler
from engine.worker.rank import RankPlace
from engine.worker.rank_report import place_of
from engine.worker.rank_times import Waited
from engine.worker.roofline import make_roofline
from engine.worker.runner import Driver, Runner
from engine.worker.slots import LiveSeqs, Slots
from engine.worker.states import (
    enter_states,
    groups_of,
    make_states,
    most_drafts,
    num_bytes,
    num_copies,
    with_state_dtype,
)
from engine.worker.steps import Pending
from engine.worker.warmup import (
    SLOW_SECONDS,
    prepare_kernels,
    run_all_kinds,
    run_largest_step,
    warm_up,
)
from kernels.cpu import isa
from kernels.cpu.cells import DTYPES as COMPILED
from kernels.cpu.recording import MOST_MIXED, Recorder
from kernels.cpu.threads import leave_threads_to_kernels, set_threads

OWN_PARTS = ("drafts", "masks", "block_groups")  # computed without a feature
POOLING_PARTS = ("block_groups", "pooling", "only_pooling")  # the same, in place of sampling

logger = logging.getLogger("engine.worker")


class ModelWorker:
    """The worker of one device; see ``engine.core.engine_core.Executor``.

    ``config``: from ``engine.config.decide.resolve``. ``features``: the worker's part of each
    feature. ``pooling``: how results are computed from hidden states, ``None`` for a model that
    generates. ``collectives``: of the ranks that compute the model together, ``None`` if this
    worker computes it alone. ``pipeline``: the stage that it computes, ``None`` for all layers."""

    def __init__(  # noqa: PLR0913
        self,
        config: ResolvedConfig,
        info: ModelInfo,
        platform: Platform,
        features: Sequence[Feature] = (),
        failures: Failures | None = None,
        pooling: PoolingSpec | None = None,
        collectives: Collectives | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._failures = failures or Failures()
        self._collectives = collectives
        self._pooling = pooling
        self.config = config
        self.platform = platform
        self._info = info
        self._features = tuple(features)
        self._profiler = TorchProfiler(config.torch_profiler_dir, self._failures)
        own = OWN_PARTS if pooling is None else POOLING_PARTS
        self.capabilities = frozenset([*own, *(feature.part for feature in features)])
        self._kv_dtype = torch.float32
        self._most_mixed = MOST_RECORDED  # tokens of the largest mixed step to record
        self._layers: list[LayerCache] = []
        self._layout: KVLayout | None = None
        self._driver: Driver | None = None
        self._prefault: PagePrefault | None = None

    @property
    def driver(self) -> Driver:
        """The driver that computes plans. The model must be loaded."""
        assert self._driver is not None, "the model is not loaded"
        return self._driver

    @property
    def layout(self) -> KVLayout:
        """How the model's layers share the KV pool. The model must be loaded."""
        assert self._layout is not None, "the model is not loaded"
        return self._layout

    @property
    def shares_memory(self) -> bool:
        """True if it computes in the host's memory."""
        return self.platform.shares_memory

    def load(self) -> ModelFacts:
        """Load the weights and allocate memory for the requests' state. Raises ``ConfigError``."""
        config, platform, sched = self.config, self.platform, self.config.scheduler
        is_cpu, device = platform.shares_memory, platform.device.type
        dtype = compute_dtype(config.model, self._info, device)
        # Check before the weights are read, which takes long; ``apply_kv_dtype`` checks again with
        # the loaded model's dtype.
        computed_in = activation_dtype(dtype, device)
        choose_kv_dtype(config.cache.kv_cache_dtype, computed_in, device=platform.device)
        if is_cpu:
            num_threads = set_threads(config.num_threads or default_num_threads())
            logger.info("%d threads, %s kernels on %s", num_threads, cpu_level(), isa.processor())
            num_ranks = 1 if self._collectives is None else self._collectives.size
            prepare_kernels(self._info, config.model, config.cache.kv_cache_dtype, num_ranks)
        with explain_shortage(platform, "the weights were loaded"):
            model = load_model(
                config.model,
                self._info,
                device=device,
                max_model_len=sched.max_model_len,
                takes_adapters=config.lora.enable_lora,
                pools=self._pooling is not None,
                collectives=self._collectives,
                pipeline=self._pipeline,
            )
            if isinstance(model, NativeDecoder) and not is_cpu:
                model.group_experts()
        self._kv_dtype = apply_kv_dtype(model, config.cache.kv_cache_dtype, platform.device)
        self._features = tuple(one for one in self._features if one.is_needed_by(model))
        self._layers, self._layout = self._lay_out(model)
        num_drafts = self._affordable_drafts()
        config = replace(config, scheduler=cap_drafts(config.scheduler, num_drafts))
        self.config = config
        with explain_shortage(platform, "room was made for the requests"):
            parts = self._layers, self._layout
            machine = make_machine(model, platform, config, *parts, self._features)
            if self._pooling is not None:
                machine = machine._replace(recorder=None)
            for feature in self._features:
                feature.attach(machine)
        self._driver = self._make_driver(machine, model)
        if is_cpu and model.has_own_products and model.dtype in COMPILED:
            leave_threads_to_kernels()
        return ModelFacts(
            vocab_size=model.vocab_size,
            block_bytes=self._block_bytes(),
            kv_groups=self.layout.groups,
            snapshot_blocks=-(-state_bytes(self._layers) // self.layout.block_bytes),
            most_drafts=num_drafts,
        )

    def measure(self) -> int:
        """Bytes available to the KV pool: on a CPU a share of free memory, on a GPU what the
        weights and the largest step leave. Raises ``ConfigError`` if no request would fit."""
        config, sched, platform = self.config, self.config.scheduler, self.platform
        if platform.shares_memory:
            taken = sum(feature.own_bytes for feature in self._features)
            taken += num_bytes(self.driver.runner.machine.states)
            return max(0, int(free_host_bytes() * config.cache.memory_utilization) - taken)
        self._make_kv(1)
        size = (sched.max_num_batched_tokens, sched.max_num_seqs)

        def run() -> None:
            self.driver.runner.profile_run(*size)
            for feature in self._features:
                feature.profile_run(*size)

        def record(num: int) -> None:
            self.driver.runner.capture(_last(sizes, num), _last(mixed, num))

        doing = f"a step of {sched.max_num_batched_tokens} tokens was tried"
        with explain_shortage(platform, doing):
            use = platform.measure(run)
            self._most_mixed = most_mixed(use, config.gpu.gpu_memory_utilization)
            sizes, mixed = self._graph_sizes()
            graphs = platform.measure_graphs(record, max(len(sizes), len(mixed)))
        logger.info(
            "GPU memory: %.2f GiB of weights and tables, %.2f of activations, %.2f of recorded "
            "steps, %.2f of others",
            use.loaded / GIB,
            use.activations / GIB,
            graphs / GIB,
            use.others / GIB,
        )
        block_size = config.block_size
        blocks_of_one = request_blocks(self.layout.groups, block_size, sched.max_model_len) + 1
        return kv_budget(
            use,
            config.gpu.gpu_memory_utilization,
            one_request=blocks_of_one * self._block_bytes(),
            graphs=graphs,
            num_tensors=self.layout.num_tensors,
        )

    def allocate(self, num_blocks: int) -> None:
        """Allocate this many KV blocks, run steps of all shapes, and record graphs."""
        with explain_shortage(self.platform, f"{num_blocks} KV blocks were allocated"):
            self._make_kv(num_blocks)
        runner, config, sched = self.driver.runner, self.config, self.config.scheduler
        if self.platform.compiles:
            with explain_shortage(self.platform, "steps of every kind were tried"):
                run_all_kinds(runner, sched.max_num_batched_tokens, sched.max_model_len)
        seconds = warm_up(self.driver, num_blocks, self._all_agree)
        if self.platform.shares_memory:
            model, is_quiet = runner.machine.model, seconds < SLOW_SECONDS
            if isinstance(model, NativeDecoder) and self._pooling is None:
                self.driver.roofline = self.driver.watching.run(
                    make_roofline,
                    config.model,
                    self._info,
                    model,
                    self._kv_dtype,
                    is_quiet=is_quiet,
                )
            sizes = (sched.max_num_batched_tokens, sched.max_num_seqs, sched.max_model_len)
            with explain_shortage(self.platform, f"a step of {sizes[0]} tokens was tried"):
                run_largest_step(self.driver, *sizes, self._all_agree)
            states = [one for layer in runner.machine.states for one in layer]
            self._prefault = PagePrefault(
                (tensors_of(runner.machine.kv), PREFAULT_BYTES), (states, PREFAULT_STATE_BYTES)
            )
            self._prefault.start()
        else:
            self._record(runner)

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step. Raises ``RuntimeError`` if the plan has a part that this worker cannot
        compute."""
        check_parts(plan, self.capabilities)
        with self.platform.current():
            return self.driver.launch(plan)

    def check(self) -> None:
        """Raise ``RankError`` if an operation of the ranks has failed in a step that was replayed,
        or has shown that they differ. Called after each message to other ranks."""
        if self._collectives is not None:
            self._collectives.check()
            if self._driver is not None:
                self._driver.runner.machine.sampler.vocabulary.check()

    def waited(self) -> Waited:
        """What this worker has waited for other ranks."""
        return Waited()

    def place(self) -> RankPlace:
        """Where this worker computes, and the memory that it uses."""
        return place_of(self.platform)

    def preview(self, ticket: Pending) -> Column | None:
        """Sample a step before its grammar masks are ready; ``None`` if impossible."""
        return self.driver.preview(ticket)

    def sample(self, ticket: Pending, masks: Masks | None) -> None:
        """Start sampling for a step that waited for its masks."""
        with self.platform.current():
            self.driver.sample(ticket, masks)

    def collect(self, ticket: Pending) -> StepResult:
        """Block until a launched step is done and return its results."""
        return self.driver.collect(ticket)

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Methods that ``call`` can run, by name."""
        methods: dict[str, Callable[..., Any]] = {"profile": self._profile}
        for feature in self._features:
            methods.update(feature.methods)
        return methods

    def call(self, name: str, *args: Any) -> Any:
        """Run a method by name, between two steps. Raises ``ConfigError`` if the name is
        unknown."""
        method = self.methods.get(name)
        if method is None:
            raise ConfigError(
                f"worker method {name!r:.80} is unknown; this worker has: {', '.join(self.methods)}"
            )
        with self.platform.current():
            return method(*args)

    def shutdown(self) -> None:
        """Free the model and its memory. A second call does nothing."""
        self._profiler.close()
        self._stop_pages()
        for feature in self._features:
            feature.shutdown()
        if self._driver is not None:
            self._driver.runner.free()
        self._driver, self._features = None, ()

    # -- helpers

    def _make_driver(self, machine: Machine, model: Model) -> Driver:
        return Driver(self._make_runner(machine, model), self._failures)

    def _make_runner(self, machine: Machine, model: Model) -> Runner:
        config, longest = self.config, self.config.scheduler.max_model_len
        if self._pooling is None:
            return Runner(machine, longest)
        head = load_head(self._pooling, self._info, config.model, str(self.platform.device))
        return PoolingRunner(machine, longest, head)

    def _lay_out(self, model: Model) -> tuple[list[LayerCache], KVLayout]:
        """Returns what each layer keeps in the KV pool, and how the layers share the pool."""
        layers = self._as_stored(model.cache_spec)
        if not isinstance(model, NativeDecoder) or model.stage.count == 1:
            return layers, self._layout_of(layers)
        whole = self._as_stored(model.whole_cache_spec)
        layout = self._layout_of(whole)
        return layers, part_of_layout(layout, whole, layers, self.config.block_size)

    def _as_stored(self, layers: Sequence[LayerCache]) -> list[LayerCache]:
        stored = stored_as(layers, self._kv_dtype)
        return with_state_dtype(stored, self.config.cache.mamba_ssm_cache_dtype, self._info.hf)

    def _layout_of(self, layers: list[LayerCache]) -> KVLayout:
        """How all layers of a model share the KV pool."""
        config, sched = self.config, self.config.scheduler
        keeps_all = any(feature.reads_first_group for feature in self._features)
        if keeps_all and all(layer.window for layer in layers if isinstance(layer, PagedKV)):
            logger.info(
                "all layers of the model have windows, but keep the KV of all tokens: the draft "
                "model needs a block for each of them"
            )
            return one_group(layers, config.block_size)
        layout = make_layout(
            layers,
            block_size=config.block_size,
            max_num_batched_tokens=sched.max_num_batched_tokens,
            max_model_len=sched.max_model_len,
        )
        padded = padding(layers, layout, config.block_size)
        if padded:
            logger.info("%.1f %% of each KV block is padding, on average", 100 * padded)
        return layout

    def _all_agree(self, is_so: bool) -> bool:
        """True if ``is_so``, which is measured and may differ, is true on all ranks."""
        if self._collectives is None:
            return is_so
        votes = torch.tensor([is_so], dtype=torch.uint8, device=self.platform.device)
        return bool(self._collectives.all_gather(votes).all())

    def _affordable_drafts(self) -> int:
        """The most drafts per decode for which there is memory for copies of recurrent states."""
        config, platform = self.config, self.platform
        share = config.gpu.gpu_memory_utilization
        if platform.shares_memory:
            share = config.cache.memory_utilization
        free = platform.free_and_total()[0] * share
        return most_drafts(config, state_bytes(self._layers), free)

    def _block_bytes(self) -> int:
        """Bytes of one KV block, including what features store per block."""
        size = self.config.block_size
        return self.layout.block_bytes + sum(f.block_bytes(size) for f in self._features)

    def _stop_pages(self) -> None:
        if self._prefault is not None:
            self._prefault.stop()
            self._prefault = None

    def _make_kv(self, num_blocks: int) -> None:
        self._stop_pages()
        machine = self.driver.runner.machine
        machine.kv.clear()
        if machine.recorder is not None:
            machine.recorder.forget()
        machine.kv[:] = make_kv_cache(
            self._layers,
            self.layout,
            num_blocks,
            self.config.block_size,
            dtype=self._kv_dtype,
            zeros=self.platform.zeros,
        )
        enter_states(machine.kv, machine.states)
        for feature in self._features:
            feature.allocate(num_blocks)

    def _graph_sizes(self) -> tuple[list[int], list[int]]:
        """Sizes of the graphs to record: rows of decode steps, tokens of steps with prompts."""
        gpu, sched = self.config.gpu, self.config.scheduler
        if self._pooling is not None or not self.driver.runner.machine.model.can_be_recorded:
            return [], []
        sizes = graph_sizes(gpu, sched.max_num_seqs)
        return sizes, mixed_sizes(gpu, sched.max_num_batched_tokens, self._most_mixed)

    def _record(self, runner: Runner) -> None:
        sizes, mixed = self._graph_sizes()
        if self._pooling is not None:
            return
        if not runner.machine.model.can_be_recorded and not self.config.gpu.enforce_eager:
            logger.info(
                "steps of this model are launched kernel by kernel, without graphs: its experts or "
                "its implementation in transformers need the host"
            )
            return
        started = time.perf_counter()
        with explain_shortage(self.platform, "decode steps were recorded"):
            runner.capture(sizes, mixed)
        if sizes:
            seconds = time.perf_counter() - started
            counts = (len(sizes), len(mixed))
            logger.info("decodes of %d sizes, mixed steps of %d recorded: %.1f s", *counts, seconds)

    def _profile(self, what: str) -> list[str] | None:
        """Start or stop a profiler trace, as ``what`` says. Returns the files written by a stopped
        trace."""
        if what == "stop":
            return self._profiler.stop()
        if what != "start":
            raise ConfigError(f"profile {what!r:.80} is not known; there are: start, stop")
        self._profiler.start()
        return None


def _last(sizes: list[int], num: int) -> list[int]:
    """The last ``num`` of these sizes."""
    return sizes[max(0, len(sizes) - num) :]


def cpu_level() -> str:
    """Name of the instruction set that the CPU kernels use. Raises ``ConfigError`` if the requested
    one is unknown or unsupported."""
    try:
        isa.requested()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return isa.LEVEL


def make_worker(
    config: ResolvedConfig,
    info: ModelInfo,
    features: Sequence[Feature] = (),
    failures: Failures | None = None,
    pooling: PoolingSpec | None = None,
) -> ModelWorker:
    """Create the worker of the configured device. Raises ``ConfigError``."""
    platform = make_platform(resolve_device(config.device))
    return ModelWorker(config, info, platform, features, failures, pooling)


def make_recorder(model: Model, platform: Platform, config: ResolvedConfig) -> Recorder | None:
    """Create the recorder of CPU steps; ``None`` on a GPU, which has CUDA graphs, and with
    ``enforce_eager``."""
    if not platform.shares_memory or config.gpu.enforce_eager:
        return None
    is_native = isinstance(model, NativeDecoder)
    return Recorder(most_mixed=MOST_MIXED if is_native and takes_tiles(model.dtype) else 0)


def make_machine(
    model: Model,
    platform: Platform,
    config: ResolvedConfig,
    layers: Sequence[LayerCache],
    layout: KVLayout,
    features: Sequence[Feature] = (),
) -> Machine:
    """Create the objects that compute steps. The list of KV tensors is empty until ``allocate``."""
    sched, block_size = config.scheduler, config.block_size
    num_seqs, max_model_len = sched.max_num_seqs, sched.max_model_len
    live = LiveSeqs(num_seqs, max_model_len)
    shared = layout.windows, layout.scales
    copies = num_copies(config) if state_bytes(layers) else 0
    slots = Slots(platform, num_seqs, max_model_len, block_size, *shared, num_copies=copies)
    staging = Staging(platform, num_seqs, sched.max_num_batched_tokens, sched.num_steps_in_flight)
    return Machine(
        model=model,
        kv=[],
        platform=platform,
        live=live,
        slots=slots,
        sampler=Sampler(
            platform.upload,
            slots.tables,
            vocabulary_of(model, model.vocab_size, platform.zeros),
            config.logits_processors,
        ),
        batches=Batches(
            platform,
            slots,
            live,
            staging,
            layer_groups=groups_of(layers, layout),
            batch_invariant=config.model.batch_invariant is True,
        ),
        features=tuple(features),
        recorder=make_recorder(model, platform, config),
        states=make_states(layers, num_seqs * copies, platform.zeros) if copies else (),
    )
