"""A process that uses a core and is then killed, stopped or led astray.

    python kill_actor.py client PHASE ADDRESS
    python kill_actor.py parent PHASE TRIGGER

Writes a line when it has come to the phase, ends when its streams have said all that they must.
SIGUSR1 raises an error in it, SIGUSR2 makes it send rubbish.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from types import FrameType
from typing import Any

import zmq

from engine.ipc import sockets
from engine.ipc.address import address_of
from engine.rpc.zmq_client import EngineCoreClient
from support.live_core import SizedBuild, Triggered, TriggeredPolicy, pid_of, start
from support.streams import Lengths, Streams

STEP_SECONDS = 0.02
START_SECONDS = 2.0  # of a core that is to be met while it loads
HANG_SECONDS = 1.0
NUM_STREAMS = 4
PREFILL = Lengths(prompt=(400, 400), output=(4, 4))
DECODE = Lengths(prompt=(4, 8), output=(40, 50))
LONG_PREFILL = Lengths(prompt=(400, 400), output=(110, 110))  # of who is not to end by itself
LONG_DECODE = Lengths(prompt=(4, 8), output=(250, 250))


def start_core(trigger: str, phase: str, **core: Any) -> EngineCoreClient:
    """A core whose steps take their time; ``trigger`` is a file that says what goes wrong."""
    options: dict[str, Any] = {"max_num_batched_tokens": 80}
    if phase == "add":
        options |= {"scheduling_policy": TriggeredPolicy, "policy_options": {"trigger": trigger}}
    build = SizedBuild(
        options=options,
        worker=Triggered(trigger, STEP_SECONDS),
        start_seconds=START_SECONDS if phase == "handshake" else 0.0,
    )
    return start(build, **core)


def come_to(phase: str, client: EngineCoreClient, *, is_long: bool = False) -> Streams:
    """Streams of a client that is in this phase, a core of its own included."""
    is_idle = phase in ("handshake", "idle", "add")
    prefill, decode = (LONG_PREFILL, LONG_DECODE) if is_long else (PREFILL, DECODE)
    streams = Streams(
        client,
        0 if is_idle else NUM_STREAMS,
        random.Random(phase),
        lengths=prefill if phase == "prefill" else decode,
    )
    streams.fill()
    while phase in ("decode", "draining") and streams.counts.tokens < 3 * NUM_STREAMS:
        streams.read()
    return streams


def be_client(phase: str, core: str) -> None:
    if phase == "handshake":  # connected, and silent
        address = address_of(core, None)
        _silent = sockets.connect(zmq.Context(), address.data, None)
        _say("ready")
        time.sleep(60)
        return
    client = EngineCoreClient(address_of(core, None))
    _use(phase, client, is_long=True)


def be_parent(phase: str, trigger: str) -> None:
    if phase == "handshake":
        _say("ready")
    client = start_core(trigger, phase)
    if phase == "draining":
        streams = come_to(phase, client)
        os.kill(pid_of(client), signal.SIGTERM)
        _say("ready")
        streams.finish()
        return
    _use(phase, client)


def _use(phase: str, client: EngineCoreClient, *, is_long: bool = False) -> None:
    def misbehave(number: int, frame: FrameType | None) -> None:
        for _ in range(20):
            client._socket.send_multipart([random.randbytes(50)] * random.randint(1, 3))

    signal.signal(signal.SIGUSR2, misbehave)
    streams = come_to(phase, client, is_long=is_long)
    if phase != "handshake":
        _say("ready")
    until = time.monotonic() + (3.0 if phase in ("handshake", "idle") else 0.0)
    while time.monotonic() < until:
        client.step()
    streams.finish()
    client.shutdown()


def _raise(number: int, frame: FrameType | None) -> None:
    raise ArithmeticError("told to fail")


def _say(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _raise)
    {"client": be_client, "parent": be_parent}[sys.argv[1]](*sys.argv[2:])
