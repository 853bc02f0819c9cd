"""An asyncio client of a core in another process, over the same framing as the synchronous one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import zmq
import zmq.asyncio

from engine.errors import EngineDeadError, WireError
from engine.ipc import sockets
from engine.ipc.place import Address, address_of
from engine.ipc.process import Child
from engine.messages.outputs import CoreOutputs
from engine.messages.requests import AddRequest
from engine.messages.stats import SchedulerStats
from engine.messages.wire import Welcome
from engine.rpc.failures import death_of
from engine.rpc.heart import Heart
from engine.rpc.link import Link, Reply, Submission, refused, value_of
from engine.rpc.zmq_client import (
    HANG_SECONDS,
    LAST_WORDS_MS,
    STEP_SECONDS,
    WELCOME_SECONDS,
    loss_of,
)


class AsyncEngineCoreClient:
    """What ``EngineCoreClient`` is, for tasks of one event loop: any number of calls at once.

    A call that is cancelled leaves the client usable; a utility is carried out all the same.
    ``step`` belongs to one task. Made by ``connect``.
    """

    def __init__(
        self, address: Address, *, child: Child | None = None, hang_timeout: float = HANG_SECONDS
    ) -> None:
        self.address = address
        self._link = Link()
        self._child = child
        self._death: EngineDeadError | None = None
        self._expected: dict[int, asyncio.Future[Reply]] = {}  # in the order of asking
        self._changed = asyncio.Event()
        self._has_heard = False  # since the last look at how the core is
        self._context = zmq.asyncio.Context()
        try:
            self._socket, self._lost = sockets.connect(self._context, address.data, address.secret)
            self._heart = Heart(self._context, address, hang_timeout)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        sockets.close_with(self, self._context, self._socket, self._lost, self._heart.socket)
        self._tasks = [
            asyncio.create_task(self._guard(each))
            for each in (self._read(), self._watch(), self._listen())
        ]

    @classmethod
    async def connect(
        cls,
        core: str | Address,
        secret: str | None = None,
        *,
        child: Child | None = None,
        name: str = "",
        hang_timeout: float = HANG_SECONDS,
    ) -> AsyncEngineCoreClient:
        """A client of a running core, by the address that ``metronome core`` printed.

        Raises ``ConfigError`` if that is no address of a core, ``EngineDeadError`` if it does not
        answer.
        """
        address = address_of(core, secret) if isinstance(core, str) else core
        client = cls(address, child=child, hang_timeout=hang_timeout)
        try:
            await client._greet(address, name)
        except BaseException:
            await client.shutdown()
            raise
        return client

    @property
    def decided(self) -> Welcome:
        """What the core runs with."""
        assert self._link.welcome is not None
        return self._link.welcome

    @property
    def id_prefix(self) -> str:
        """Request ids that begin with it are unique among all clients of the core."""
        return self.decided.id_prefix

    async def add(self, request: AddRequest) -> None:
        """Queue a request. Raises ``RequestError`` for an id whose end was not read yet or one that
        can never fit, and ``RefusedError`` for one that is not taken now."""
        for error in (await self.add_all([request])).values():
            raise error

    async def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        """Queue these, in order. Returns what ``add`` raised, by place; {} if all were taken.

        Cancelled, it aborts them; ``step`` tells the ends of those that were taken.
        """
        self._live()
        submission = Submission()
        errors = submission.errors
        try:
            self._link.submit(requests, submission)
            # All are sent before anything else is: what is sent next may be their abort.
            futures = [self._ask(part.number, part.frame) for part in submission.parts]
            for part, future in zip(submission.parts, futures, strict=True):
                errors |= refused(part, await future)
        except BaseException:
            for frame in self._link.withdraw(submission):
                self._send_now(frame)
            raise
        return errors

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Finish these; unknown ids do nothing. Waits for nothing: ``step`` tells their ends, and
        what came before. Raises ``RequestTypeError`` for ids that are none."""
        self._live()
        self._send_now(self._link.abort(request_ids))

    async def step(self) -> list[CoreOutputs]:
        """Outputs that have come; waits for them if there are none. [] if the last requests that
        were under way turn out to have been refused."""
        was_busy = self.has_unfinished()
        while not (batches := self._link.take_batches(self._send_now)):
            self._live()
            if was_busy and not self.has_unfinished():
                break
            self._changed.clear()
            await self._changed.wait()
        return batches

    def has_unfinished(self) -> bool:
        return bool(self._link.live)

    def num_unfinished(self) -> int:
        return len(self._link.live)

    async def stats(self) -> SchedulerStats | None:
        """Gauges and counters of the scheduler, ``None`` if it keeps none."""
        stats: SchedulerStats | None = await self.call("stats")
        return stats

    async def call(self, name: str, *args: Any) -> Any:
        """A utility by name. Raises ``ConfigError`` for one that does not exist."""
        self._live()
        return value_of(name, await self._ask(*self._link.call(name, args)))

    async def shutdown(self) -> None:
        """Leave the core, and end it if it is ours; harmless when repeated.

        Our own core that is stopped or hangs is killed after two seconds.
        """
        if self._socket.closed:
            return
        linger_ms = 0
        if self._death is None and self._link.welcome is not None:
            linger_ms = sockets.LINGER_MS  # last words for somebody
            self._send_now(self._link.bye())
        self._death = self._death or EngineDeadError("the engine was shut down")
        if self._tasks[0].get_loop() is asyncio.get_running_loop():  # else it runs no more
            self._die(self._death)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        sockets.close(self._socket, linger_ms=linger_ms)
        sockets.close(self._lost, self._heart.socket)
        await asyncio.to_thread(self._end)

    # -- helpers

    def _end(self) -> None:
        self._context.term()
        if self._child is not None:
            self._child.close()

    async def _greet(self, address: Address, name: str) -> None:
        self._send_now(self._link.hello(address.token, name))
        try:
            async with asyncio.timeout(WELCOME_SECONDS):
                while self._link.welcome is None:
                    self._live()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise EngineDeadError(
                f"no core answers at {address.data} within {WELCOME_SECONDS:g} s"
            ) from None

    def _ask(self, number: int, frame: bytes) -> asyncio.Future[Reply]:
        """Send; the future brings the answer."""
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._expected[number] = future
        self._send_now(frame)
        return future

    def _send_now(self, frame: bytes) -> None:
        """Send in order, without waiting for it. A lost connection is noticed elsewhere."""
        with suppress(zmq.ZMQError):
            self._socket.send(frame)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            self._has_heard = True
            try:
                reply = self._link.feed(frames)
            except WireError as error:  # of the oldest question: all before it were answered
                self._fail_oldest(error)
                continue
            if isinstance(reply, Welcome):
                self._link.welcome = reply
            elif reply is not None:
                future = self._expected.pop(reply.number, None)
                if future is not None and not future.done():
                    future.set_result(reply)
            self._changed.set()

    async def _watch(self) -> None:
        await self._until_lost()
        while self._death is None and await self._socket.poll(0):  # last words that came with it
            await asyncio.sleep(0)
        how = None if self._child is None else await asyncio.to_thread(self._child.how_it_ended)
        raise loss_of(self.address, self._link, how)

    async def _until_lost(self) -> None:
        """Until the connection is, or the process has ended, whoever else has its sockets."""
        lost = self._lost.poll()
        if self._child is None:
            await lost
            return
        loop, pidfd = asyncio.get_running_loop(), self._child.pidfd
        ended = asyncio.Event()
        loop.add_reader(pidfd, ended.set)
        waiting = asyncio.create_task(ended.wait())
        try:
            await asyncio.wait((lost, waiting), return_when=asyncio.FIRST_COMPLETED)
            loop.remove_reader(pidfd)
            await asyncio.wait((lost,), timeout=LAST_WORDS_MS / 1000)
        finally:
            loop.remove_reader(pidfd)
            waiting.cancel()
            lost.cancel()

    async def _listen(self) -> None:
        """Ask a core how it is while somebody waits for it."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(STEP_SECONDS)
            is_silent, self._has_heard = not self._has_heard, False
            if not is_silent or not (self._expected or self._link.live):
                continue
            if complaint := self._heart.complaint(loop.time()):
                self._die(death_of(f"the engine core died: it {complaint}"))
                if self._child is not None:
                    await asyncio.to_thread(self._child.kill)
                return

    async def _guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Run a part of the client; whatever ends it ends the client."""
        try:
            await part
        except asyncio.CancelledError:  # by ``shutdown``, or by a loop that ends
            self._die(EngineDeadError("the event loop of this client has ended"))
            raise
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            self._die(death_of(f"the client failed: {type(error).__name__}: {error}"))

    def _fail_oldest(self, error: WireError) -> None:
        number = next(iter(self._expected), None)
        future = None if number is None else self._expected.pop(number)
        if future is None:
            raise death_of(f"the core refused this client: {error}")
        if not future.done():
            future.set_exception(error)

    def _die(self, death: EngineDeadError) -> None:
        """Whoever waits hears of it, once."""
        if self._death is None:
            self._death = death
        futures, self._expected = self._expected, {}
        for future in futures.values():
            if not future.done():
                future.set_exception(_again(self._death))
                future.exception()  # who was cancelled does not fetch it
        self._changed.set()

    def _live(self) -> None:
        if self._death is not None:
            raise _again(self._death)


def _again(death: EngineDeadError) -> EngineDeadError:
    error = EngineDeadError(str(death))
    error.__cause__ = death.__cause__
    return error
