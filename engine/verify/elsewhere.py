"""Another interpreter, in which all that a policy must not depend on is different.

It hashes strings otherwise, has other addresses, another process id, clocks that show another time
of day and run at another pace, other random numbers and another environment. There the same case
must give the same plans. ``Elsewhere`` is this side of it, ``serve`` the other.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError
from engine.sched.policy import Policy
from engine.verify.case import Case

HASHES = "hashes of strings"
ADDRESSES = "addresses of objects"
CLOCKS = "clocks"
DICE = "dice of the process"
PROCESS = "number of the process"
ENVIRONMENT = "environment variables"
PARTS = (HASHES, ADDRESSES, CLOCKS, DICE, PROCESS, ENVIRONMENT)
"""What two such interpreters differ in."""
BEGIN = "from engine.verify.otherwise import serve; serve()"


class Source(NamedTuple):
    """Where another process finds the policy."""

    named: str | None
    """By name or dotted path; ``None``: in a module."""
    module: str = ""
    file: str | None = None
    """Of the module, if it cannot be imported by name."""
    qualname: str = ""
    pickled: bytes | None = None
    """An object of that class."""


class Asked(NamedTuple):
    """What the other process is to do: plan the case of a seed, a given one, or a crowd."""

    seed: int | None = None
    case: Case | None = None
    """With any policy: it is replaced by the one that was found there."""
    crowd: str = ""
    num_steps: int = 0
    """In which requests of the crowd keep coming."""


class Answer(NamedTuple):
    """What came of it."""

    digest: str
    """Of all plans, or the error that ended the run."""
    reads: tuple[str, ...] = ()
    """What hooks have read of the environment, with the line."""


class Elsewhere:
    """Another interpreter. ``number``: 1 or 2, two of which differ in ``parts`` and in nothing
    else that can be helped."""

    def __init__(
        self,
        source: Source,
        options: dict[str, Any] | None,
        number: int,
        parts: Collection[str] = PARTS,
    ) -> None:
        path = os.pathsep.join(_absolute(each) for each in sys.path)
        hash_seed = str(number if HASHES in parts else 1)
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        )
        self._is_ready = False
        self._send((source, options, number, tuple(parts)))

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._process.kill()
        self._process.wait()

    def begin(self, asked: Asked) -> None:
        """Ask without waiting for the answer, which ``end`` returns."""
        self._send(asked)

    def end(self) -> Answer:
        """The answer to what was asked first of all that was not answered yet.

        Raises ``ConfigError`` if the policy is not found there; then nothing can be shown.
        """
        if not self._is_ready:
            problem = self._receive()
            if problem is not None:
                raise ConfigError(problem)
            self._is_ready = True
        answer: Answer = self._receive()
        return answer

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it died of is noticed when it is to answer
            pickle.dump(value, self._process.stdin)
            self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            return pickle.load(self._process.stdout)
        except EOFError as error:
            raise ConfigError("the other interpreter has died") from error


def source_of(policy: Any) -> Source:
    """Where another process finds it. Raises ``ConfigError`` where it cannot."""
    if isinstance(policy, str):
        return Source(policy)
    cls = policy if isinstance(policy, type) else type(policy)
    if "<locals>" in cls.__qualname__:
        raise ConfigError(f"{cls.__qualname__} is defined in a function")
    pickled = None
    if isinstance(policy, Policy):
        try:
            pickled = pickle.dumps(policy)
        except Exception as error:  # an author's class may raise anything
            raise ConfigError(f"the object cannot be pickled: {error}") from error
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        file = None
    return Source(None, cls.__module__, file and _absolute(file), cls.__qualname__, pickled)


def with_policy(case: Case, policy: Any, options: dict[str, Any]) -> Case:
    """The same case under another policy."""
    given = {**vars(case.setup.config), "scheduling_policy": policy, "policy_options": options}
    setup = msgspec.structs.replace(case.setup, config=SchedulerConfig(**given))
    return msgspec.structs.replace(case, setup=setup)


def _absolute(path: str) -> str:
    return os.path.abspath(path or ".")
