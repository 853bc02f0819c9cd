"""The front end of one core: takes checked requests and returns outputs for users.

``submit``, ``step`` and ``abort`` must be called from one thread: the caller's in the synchronous
engine, the engine's own in the asynchronous one. Any thread may use ``inputs``.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

from engine.config.decide import GIB, Decided
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig, read_model_info
from engine.config.pooling import PoolingSpec, read_pooling
from engine.core.client import CoreClient
from engine.errors import ConfigError, EngineDeadError, RequestError
from engine.frontend.adapters import Adapters
from engine.frontend.contents import Contents, Processing
from engine.frontend.output import OutputProcessor
from engine.frontend.picture_workers import PooledPictures
from engine.frontend.pooled_text import PooledOutputs
from engine.frontend.processing import ThreadedPictures
from engine.frontend.prompt import InputProcessor, ModelLimits, Submission
from engine.frontend.recommended import recommended_sampling
from engine.frontend.text_workers import TextPool
from engine.hub.fetch import fetched
from engine.messages.requests import CoreOutputs, RequestOutput
from engine.messages.stats import SchedulerStats
from engine.messages.structured import ObjectRules
from engine.messages.wire import Welcome
from engine.observe.guard import Failures, ObserverGuard, with_failures
from engine.observe.logs import LOST, set_up_logging
from engine.observe.stats_log import StatsLog
from engine.pictures.families import sees
from engine.pictures.sources import MediaSources
from engine.rpc.launch import open_core
from engine.text.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from engine.pictures.prompts import Pictures

PauseScope = Literal["all", "new"]

TEXT_SECONDS = 0.1  # how long ``step`` waits for texts


class Session:
    """Front end of one core: tokenizer, request checks, outputs and statistics log."""

    def __init__(  # noqa: PLR0913
        self,
        config: EngineConfig,
        client: CoreClient,
        tokenizer: Tokenizer | None,
        clock: Callable[[], float],
        pool: TextPool | None = None,
        recommended: Mapping[str, Any] | None = None,
        pooling: PoolingSpec | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """Set up the front end of ``client``. recommended: default values for
        ``SamplingParams``; pooling: how the model pools; pictures: puts pictures into prompts, if
        the model sees."""
        self.client = client
        self.model_path = config.model.model
        """Directory of the model, or of those of its files that this process uses."""
        self.tokenizer = tokenizer
        self.inputs = InputProcessor(
            tokenizer,
            replace(_limits(config, client.decided, tokenizer), pooling=pooling),
            clock,
            client.id_prefix,
            pool,
            pictures,
        )
        self.adapters = Adapters(client)
        self.outputs = OutputProcessor(tokenizer)
        if pool is not None:
            assert tokenizer is not None, "text processes need a tokenizer"
            self.outputs = PooledOutputs(tokenizer, pool, client.wake)
        self.contents: Contents | None = None
        if pictures is not None:
            threaded = ThreadedPictures(pictures, shares=client.reads_shared_memory)
            processing: Processing = threaded
            if pool is not None and pool.pictures.workers:
                processing = PooledPictures(pool.pictures, threaded)
            cache_bytes = int(config.media.mm_processor_cache_gb * GIB)
            self.contents = Contents(client, processing, self.wake, cache_bytes=cache_bytes)
            self.outputs.on_ended = self.contents.end
        self.recommended = recommended or {}
        self._pool = pool
        self._batches: deque[CoreOutputs] = deque()  # received and not yet processed
        self.clock = clock
        self.failures = Failures()
        """Counts failures of observers (logs, traces, metrics) in this process."""
        self._stats_guard = ObserverGuard(
            self.failures, "stats_log", "no figures are logged", stops=True
        )
        self._stats_log: StatsLog | None = None
        if not config.disable_log_stats:
            self._stats_log = StatsLog(self.outputs.counts, client.latest_stats, clock)

    @classmethod
    def open(cls, config: EngineConfig) -> Session:
        """Load the tokenizer, then start the core or connect to it. Downloads the model first if
        needed; for a core elsewhere, only the files that the front end uses. Raises
        ``ConfigError``."""
        set_up_logging(config.log_level)
        on_ray = config.core.data_parallel_backend == "ray"
        is_here = not (config.core.core_addresses or on_ray)
        has_text = not config.model.skip_tokenizer_init
        model = fetched(config.model, for_core=is_here, for_text=has_text)
        requested, config = config, replace(config, model=model)
        recommended = recommended_sampling(model)
        sources = MediaSources(config.media)
        tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(config.model)
        pool = None
        if tokenizer is not None and config.tokenizer_pool_size:
            pool = TextPool(
                config.model, config.tokenizer_pool_size, pictures=_picture_settings(config)
            )
        try:
            client = open_on_ray(requested) if on_ray else open_core(config)
            if pool is not None:
                pool.wait_until_ready()
        except BaseException:
            if pool is not None:
                pool.close()
            raise
        pooling = _pooling(model, client.decided.capabilities)
        pictures = _pictures(config, client.decided.capabilities, tokenizer, sources)
        return cls(config, client, tokenizer, time.monotonic, pool, recommended, pooling, pictures)

    @property
    def has_unfinished(self) -> bool:
        return self.outputs.num_unfinished > 0

    def submit(self, submission: Submission) -> None:
        """Submit all sequences of a checked request to the core. If the core refuses one of them,
        raises its error and submits none."""
        for error in self.submit_all([submission]).values():
            raise error

    def submit_all(self, submissions: Sequence[Submission]) -> dict[int, Exception]:
        """Submit checked requests to the core in one message. Returns the errors of refused
        requests by index. No sequence of a refused request remains in the core."""
        errors: dict[int, Exception] = {}
        registered: dict[int, Submission] = {}
        for place, submission in enumerate(submissions):
            try:
                self.outputs.register(submission)
            except RequestError as error:
                errors[place] = error
            else:
                registered[place] = submission
        return errors | self._add(registered)

    def _add(self, submissions: dict[int, Submission]) -> dict[int, Exception]:
        """Send registered requests to the core. Returns the errors of refused requests, by their
        keys in ``submissions``."""
        owners = [place for place, each in submissions.items() for _ in each.requests]
        requests = [request for each in submissions.values() for request in each.requests]
        try:
            refused = self.client.add_all(requests)
        except BaseException:  # an interrupt: the core may have taken some
            core_ids = [i for each in submissions.values() for i in self.outputs.withdraw(each)]
            with suppress(EngineDeadError):
                self.client.abort(core_ids)
            raise
        errors: dict[int, Exception] = {}
        for index in sorted(refused):
            errors.setdefault(owners[index], refused[index])
        if self.contents is not None:
            for place in submissions.keys() - errors.keys():
                self.contents.start(submissions[place])
        core_ids = [i for place in errors for i in self.outputs.withdraw(submissions[place])]
        not_taken = {requests[index].request_id for index in refused}
        if taken := [core_id for core_id in core_ids if core_id not in not_taken]:
            self.client.abort(taken)
        return errors

    def step(self) -> list[RequestOutput]:
        """Run one step of the core and return outputs for users.

        Steps that a core in another process has finished meanwhile are returned one per call. With
        text processes, outputs may come some calls later, with their texts; if nothing but texts is
        missing, a call waits up to ``TEXT_SECONDS`` for them."""
        outputs: list[RequestOutput] = []
        if self.contents is not None:
            with suppress(EngineDeadError):  # raised below
                self.contents.deliver()
        if self.outputs.is_only_text_missing:
            self.outputs.wait_for_texts(TEXT_SECONDS)
        else:
            if not self._batches:
                self._batches.extend(self._step_core())
            if self._batches:
                outputs = self.outputs.process(self._batches.popleft())
        outputs += self.outputs.take_texts()
        with suppress(EngineDeadError):  # a later call raises it; these outputs are returned first
            self._stop_in_core()
        if self._stats_log is not None:
            self._stats_guard.run(self._log_stats, self._stats_log)
        return outputs

    def stats(self) -> SchedulerStats | None:
        """The scheduler's statistics, with the number of failures of observers."""
        return with_failures(with_failures(self.client.stats(), self.failures), LOST)

    def wake(self) -> None:
        """Let a blocked ``step`` return soon. Thread-safe."""
        self.outputs.wake()
        self.client.wake()

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Abort requests; unknown ids are ignored. Returns their last outputs, except those whose
        texts are still being made: ``step`` returns them later."""
        outputs = self.outputs.abort(request_ids, self.clock())
        self._stop_in_core()
        return outputs

    def drop(self, request_ids: Iterable[str]) -> None:
        """Stop these requests without further output; unknown ids are ignored."""
        self.outputs.drop(request_ids, self.clock())
        self._stop_in_core()

    def reset_contents(self) -> None:
        """Drop processed pictures that no request uses."""
        if self.contents is not None:
            self.contents.reset()

    def shutdown(self) -> None:
        """Shut down the core and the text processes. A second call does nothing."""
        self.inputs.texts.close()
        if self.contents is not None:
            self.contents.close()
        self.client.shutdown()
        if self._pool is not None:
            self._pool.close()

    def _log_stats(self, stats_log: StatsLog) -> None:
        with suppress(EngineDeadError):
            stats_log.after_step(is_idle=not self.has_unfinished)

    def _step_core(self) -> list[CoreOutputs]:
        """Run a step of the core and return its outputs. If the core has died, return [] while
        texts of earlier steps are still to come, then raise."""
        try:
            return self.client.step()
        except EngineDeadError:
            if not self.outputs.wait_for_texts(TEXT_SECONDS):
                raise
            return []

    def _stop_in_core(self) -> None:
        """Abort sequences in the core that this process has ended, for instance at a stop string.
        If an interrupt ends this call, the next call repeats it."""
        if ended := self.outputs.ended_here():
            self.client.abort(ended)
            self.outputs.forget_ended_here()


def _limits(
    config: EngineConfig, decided: Decided | Welcome, tokenizer: Tokenizer | None
) -> ModelLimits:
    eos = list(decided.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    return ModelLimits(
        max_model_len=decided.max_model_len,
        vocab_size=decided.vocab_size,
        eos_token_ids=tuple(i for i in dict.fromkeys(eos) if 0 <= i < decided.vocab_size),
        scheduling_policy=config.scheduler.scheduling_policy,
        seed=config.model.seed,
        object_rules=ObjectRules(config.additional_properties, config.property_order),
        has_adapters="adapters" in decided.capabilities,
    )


def open_on_ray(config: EngineConfig) -> CoreClient:
    """Start the cores on a Ray cluster. Raises ``ConfigError`` if Ray is not installed."""
    try:
        from engine.cluster.cores.launch import start_cores_on_ray
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"data_parallel_backend is 'ray', and {error.name} is not installed: pip install "
            "metronome-engine[ray]"
        ) from error
    return start_cores_on_ray(config)


def _pooling(model: ModelConfig, capabilities: Sequence[str]) -> PoolingSpec | None:
    """How the model pools; ``None`` if it does not, or if its directory is not on this machine."""
    if "pooling" not in capabilities or not Path(model.model).is_dir():
        return None
    if model.runner == "auto":  # the core may have been started with another value
        model = replace(model, runner="pooling")
    return read_pooling(read_model_info(model.model), model, logs=False)


def _pictures(
    config: EngineConfig,
    capabilities: Sequence[str],
    tokenizer: Tokenizer | None,
    sources: MediaSources,
) -> Pictures | None:
    """What puts pictures into prompts; ``None`` if the core takes none, or if the model's directory
    is not on this machine."""
    if "media" not in capabilities or not Path(config.model.model).is_dir():
        return None
    info = read_model_info(config.model.model)
    if not sees(info):
        return None
    try:
        from engine.pictures.prompts import Pictures
    except ModuleNotFoundError:  # a core elsewhere may have Pillow; requests name it
        return None
    return Pictures(info, tokenizer, config.media, sources)


def _picture_settings(config: EngineConfig) -> dict[str, Any] | None:
    """Settings of the image processor for processes that decode pictures; ``None`` if none do."""
    model = config.model.model
    if config.media.most_pictures == 0 or not Path(model).is_dir() or find_spec("PIL") is None:
        return None
    return dict(config.media.mm_processor_kwargs or {}) if sees(read_model_info(model)) else None


Handler = Callable[[int, FrameType | None], object]


class HeldInterrupt:
    """Context manager that delays ``KeyboardInterrupt`` until its block ends.

    Does nothing outside the main thread, or if the program handles interrupts itself."""

    def __init__(self) -> None:
        self._held: Handler | None = None  # the previous handler
        self._is_noted = False

    def __enter__(self) -> HeldInterrupt:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            # Only Python's handler and that of the command raise KeyboardInterrupt.
            can_be_held = getattr(handler, "can_be_held", handler is signal.default_int_handler)
            if callable(handler) and can_be_held:
                self._held = handler
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._held is not None:
            signal.signal(signal.SIGINT, self._held)
        if error is None:
            self.raise_held()

    def raise_held(self) -> None:
        """Raise the ``KeyboardInterrupt`` that was delayed so far, if there is one."""
        if self._is_noted:
            self._is_noted = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_noted = True
