"""A process that reads pixels of a made-up device, as messages order it to.

python -m support.device_reader DIRECTORY
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import WireError
from engine.ipc.device_pixels import DeviceReader
from engine.messages.media import DevicePixels
from support.fake_ipc import FakeDevice

TESTS = Path(__file__).resolve().parents[1]


class Order(msgspec.Struct):
    what: str
    handle: DevicePixels | None = None


class ReadingProcess:
    """Sends orders to a process that runs ``main``. Returns what it answers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def __call__(self, what: str, handle: DevicePixels | None = None) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        frame = msgspec.msgpack.encode(Order(what, handle))
        self.process.stdin.write(len(frame).to_bytes(4, "little") + frame)
        self.process.stdin.flush()
        size = int.from_bytes(self.process.stdout.read(4), "little")
        return msgspec.msgpack.decode(self.process.stdout.read(size)) if size else None


@contextmanager
def reading_process(device: Path | str) -> Iterator[ReadingProcess]:
    process = subprocess.Popen(
        [sys.executable, "-m", "support.device_reader", str(device)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
    )
    try:
        yield ReadingProcess(process)
    finally:
        process.kill()
        process.communicate()


class Reading:
    def __init__(self, directory: Path) -> None:
        self.device = FakeDevice(directory)
        self.reader = DeviceReader(self.device)
        self.found: dict[int, list[float]] = {}

    def read(self, handle: DevicePixels) -> None:
        """Queue the device's reading of an array."""
        tensors = self.reader.open(handle)

        def work() -> None:
            (tensor,) = tensors.values()
            self.found[handle.ticket] = tensor.flatten().tolist()
            del tensor
            tensors.clear()

        self.device.later(work)
        self.reader.has_read(handle)

    def give_back(self, handle: DevicePixels) -> list[float] | None:
        """What the device has read meanwhile."""
        self.reader.give_back(handle)
        return self.found.pop(handle.ticket, None)

    def count(self) -> list[Any]:
        return [len(self.reader), len(self.device.opened), self.device.faults]

    def do(self, order: Order) -> Any:
        match order:
            case Order("read", DevicePixels() as handle):
                return self.read(handle)
            case Order("give back", DevicePixels() as handle):
                return self.give_back(handle)
            case Order("forget"):
                return self.reader.forget_ended()
            case Order("count"):
                return self.count()
            case Order("die"):
                os._exit(1)
        return None


class CudaReading(Reading):
    """The device is a real one, which reads at once."""

    def __init__(self) -> None:
        import torch  # takes seconds, and a made-up device does without

        from engine.pictures.cuda_memory import cuda_memory

        self.reader = DeviceReader(cuda_memory(torch.device("cuda", 0)))
        self.found = {}

    def read(self, handle: DevicePixels) -> None:
        (tensor,) = self.reader.open(handle).values()
        self.found[handle.ticket] = tensor.flatten().tolist()
        self.reader.has_read(handle)

    def count(self) -> list[Any]:
        return [len(self.reader)]


def main() -> None:
    reading = CudaReading() if sys.argv[1] == "cuda" else Reading(Path(sys.argv[1]))
    pipe, out = sys.stdin.buffer, sys.stdout.buffer
    while head := pipe.read(4):
        order = msgspec.msgpack.decode(pipe.read(int.from_bytes(head, "little")), type=Order)
        try:
            answer = reading.do(order)
        except WireError as error:
            answer = str(error)
        frame = msgspec.msgpack.encode(answer)
        out.write(len(frame).to_bytes(4, "little") + frame)
        out.flush()


if __name__ == "__main__":
    main()
