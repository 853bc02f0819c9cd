"""KeptAdapters: in a further rank, reads and keeps the adapters that rank 0 orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from engine.lora.loading import FutureReading, Order, ThreadedReader
from engine.lora.sharing import DROP, FORGET, HURRY, KEEP, READ, PartReport
from engine.lora.store import AdapterStore
from engine.worker.feature import Feature


class KeptAdapters(Feature):
    """Keeps the rank's parts of adapters in the store of its ``Adapters``, for plans that load
    them. What is read is kept or forgotten when rank 0 knows of all ranks."""

    def __init__(self, reader: ThreadedReader, store: AdapterStore[Any]) -> None:
        self._reader = reader
        self._store = store
        self._readings: dict[int, FutureReading] = {}  # by rank 0's number

    @property
    def methods(self) -> Mapping[str, Callable[..., Any]]:
        return {
            READ: self._read,
            HURRY: self._hurry,
            KEEP: self._keep,
            FORGET: self._readings.pop,
            DROP: self._store.drop,
        }

    def shutdown(self) -> None:
        self._reader.shutdown()

    # -- helpers

    def _read(self, number: int, order: Sequence[Any]) -> Future[PartReport]:
        reading = self._readings[number] = self._reader.submit(Order(*order))
        answer: Future[PartReport] = Future()

        def report(read: Future[Any]) -> None:
            error = read.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                part = read.result()
                answer.set_result(PartReport(part.digest, part.num_bytes, part.share))

        reading.future.add_done_callback(report)
        return answer

    def _hurry(self, number: int, is_alone: bool) -> None:
        self._readings[number].hurry(is_alone)

    def _keep(self, number: int) -> None:
        self._store.add(self._readings.pop(number).future.result())
