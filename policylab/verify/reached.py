"""ReachedCore: what the engine's routing needs of the client of a core, without a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

from engine.errors import RequestError
from engine.messages.requests import AddRequest

Message = Callable[[], object]


class Sent(NamedTuple):
    """Requests that were sent to a core together."""

    number: int


class Core(Protocol):
    """A core, as messages reach it."""

    def add(self, request: AddRequest) -> None:
        """Add a request. Raises ``RequestError``."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their ends are outputs."""

    def call(self, name: str, *args: Any) -> object:
        """Call a method by name."""


class ReachedCore:
    """A client of a core for ``PrefillApart``. ``send`` lets the core call a message between two of
    its steps; only then there is an answer."""

    decided = SimpleNamespace(capabilities=())

    def __init__(self, core: Core, send: Callable[[Message], None]) -> None:
        self._core = core
        self._send = send
        self._numbers = count(1)
        self._answers: dict[int, dict[int, Exception]] = {}

    def begin_add(self, requests: Sequence[AddRequest]) -> tuple[list[Sent], dict[int, Exception]]:
        number = next(self._numbers)
        self._send(partial(self._add, number, requests))
        return [Sent(number)], {}

    def end_add(self, parts: Sequence[Sent]) -> dict[int, Exception]:
        errors: dict[int, Exception] = {}
        for part in parts:
            errors |= self._answers.pop(part.number)
        return errors

    def abort(self, request_ids: Sequence[str]) -> None:
        self._send(partial(self._core.abort, request_ids))

    def begin_call(self, name: str, *args: Any) -> int:
        number = next(self._numbers)
        self._send(partial(self._call, number, name, args))
        return number

    def end_call(self, name: str, number: int) -> None:
        del self._answers[number]

    def is_answered(self, number: int) -> bool:
        return number in self._answers

    def _add(self, number: int, requests: Sequence[AddRequest]) -> None:
        errors: dict[int, Exception] = {}
        for index, request in enumerate(requests):
            try:
                self._core.add(request)
            except RequestError as error:
                errors[index] = error
        self._answers[number] = errors

    def _call(self, number: int, name: str, args: Sequence[Any]) -> None:
        self._core.call(name, *args)
        self._answers[number] = {}
