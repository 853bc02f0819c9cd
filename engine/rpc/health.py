"""HealthMonitor: finds out over the control socket whether a silent core works or hangs."""

from __future__ import annotations

from contextlib import suppress

import zmq

from engine.errors import WireError
from engine.ipc import sockets
from engine.ipc.address import Address
from engine.ipc.codec import MessageDecoder, MessageEncoder
from engine.messages.wire import FromControl, Health, Ping

ASK_SECONDS = 1.0  # least time between two pings


class HealthMonitor:
    """Pings a core that sends nothing, without blocking. Unanswered pings are counted instead of
    seconds, since the clock also runs while the client is stopped or the machine sleeps."""

    def __init__(
        self, context: zmq.Context[sockets.Socket], address: Address, hang_timeout: float
    ) -> None:
        self._hang_timeout = hang_timeout
        self._ask_seconds = min(ASK_SECONDS, hang_timeout / 4)
        self.socket = sockets.dealer(context, address.secret)
        self.socket.connect(address.control)
        self._ping = MessageEncoder().encode(Ping(address.token))
        self._decoder: MessageDecoder[FromControl] = MessageDecoder(FromControl)
        self._sent_at = 0.0
        self._num_unanswered = 0

    def check(self, now: float) -> str | None:
        """Ping the core if due. Returns what is wrong with it, e.g. "has not answered for 30 s", or
        ``None``. Must be called repeatedly while the core is silent."""
        while self.socket.poll(0):
            if check := self._take(self.socket.recv_multipart()):
                return check
        if now - self._sent_at >= self._ask_seconds:
            if self._num_unanswered * self._ask_seconds >= self._hang_timeout:
                return f"has not answered for {self._hang_timeout:g} s (core_hang_timeout)"
            self._sent_at = now
            self._num_unanswered += 1
            with suppress(zmq.Again):  # the connection is lost, so there will be no answer
                self.socket.send(self._ping, zmq.NOBLOCK)
        return None

    def _take(self, frames: list[bytes]) -> str | None:
        self._num_unanswered = 0
        try:
            health = self._decoder.decode(frames)
        except WireError as error:
            return f"sent an invalid message ({error})"
        if isinstance(health, Health) and health.seconds_in_step > self._hang_timeout:
            return (
                f"has been in one step for {health.seconds_in_step:.1f} s, the limit is "
                f"{self._hang_timeout:g} (core_hang_timeout)"
            )
        return None
