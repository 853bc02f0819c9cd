"""A front end whose pictures are processed when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engine.frontend.processing import Processed
from engine.messages.media import MediaContent, PixelArray, Pixels


def pixels(size: int = 4) -> Pixels:
    """Content of this many bytes."""
    return {"pixel_values": PixelArray("|u1", [size], bytes(size))}


@dataclass
class Hands:
    """Processes pictures by hand. A picture is a name here."""

    num_at_once: int = 2
    begun: dict[str, Future[Processed]] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    is_closed: bool = False

    def begin(self, picture: Any) -> Future[Processed]:
        future: Future[Processed] = Future()
        self.begun[picture] = future
        self.order.append(picture)
        return future

    def finish(self, picture: str, size: int = 4) -> None:
        future = self.begun.pop(picture)
        if future.set_running_or_notify_cancel():
            future.set_result(Processed(pixels(size)))

    def fail(self, picture: str, error: Exception) -> None:
        future = self.begun.pop(picture)
        if future.set_running_or_notify_cancel():
            future.set_exception(error)

    def close(self) -> None:
        self.is_closed = True


class Core:
    """A client that notes what was brought."""

    def __init__(self) -> None:
        self.brought: list[tuple[list[str], MediaContent]] = []

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        self.brought.append((list(request_ids), content))

    def take(self) -> list[tuple[list[str], str, str]]:
        """Ids, key and error of what was brought since the last call."""
        found = [(ids, each.key, each.error) for ids, each in self.brought]
        self.brought.clear()
        return found


def submission(names: Sequence[str], keys: Sequence[str]) -> Any:
    """A request of one sequence for each name, with these pictures."""
    requests = [SimpleNamespace(request_id=name) for name in names]
    return SimpleNamespace(requests=requests, pictures={key: key for key in keys})
