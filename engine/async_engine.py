"""AsyncLLMEngine: an engine for asyncio tasks, with a thread that steps the core.

    task ── generate() ── checks the prompt, opens a Stream ──┐
    task ── ...                                               ├─> commands ─> thread: core, Session
    task <── Stream, merges outputs for slow readers <────────┴── one wake-up per step

The thread executes commands (add, abort, utility calls) in their order between two steps, and
sleeps while there is no work. Only the thread uses the ``Session``; each ``Stream`` belongs to one
event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple, Unpack

from engine.config.args import EngineArgs
from engine.errors import ConfigError, EngineDeadError
from engine.frontend.async_adapters import AsyncAdapters
from engine.frontend.async_pictures import AsyncPictures
from engine.frontend.async_texts import AsyncTexts
from engine.frontend.async_watching import AsyncWatching
from engine.frontend.deaths import death_by, log_death
from engine.frontend.encoding import Prompt, TextPrompt, has_media
from engine.frontend.pace import QueueLimits, QueuePace
from engine.frontend.pooling import PooledTexts, checked_params, pooled_output
from engine.frontend.prompt import RequestOptions, Submission
from engine.frontend.session import PauseScope, Session
from engine.frontend.streams import Deliveries, Delivery, OutputReader, Stream
from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from engine.messages.requests import (
    FinishedRequest,
    RequestOutput,
    as_request_ids,
)
from engine.messages.stats import SchedulerStats
from engine.messages.structured import ObjectRules
from engine.observe.guard import Failures, ObserverGuard
from engine.observe.histograms import Latencies
from engine.observe.stats_log import TokenCounts
from engine.text.chat import Messages

JOIN_SECONDS = 60.0  # a shutdown waits this long for the current step
ALIVE_SECONDS = 1.0  # interval of checks on an idle core
HEALTH_SECONDS = 10.0  # timeout of a health check


class AsyncLLMEngine(AsyncAdapters, AsyncTexts, AsyncWatching):
    """The engine for servers: any number of tasks may call ``generate``.

    Times in outputs, ``arrival_time`` and ``deadline`` are seconds of ``time.monotonic``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        session.inputs.texts.prepare()
        self.pictures = AsyncPictures(session.inputs)
        self._changed = threading.Condition()
        # Shared by tasks and the thread, guarded by the condition.
        self._commands: deque[Command] = deque()
        self._open: set[Stream] = set()
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._paused: PauseScope | None = None
        self._num_arriving = 0  # requests not yet added to the session
        self._queue_limits: QueueLimits | None = None
        # Used only by the thread.
        self._live: dict[str, Stream] = {}
        self._observers: list[tuple[Observer, ObserverGuard]] = []
        self._on_death: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLMEngine:
        """Load model and tokenizer. Raises ``ConfigError`` for options that cannot work."""
        return cls(Session.open(args.create_config()))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request and yield its outputs. A slow reader gets outputs of several steps merged.

        Leaving the loop early, or cancelling the task, aborts the request and frees its id.
        Raises ``RequestError`` for an invalid request, its subclass ``RefusedError`` if the queue
        is full, and ``EngineDeadError`` if the core has died. ``options``: as for
        ``LLMEngine.add_request``."""
        reader = await self.open(prompt, sampling_params, request_id, **options)
        async with contextlib.aclosing(reader.outputs()) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None,
        request_id: str,
        chat_options: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a conversation and yield its outputs, as ``generate`` does for a prompt.
        ``chat_options``: options of ``render_chat``."""
        prompt = await self.render_chat(messages, **(chat_options or {}))
        source = self.generate(prompt, sampling_params, request_id, **options)
        async with contextlib.aclosing(source) as outputs:
            async for output in outputs:
                yield output

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Run a pooled request and yield its only output. A text gets the model's default prompt.
        Otherwise like ``generate``."""
        params = self.pooled.resolved(checked_params(pooling_params))
        (prompt,) = self.pooled.with_prompts([prompt])
        reader = await self.open(prompt, params, request_id, **options)
        async with contextlib.aclosing(reader.outputs()) as outputs:
            async for output in outputs:
                yield pooled_output(output, PoolingOutput)

    async def open(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> OutputReader:
        """Submit a request like ``generate``, but return an ``OutputReader``: call its ``next``
        until an output is ``finished``, then its ``close``."""
        self._check_alive()
        self.check_room()
        inputs, began = self._session.inputs, self._session.clock()
        started = inputs.texts.start(prompt, sampling_params)
        if started is not None:  # other tasks run meanwhile; ``process`` raises its error
            options.setdefault("arrival_time", began)
            # A shutdown cancels texts that no thread has started; this must not cancel the task.
            await asyncio.gather(asyncio.wrap_future(started), return_exceptions=True)
            self._check_alive()
        if options.get("lora_request") is not None:
            request = options["lora_request"]
            await self._load_adapter(partial(self._session.adapters.needed_for, request))
        if has_media(prompt):
            options.setdefault("arrival_time", began)
            prompt = await self.pictures.loaded(prompt)
        process = partial(inputs.process, request_id, prompt, sampling_params, options, started)
        submission = await inputs.texts.elsewhere(process) if has_media(prompt) else process()
        (reader,) = self._open_streams([submission])
        return reader

    async def open_together(
        self,
        request_id: str,
        prompts: Sequence[Prompt],
        params: Sequence[PoolingParams],
        **options: Unpack[RequestOptions],
    ) -> list[OutputReader]:
        """Submit several pooled requests at once, or none if one of them is wrong. They count as
        one request for ``limit_queue``. Close every reader. Otherwise like ``open``."""
        self._check_alive()
        self.check_room()
        inputs = self._session.inputs
        options.setdefault("arrival_time", self._session.clock())
        process = partial(inputs.process_together, request_id, prompts, params, options)
        if inputs.texts.takes_long(prompts):
            return self._open_streams(await inputs.texts.elsewhere(process))
        return self._open_streams(process())

    async def render_chat(self, messages: Messages, **options: Any) -> TextPrompt:
        """Render a conversation to a prompt without blocking other tasks. ``options``: as for
        ``Tokenizer.apply_chat_template``. Raises ``RequestError`` if it cannot be rendered."""
        self.get_tokenizer()  # raises ConfigError without one
        self.check_room()
        render = self._session.inputs.render
        (prompt,) = await asyncio.to_thread(render, [messages], options)
        return prompt

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort one or several requests; unknown ids are ignored. Their readers get a last output
        with finish reason ``"abort"``."""
        await self._call(partial(self._abort, as_request_ids(request_id)))

    async def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler: running, waiting, KV use, prefix hits."""
        stats: SchedulerStats | None = await self._call(self._session.stats)
        return stats

    async def check_health(self, timeout: float = HEALTH_SECONDS) -> None:
        """Wait until the core answers, which it does between two steps.

        Raises ``EngineDeadError`` if the core has died, and ``TimeoutError`` if it does not answer
        within ``timeout`` seconds, for example during a long step."""
        try:
            async with asyncio.timeout(timeout):
                await self._call(partial(self._session.client.call, "echo", None))
        except TimeoutError:
            raise TimeoutError(f"the core has not answered within {timeout:g} s") from None

    def add_observer(self, observer: Observer) -> None:
        """Call ``observer`` with a summary of each request that ends from now on.

        Requests that were refused, or that a core's death ended, are not reported. The engine's
        thread makes the call, in the context (``contextvars``) of the task that reads the request,
        and waits for it. An observer's errors are counted in ``failures``; the first is logged.
        """
        with self._changed:
            self._check_alive()
            self._command(partial(self._observe, observer))

    def on_death(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` in the engine's thread when the engine dies, or now if it has died."""
        with self._changed:
            self._on_death = callback
            is_dead = self._death is not None
        if is_dead:
            callback()

    def end_restarts(self) -> None:
        """Stop restarting cores that die, because the engine is about to end."""
        self._session.client.end_restarts()

    @property
    def failures(self) -> Failures:
        """Counters of errors that observers raised in this process. Other modules may add
        theirs."""
        return self._session.failures

    def measure(self) -> Latencies:
        """Latency histograms of requests. The first call starts the measurement. Thread-safe."""
        with self._changed:
            return self._session.outputs.measure()

    @property
    def counts(self) -> TokenCounts:
        """Numbers of tokens and requests since the start."""
        return self._session.outputs.counts

    @property
    def num_kv_blocks(self) -> int:
        """Number of blocks in the KV pool of one core."""
        return self._session.client.decided.num_kv_blocks

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._session.client.decided.block_size

    async def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Drop all cached prefixes. Returns False and changes nothing while requests use them.

        ``reset_running``: preempt running requests first; they compute their KV again.
        """
        call = partial(self._session.client.call, "reset_prefix_cache", reset_running)
        return bool(await self._call(call))

    async def reset_encoder_cache(self) -> None:
        """Drop encoder outputs of pictures; running requests keep theirs."""
        await self._call(partial(self._session.client.call, "reset_encoder_cache"))

    async def reset_mm_cache(self) -> None:
        """Drop processed pictures that no request uses."""
        await self._call(self._session.reset_contents)

    async def pause(self, what: PauseScope = "all") -> None:
        """Stop computing until ``resume``; with ``"new"``, running requests continue, and only the
        others wait.

        Requests may be added and aborted during a pause; deadlines still apply."""
        await self._call(partial(self._session.client.call, "pause", what))
        self._paused = what

    async def resume(self) -> None:
        """End a pause, if there is one."""
        await self._call(partial(self._session.client.call, "resume"))
        self._paused = None

    @property
    def paused(self) -> PauseScope | None:
        """The scope of the pause that this engine requested, ``None`` if it is not paused. Pauses
        requested by other clients of the core are not included."""
        return self._paused

    async def start_profile(self) -> None:
        """Record a torch profile of the worker until ``stop_profile``.

        Every step adds tens of kilobytes. Raises ``ConfigError`` if the engine was started without
        ``torch_profiler_dir``, or if a profile is already being recorded.
        """
        await self._call(partial(self._session.client.call, "profile", "start"))

    async def stop_profile(self) -> list[str]:
        """Stop the profile and return the paths of its traces, one or more for each core.

        Writing a long profile takes seconds, during which the engine computes nothing. Raises
        ``ConfigError`` if no profile is being recorded.
        """
        return list(await self._call(partial(self._session.client.call, "profile", "stop")))

    @property
    def pooled(self) -> PooledTexts:
        """Prepares the texts of pooled requests."""
        return self._session.inputs.pooled

    @property
    def runner(self) -> Literal["generate", "pooling"]:
        """Whether requests return text, or vectors and scores."""
        is_pooling = "only_pooling" in self._session.client.decided.capabilities
        return "pooling" if is_pooling else "generate"

    @property
    def model_path(self) -> str:
        """Directory of the model, or of those of its files that this process uses."""
        return self._session.model_path

    @property
    def recommended(self) -> Mapping[str, Any]:
        """Default sampling parameters from the model's generation_config.json, keyed by field of
        ``SamplingParams``. Requests get them only if the caller passes them on."""
        return self._session.recommended

    @property
    def object_rules(self) -> ObjectRules:
        """Defaults for JSON objects in schemas of structured outputs: whether an object may have
        properties that its schema does not list, and the order of properties."""
        return self._session.inputs.object_rules

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and output together."""
        return self._session.inputs.max_model_len

    @property
    def is_running(self) -> bool:
        """False after the core has died or was shut down."""
        return self._death is None and not self._is_closing

    def give_up(self, error: Exception, request_ids: Iterable[str] | None = None) -> int:
        """Stop these requests (``None``: all) and raise ``error`` in their readers.

        Unread outputs are discarded. Does not wait for the core, so it works if the core hangs.
        Returns the number of requests. Call it in the readers' event loop.
        """
        wanted = None if request_ids is None else frozenset(as_request_ids(request_ids))
        with self._changed:
            streams = [
                each
                for each in self._open
                if not each.is_finished and (wanted is None or each.request_id in wanted)
            ]
            for stream in streams:
                stream.drop(error)
                if self._death is None:
                    self._command(partial(self._leave, stream))
        return len(streams)

    def unread_bytes(self) -> dict[str, int]:
        """Approximate bytes of unread outputs, for each request id that has unread outputs. Call it
        in the readers' event loop."""
        with self._changed:
            streams = list(self._open)
        sizes = {stream.request_id: stream.num_unread_bytes for stream in streams}
        return {name: size for name, size in sizes.items() if size}

    def limit_queue(
        self, max_requests: int, max_seconds: float | None = None, *, num_seats: int = 0
    ) -> None:
        """Refuse new requests while the queue is too long.

        The queue is too long if it has ``max_requests`` waiting requests, or if a new request would
        probably wait more than ``max_seconds`` for its first token. num_seats: maximum number of
        running requests, 0 if unknown. Raises ``ConfigError`` after the first request.
        """
        if self._open:
            raise ConfigError("limit_queue must be called before the first request")
        pace = self._session.outputs.pace = QueuePace(num_seats)
        self._queue_limits = QueueLimits(pace, self.counts, max_requests, max_seconds)

    def check_room(self) -> None:
        """Raise ``RefusedError`` if ``limit_queue`` would refuse a request now."""
        if self._queue_limits is not None:
            self._queue_limits.check(self._num_arriving)

    def shutdown(self, timeout: float = JOIN_SECONDS) -> None:
        """Stop after the current step and free the model. A second call does nothing.

        Open requests raise ``EngineDeadError``. Waits at most ``timeout`` seconds for the step.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            self._session.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        self.pictures.close()
        atexit.unregister(self.shutdown)

    # Called in tasks.

    def _open_streams(self, submissions: Sequence[Submission]) -> list[OutputReader]:
        loop = asyncio.get_running_loop()
        streams = [Stream(loop, each.request_id, each.params.output_kind) for each in submissions]
        with self._changed:
            self._check_alive()
            self._open.update(streams)
            self._num_arriving += len(streams)
            self._commands += map(Arrival, submissions, streams)
            self._wake()
        return [OutputReader(stream, self._close_stream) for stream in streams]

    def _close_stream(self, stream: Stream) -> None:
        with self._changed:
            self._open.remove(stream)
            if not stream.is_finished and self._death is None:
                self._command(partial(self._leave, stream))

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the engine's thread between two steps. Returns its result."""
        future: Future[Any] = Future()
        with self._changed:
            self._check_alive()
            self._command(partial(_run_for, future, function))
        return await asyncio.wrap_future(future)

    def _post(self, command: Callable[[], None]) -> None:
        with self._changed:
            self._command(command)

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        self._changed.notify()
        self._session.wake()  # the thread may be waiting for outputs

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death.__cause__
        if self._is_closing:
            raise EngineDeadError("the engine was shut down")

    # Called in the engine's thread.

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._take_commands():
                if self._session.has_unfinished:
                    self._deliver(self._session.step())
        except BaseException as error:  # waiting tasks must get every error
            cause = error
        self._die(cause)

    def _take_commands(self) -> bool:
        """Execute all queued commands; if the core has no work, first wait for a command. Returns
        False if the engine is shutting down."""
        with self._changed:
            while not (self._commands or self._is_closing or self._session.has_unfinished):
                if not self._changed.wait(ALIVE_SECONDS):
                    self._session.client.check_alive()
        arrivals: list[Arrival] = []
        for _ in range(len(self._commands)):
            if self._is_closing:
                break
            if not isinstance(self._commands[0], Arrival):
                self._submit(arrivals)
                arrivals = []
            command = self._commands.popleft()  # one at a time: an error keeps the later ones
            if isinstance(command, Arrival):
                arrivals.append(command)
            else:
                command()
        self._submit(arrivals)
        return not self._is_closing

    def _submit(self, arrivals: list[Arrival]) -> None:
        """Send new requests to the core. If it refuses a request, only that request's reader gets
        an error."""
        if not arrivals:
            return
        try:
            errors = self._session.submit_all([arrival.submission for arrival in arrivals])
        finally:
            with self._changed:
                self._num_arriving -= len(arrivals)
        for place, (submission, stream) in enumerate(arrivals):
            error = errors.get(place)
            if error is None:
                self._live[submission.request_id] = stream
            else:
                stream.post(partial(stream.fail, error))

    def _leave(self, stream: Stream) -> None:
        """Abort the request of a reader that stopped reading, unless a newer request has its id."""
        if self._live.get(stream.request_id) is stream:
            self._session.drop([stream.request_id])
            del self._live[stream.request_id]

    def _observe(self, observer: Observer) -> None:
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        effect = "it is called again for the next request"
        self._observers.append((observer, ObserverGuard(self.failures, name, effect)))
        self._session.outputs.on_finished = self._notify_observers

    def _notify_observers(self, finished: FinishedRequest) -> None:
        context = self._live[finished.request_id].context
        for observer, guard in self._observers:
            try:
                context.copy().run(observer, finished)
            except BaseException as error:  # an error in this thread would end all requests
                guard.fail(error)

    def _abort(self, request_ids: list[str]) -> None:
        self._deliver(self._session.abort(request_ids))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass each output to its reader, with one wake-up per event loop."""
        batches: Deliveries = {}
        for output in outputs:
            stream = self._live[output.request_id]
            if output.finished:
                del self._live[output.request_id]
            batches.setdefault(stream.loop, []).append((stream, output))
        for batch in batches.values():
            batch[0][0].post(Delivery(batch))

    def _die(self, cause: BaseException | None) -> None:
        death = death_by(cause)
        with self._changed:
            self._death = death
            streams, commands = list(self._open), self._commands
            self._commands = deque()
            is_unexpected = cause is not None and not self._is_closing
            on_death = self._on_death
        for stream in streams:
            stream.post(partial(stream.fail, death))
        if is_unexpected:
            log_death(death)
            if on_death is not None:
                on_death()
        self._session.shutdown()
        for command in commands:  # the closed core raises in them, so waiting tasks get the error
            with contextlib.suppress(Exception):
                if not isinstance(command, Arrival):  # its stream has failed already
                    command()


class Arrival(NamedTuple):
    """A request to add. Successive arrivals are sent to the core in one message."""

    submission: Submission
    stream: Stream


Command = Callable[[], None] | Arrival
Observer = Callable[[FinishedRequest], object]


def _run_for(future: Future[Any], function: Callable[[], Any]) -> None:
    """Run ``function`` and set the future to its result or error. An ``EngineDeadError`` is raised
    as well, because it must end the engine's thread."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
        if isinstance(error, EngineDeadError):
            raise
