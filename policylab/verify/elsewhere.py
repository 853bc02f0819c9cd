"""Another interpreter, in which all that a policy must not depend on is different.

It hashes strings otherwise, has other addresses, another process id, clocks that show another time
of day and run at another pace, other random numbers and another environment. There the same case
must give the same plans. ``Elsewhere`` is this side of it, ``otherwise`` the other.
"""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Collection
from contextlib import suppress
from types import TracebackType
from typing import Any

from engine.config.env import environment_for_child
from engine.errors import ConfigError
from engine.ipc.process import without_interrupts
from engine.sched.policy import Policy
from policylab.verify import otherwise
from policylab.verify.otherwise import HASHES, PARTS, PolicySource, ProcessAnswer, Question


class Elsewhere:
    """Another interpreter. ``number``: 1 or 2, two of which differ in ``parts`` and in nothing
    else that can be helped.

    Raises ``ConfigError`` for an object that cannot be taken there.
    """

    def __init__(
        self,
        source: PolicySource,
        options: dict[str, Any] | None,
        number: int,
        parts: Collection[str] = PARTS,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=otherwise.serve, args=(theirs,), daemon=True)
        hash_seed = str(number if HASHES in parts else 1)
        with environment_for_child({"PYTHONHASHSEED": hash_seed}), without_interrupts():
            self._process.start()
        theirs.close()
        self._is_ready = False
        self._send((source._replace(given=None), options, number, tuple(parts)))
        try:  # when its module is there, so that it can be made of it
            self._send(source.given)
        except Exception as error:  # an author's class may raise anything
            self.close()
            raise ConfigError(f"the object cannot be pickled: {error}") from error

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.kill()
        self._process.join()
        self._process.close()

    def begin(self, question: Question) -> None:
        """Ask without waiting for the answer, which ``end`` returns."""
        self._send(question)

    def end(self) -> ProcessAnswer:
        """The answer to the first question that has none yet.

        Raises ``ConfigError`` if the policy is not found there; then nothing can be shown.
        """
        if not self._is_ready:
            problem = self._receive()
            if problem is not None:
                raise ConfigError(problem)
            self._is_ready = True
        answer: ProcessAnswer = self._receive()
        return answer

    def _send(self, value: object) -> None:
        with suppress(BrokenPipeError):  # what it died of is noticed when it is to answer
            self._line.send(value)

    def _receive(self) -> Any:
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise ConfigError(
                "the other interpreter has died; a script that starts one does so under "
                '`if __name__ == "__main__":`'
            ) from error


def source_of(policy: Any) -> PolicySource:
    """Where another process finds it. Raises ``ConfigError`` where it cannot."""
    if isinstance(policy, str):
        return PolicySource(policy)
    cls = policy if isinstance(policy, type) else type(policy)
    if "<locals>" in cls.__qualname__:
        raise ConfigError(f"{cls.__qualname__} is defined in a function")
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        file = None
    given = policy if isinstance(policy, Policy) else None
    return PolicySource(None, cls.__module__, file, cls.__qualname__, given)
