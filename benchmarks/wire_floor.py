"""The least that a process can use that sends something every so often: sleep, encode, send.

What a core in a process uses beyond this is what it decides and keeps account of.
"""

import time
from dataclasses import dataclass

import zmq
from wire_cores import cpu_seconds, no_timer_slack, request

from engine.ipc import sockets
from engine.ipc.address import Directory
from engine.ipc.codec import Encoder
from engine.ipc.process import Child, Line, Report, report_to_parent
from engine.messages.requests import CoreOutputs
from engine.messages.wire import Outputs


@dataclass(frozen=True)
class Sender:
    """Runs in the process: sends what a step of so many requests brings, and nothing else."""

    step_seconds: float
    running: int

    def __call__(self, line: Line, address: str) -> None:
        no_timer_slack()
        router = sockets.bind(zmq.Context.instance(), address, None)
        encoder = Encoder()
        names = [request(i, 1).request_id for i in range(self.running)]
        report_to_parent(line, Report(True))
        identity, _ = router.recv_multipart()
        while not line.poll(0):
            time.sleep(self.step_seconds)
            batch = CoreOutputs(names, [1] * self.running, None, time.monotonic())
            router.send_multipart([identity, encoder.encode(Outputs(batch))])


def floor_percent(step_seconds: float, running: int, seconds: float) -> float:
    """Percent of a core."""
    directory = Directory.create()
    address = directory.address.data
    child = Child("sender", Sender(step_seconds, running), address, at_end=directory.remove)
    context = zmq.Context()
    try:
        child.wait_until_ready(10.0)
        dealer = sockets.dealer(context, None)
        dealer.connect(address)
        dealer.send(b"begin")
        _read(dealer, 0.5)
        began, before = time.monotonic(), cpu_seconds(child.pid)
        _read(dealer, seconds)
        return 100.0 * (cpu_seconds(child.pid) - before) / (time.monotonic() - began)
    finally:
        child.close()
        context.destroy(linger=0)


def _read(dealer: sockets.Socket, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        dealer.recv()
