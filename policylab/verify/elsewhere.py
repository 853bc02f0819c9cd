"""A second interpreter, to check that a policy's plans depend on nothing but its requests.

The other interpreter has a different hash seed, object addresses, process id, clocks, random
numbers and environment variables; the same case must give the same plans there. ``Elsewhere`` runs
in the parent process, module ``otherwise`` in the child."""

from __future__ import annotations

import inspect
import multiprocessing
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from engine.config.env import environment_with
from engine.errors import ConfigError
from engine.ipc.process import without_interrupts
from engine.sched.policy import Policy
from policylab.verify import otherwise
from policylab.verify.otherwise import HASHES, PARTS, PolicySource, ProcessAnswer, Question


class Elsewhere:
    """A second interpreter, seen from the parent process.

    Interpreters with ``number`` 1 and 2 differ in the aspects of their environment that ``parts``
    names. Raises ``ConfigError`` if the policy object cannot be pickled."""

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
        with environment_with({"PYTHONHASHSEED": hash_seed}), without_interrupts():
            self._process.start()
        theirs.close()
        self._is_ready = False
        self._send((source._replace(given=None), options, number, tuple(parts)))
        try:  # sent separately: it is unpickled after its module was loaded
            self._send(source.given)
        except Exception as error:  # a policy's class may raise anything
            self.close()
            raise ConfigError(f"the policy object cannot be pickled: {error}") from error

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._process.kill()
        self._process.join()
        self._process.close()

    def begin(self, question: Question) -> None:
        """Send a question to the other interpreter; ``end`` returns the answer."""
        self._send(question)

    def end(self) -> ProcessAnswer:
        """Wait for the answer to the oldest unanswered question.

        Raises ``ConfigError`` if the other interpreter cannot load the policy."""
        if not self._is_ready:
            problem = self._receive()
            if problem is not None:
                raise ConfigError(problem)
            self._is_ready = True
        answer: ProcessAnswer = self._receive()
        return answer

    def _send(self, value: object) -> None:
        with suppress(BrokenPipeError):  # the death is noticed when the answer is read
            self._line.send(value)

    def _receive(self) -> Any:
        try:
            return self._line.recv()
        except (EOFError, OSError) as error:
            raise ConfigError(
                "the other interpreter died; a script must start the check under "
                '`if __name__ == "__main__":`'
            ) from error


def source_of(policy: Any) -> PolicySource:
    """Find out how another process can load the policy. Raises ``ConfigError`` if it cannot."""
    if isinstance(policy, str):
        return PolicySource(policy)
    cls = policy if isinstance(policy, type) else type(policy)
    if "<locals>" in cls.__qualname__:
        raise ConfigError(f"{cls.__qualname__} is defined in a function; move it to a module")
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        file = None
    given = policy if isinstance(policy, Policy) else None
    return PolicySource(None, cls.__module__, file, cls.__qualname__, given)
