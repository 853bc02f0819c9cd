"""AsyncLLMEngine: many tasks, one core that a thread of its own steps.

    task ── generate() ── checks the prompt, opens a Stream ──┐
    task ── ...                                               ├─> commands ─> thread: core, Session
    task <── Stream, merged if its reader is slow <───────────┴── one wake-up per step

Commands (add, abort, utility calls) are taken in order between steps. The thread sleeps on a
condition while there is nothing to do. It alone touches the session; streams belong to their loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Unpack

from engine.config.args import EngineArgs
from engine.core.client import NumCores
from engine.errors import ConfigError, EngineDeadError
from engine.frontend.pace import QueueLimits, QueuePace
from engine.frontend.prompt import Prompt, RequestOptions, Submission, TextPrompt
from engine.frontend.session import PauseScope, Session
from engine.frontend.streams import Reader, Stream
from engine.messages.params import SamplingParams
from engine.messages.requests import (
    FinishedRequest,
    RequestOutput,
    as_request_ids,
)
from engine.messages.stats import SchedulerStats
from engine.messages.structured import ObjectRules
from engine.observe.guard import Failures, Guard
from engine.observe.histograms import Latencies
from engine.observe.stats_log import TokenCounts
from engine.text.chat import Messages
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

JOIN_SECONDS = 60.0  # longest step a shutdown waits for
ALIVE_SECONDS = 1.0  # between two looks at a core with nothing to do
HEALTH_SECONDS = 10.0  # that a core has to answer


class AsyncLLMEngine:
    """The engine for servers: ``generate`` from as many tasks as you like.

    Times in outputs, ``arrival_time`` and ``deadline`` are seconds of ``time.monotonic``.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        session.inputs.texts.prepare()
        self._changed = threading.Condition()
        # Guarded by the condition: what tasks and the thread share.
        self._commands: deque[Command] = deque()
        self._open: set[Stream] = set()
        self._death: EngineDeadError | None = None
        self._is_closing = False
        self._paused: PauseScope | None = None
        self._num_arriving = 0  # requests that the session does not know yet
        self._queue_limits: QueueLimits | None = None
        # Of the thread alone.
        self._live: dict[str, Stream] = {}
        self._observers: list[tuple[Observer, Guard]] = []
        self._on_death: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)
        self._thread.start()
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLMEngine:
        """Load model and tokenizer. Raises ``ConfigError`` for what cannot work."""
        return cls(Session.open(args.create_config()))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as they come; a slow reader gets several steps at once.

        Leaving the loop early, or being cancelled, aborts the request, and its id is free again.
        Raises ``RequestError`` for what is wrong with the request, ``RefusedError`` (one of those)
        if the queue is full, ``EngineDeadError`` if the core has died. Options are those of
        ``LLMEngine.add_request``.
        """
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
        """``generate`` after a conversation; ``chat_options`` are those of ``render_chat``."""
        prompt = await self.render_chat(messages, **(chat_options or {}))
        source = self.generate(prompt, sampling_params, request_id, **options)
        async with contextlib.aclosing(source) as outputs:
            async for output in outputs:
                yield output

    async def open(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str,
        **options: Unpack[RequestOptions],
    ) -> Reader:
        """The same as an object, which must be closed: outputs are what ``next`` returns, until
        one is ``finished``."""
        self._check_alive()
        self.check_room()
        inputs, began = self._session.inputs, self._session.clock()
        started = inputs.texts.start(prompt, sampling_params)
        if started is not None:  # other tasks run meanwhile; ``process`` raises its error
            options.setdefault("arrival_time", began)
            # A shutdown cancels texts that no thread has begun: that is no end of this task.
            await asyncio.gather(asyncio.wrap_future(started), return_exceptions=True)
            self._check_alive()
        submission = inputs.process(request_id, prompt, sampling_params, options, started)
        stream = Stream(asyncio.get_running_loop(), request_id, submission.params.output_kind)
        self._open_stream(submission, stream)
        return Reader(stream, self._close_stream)

    async def render_chat(self, messages: Messages, **options: Any) -> TextPrompt:
        """A conversation as a prompt; other tasks go on meanwhile. ``options`` are those of
        ``Tokenizer.apply_chat_template``. Raises ``RequestError`` if it cannot be rendered."""
        self.get_tokenizer()  # or its ConfigError
        self.check_room()
        render = self._session.inputs.render
        (prompt,) = await asyncio.to_thread(render, [messages], options)
        return prompt

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Stop one request or several; unknown ids do nothing.

        Their readers get a last output with finish reason ``"abort"``.
        """
        await self._call(partial(self._abort, as_request_ids(request_id)))

    async def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler: running, waiting, KV use, prefix hits."""
        stats: SchedulerStats | None = await self._call(self._session.stats)
        return stats

    async def check_health(self, timeout: float = HEALTH_SECONDS) -> None:
        """Return once the core has answered between two steps.

        Raises ``EngineDeadError`` if it has died, ``TimeoutError`` if it has not answered within
        ``timeout`` seconds: it is in a long step, or it hangs.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._call(partial(self._session.client.call, "echo", None))
        except TimeoutError:
            raise TimeoutError(f"the core has not answered within {timeout:g} s") from None

    def add_observer(self, observer: Observer) -> None:
        """Have ``observer`` called with each request that ends from now on: finished, aborted or
        left by its reader, but not one that was refused or whose core has died.

        It is called by the engine's thread, which does nothing else meanwhile, in the context
        (``contextvars``) of the task that reads the request. Its first error is logged, all are
        counted (``observer_failures``), and nothing else comes of them.
        """
        with self._changed:
            self._check_alive()
            self._command(partial(self._observe, observer))

    def on_death(self, callback: Callable[[], object]) -> None:
        """Have ``callback`` called once the engine has died, by its thread; at once if it has."""
        with self._changed:
            self._on_death = callback
            is_dead = self._death is not None
        if is_dead:
            callback()

    def end_restarts(self) -> None:
        """Start no core again that dies from now on: the engine is about to end."""
        self._session.client.end_restarts()

    @property
    def failures(self) -> Failures:
        """How often observers on this side of the core have failed. Others may count there."""
        return self._session.failures

    def measure(self) -> Latencies:
        """Histograms of what steps bring, counted from the first call on; any thread may read."""
        with self._changed:
            return self._session.outputs.measure()

    @property
    def counts(self) -> TokenCounts:
        """Tokens and requests since the start, as they are now."""
        return self._session.outputs.counts

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of the KV pool of one core."""
        return self._session.client.decided.num_kv_blocks

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self._session.client.decided.block_size

    async def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget all cached prefixes. False, and nothing happens, while requests use them.

        ``reset_running`` sends running requests back to the queue first; they compute again.
        """
        call = partial(self._session.client.call, "reset_prefix_cache", reset_running)
        return bool(await self._call(call))

    async def pause(self, what: PauseScope = "all") -> None:
        """Compute nothing until ``resume``; ``"new"``: what runs goes on, the others wait.

        Requests may be added and aborted meanwhile; deadlines go on to count.
        """
        await self._call(partial(self._session.client.call, "pause", what))
        self._paused = what

    async def resume(self) -> None:
        """End a pause; harmless without one."""
        await self._call(partial(self._session.client.call, "resume"))
        self._paused = None

    @property
    def paused(self) -> PauseScope | None:
        """What this engine has paused; other clients of the same core are not known."""
        return self._paused

    async def start_profile(self) -> None:
        """Record what the worker does, until ``stop_profile``.

        Keep it short: every step adds tens of kilobytes. Raises ``ConfigError`` if the engine was
        started without ``torch_profiler_dir``, or if a profile is being recorded already.
        """
        await self._call(partial(self._session.client.call, "profile", "start"))

    async def stop_profile(self) -> list[str]:
        """Write what was recorded; paths of the traces, one or more of each core.

        Takes seconds for a long profile, in which nothing is computed. Raises ``ConfigError`` if
        none is being recorded.
        """
        return list(await self._call(partial(self._session.client.call, "profile", "stop")))

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; other tasks go on meanwhile. Raises what ``Tokenizer.encode`` does,
        and ``ConfigError`` without a tokenizer."""
        encode = self.get_tokenizer().encode
        return await self._session.inputs.texts.elsewhere(encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids; other tasks go on meanwhile. Raises ``ConfigError`` without a
        tokenizer."""
        decode = self.get_tokenizer().decode
        return await self._session.inputs.texts.elsewhere(decode, token_ids, skip_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; ``None`` if none was loaded."""
        return self._session.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ``ConfigError`` if none was loaded."""
        if self._session.tokenizer is None:
            raise ConfigError("no tokenizer: the engine was started with skip_tokenizer_init")
        return self._session.tokenizer

    @property
    def recommended(self) -> Mapping[str, Any]:
        """Sampling values that the model's makers recommend, by names of ``SamplingParams``: for
        those who make parameters; requests take them as they are."""
        return self._session.recommended

    @property
    def object_rules(self) -> ObjectRules:
        """What objects of JSON schemas may have where a request does not say it."""
        return self._session.inputs.object_rules

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt with its output."""
        return self._session.inputs.max_model_len

    @property
    def num_cores(self) -> NumCores:
        """Cores that have not died, and all."""
        return self._session.client.num_cores()

    @property
    def is_running(self) -> bool:
        """False once the core has died or was shut down."""
        return self._death is None and not self._is_closing

    def give_up(self, error: Exception, request_ids: Iterable[str] | None = None) -> int:
        """Raise ``error`` in the readers of these requests, or of all, and stop the requests.

        What waits for the readers is dropped. Needs no answer of the core, so it works while that
        hangs. Returns how many there were. To be called in the event loop of the readers.
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
        """About how much memory holds what readers have not taken yet, by request; only of those
        with any. To be called in the event loop of the readers."""
        with self._changed:
            streams = list(self._open)
        sizes = {stream.request_id: stream.num_unread_bytes for stream in streams}
        return {name: size for name, size in sizes.items() if size}

    def limit_queue(
        self, max_requests: int, max_seconds: float | None = None, *, num_seats: int = 0
    ) -> None:
        """From now on refuse requests at once, before any work, while this many wait for a seat, or
        while a new one would wait longer for its first token, by the pace of late ones.

        num_seats: how many may run at once, if that is known. Before the first request only:
        raises ``ConfigError`` after it.
        """
        if self._open:
            raise ConfigError("limit_queue is called with requests under way: call it before")
        pace = self._session.outputs.pace = QueuePace(num_seats)
        self._queue_limits = QueueLimits(pace, max_requests, max_seconds)

    def check_room(self) -> None:
        """Raise ``RefusedError`` if a request would be refused now, by ``limit_queue``."""
        if self._queue_limits is not None:
            self._queue_limits.check(self._num_arriving)

    def shutdown(self, timeout: float = JOIN_SECONDS) -> None:
        """Stop after the step that runs and let go of the model; harmless when repeated.

        Requests that are still read raise ``EngineDeadError``. A step that takes longer than
        ``timeout`` seconds is not waited for.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
            self._session.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        atexit.unregister(self.shutdown)

    # In tasks.

    def _open_stream(self, submission: Submission, stream: Stream) -> None:
        with self._changed:
            self._check_alive()
            self._open.add(stream)
            self._num_arriving += 1
            self._command(Arrival(submission, stream))

    def _close_stream(self, stream: Stream) -> None:
        with self._changed:
            self._open.remove(stream)
            if not stream.is_finished and self._death is None:
                self._command(partial(self._leave, stream))

    async def _call(self, function: Callable[[], Any]) -> Any:
        """Run ``function`` in the thread, between two steps."""
        future: Future[Any] = Future()
        with self._changed:
            self._check_alive()
            self._command(partial(_run_for, future, function))
        return await asyncio.wrap_future(future)

    def _command(self, command: Command) -> None:
        self._commands.append(command)
        self._changed.notify()
        self._session.wake()  # if the thread waits there, for outputs

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDeadError(str(self._death)) from self._death.__cause__
        if self._is_closing:
            raise EngineDeadError("the engine was shut down")

    # In the thread.

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._take_commands():
                if self._session.has_unfinished:
                    self._deliver(self._session.step())
        except BaseException as error:  # after any error, tasks that wait must get it
            cause = error
        self._die(cause)

    def _take_commands(self) -> bool:
        """Carry out commands; sleep if there is no other work. False: time to stop."""
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
            command = self._commands.popleft()  # one at a time: those after a fault are not lost
            if isinstance(command, Arrival):
                arrivals.append(command)
            else:
                command()
        self._submit(arrivals)
        return not self._is_closing

    def _submit(self, arrivals: list[Arrival]) -> None:
        """Add requests; one that is not taken raises in its own reader only."""
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
        """The reader has left the stream. Its id may belong to a newer stream, which keeps it."""
        if self._live.get(stream.request_id) is stream:
            self._session.drop([stream.request_id])
            del self._live[stream.request_id]

    def _observe(self, observer: Observer) -> None:
        name = getattr(observer, "__qualname__", type(observer).__qualname__)
        effect = "it is called again for the next request"
        self._observers.append((observer, Guard(self.failures, name, effect)))
        self._session.outputs.on_finished = self._tell

    def _tell(self, finished: FinishedRequest) -> None:
        context = self._live[finished.request_id].context
        for observer, guard in self._observers:
            try:
                context.copy().run(observer, finished)
            except BaseException as error:  # one that ends this thread ends all requests
                guard.fail(error)

    def _abort(self, request_ids: list[str]) -> None:
        self._deliver(self._session.abort(request_ids))

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand each output to its reader, with one wake-up for each event loop."""
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
        for command in commands:  # the core refuses them now, and the tasks that wait get the error
            with contextlib.suppress(Exception):
                if not isinstance(command, Arrival):  # whose stream has failed already
                    command()


class Arrival(NamedTuple):
    """A request on its way to the core. Those that come together go there together."""

    submission: Submission
    stream: Stream


Command = Callable[[], None] | Arrival
Observer = Callable[[FinishedRequest], object]


Deliveries = dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]]


class Delivery:
    """A step's outputs on their way to readers in one event loop. Its ``repr`` shows none of them:
    they must not get into logs."""

    def __init__(self, batch: list[tuple[Stream, RequestOutput]]) -> None:
        self._batch = batch

    def __call__(self) -> None:
        """No stream may cost another its outputs."""
        for stream, output in self._batch:
            try:
                stream.put(output)
            except Exception as error:
                logger.exception("the reader of a request failed")
                stream.fail(error)


def death_by(cause: BaseException | None) -> EngineDeadError:
    """The error of an engine whose thread has ended; ``None``: it was shut down."""
    if cause is None:
        return EngineDeadError("the engine was shut down")
    if isinstance(cause, EngineDeadError):
        return cause
    death = EngineDeadError(f"the engine core has died: {type(cause).__name__}: {cause}")
    death.__cause__ = cause
    return death


def log_death(death: EngineDeadError) -> None:
    """One line with the cause; with its traceback where no other process has printed it."""
    cause = death.__cause__
    is_here = cause is not None and cause.__traceback__ is not None
    logger.critical("%s", death, exc_info=cause if is_here else None)


def _run_for(future: Future[Any], function: Callable[[], Any]) -> None:
    """Raises ``EngineDeadError`` as well: who only asks for health, again and again, must not keep
    the thread from noticing that the core has died."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
        if isinstance(error, EngineDeadError):
            raise
