"""Plans cases in a second process whose environment differs, for the tests in ``elsewhere``.

The environment is changed before the policy is imported, so that ``from time import time`` in the
policy's module gets the changed clock."""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import os
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np

from engine.config.sched import SchedulerConfig
from engine.sched.plugins import hooks
from engine.sched.policy import Policy
from policylab.verify.case import Case
from policylab.verify.crowd import KINDS, Crowd
from policylab.verify.draw import draw_case
from policylab.verify.simulation import Simulation

HASHES = "hashes of strings"
ADDRESSES = "addresses of objects"
CLOCKS = "clocks"
DICE = "dice of the process"
PROCESS = "number of the process"
ENVIRONMENT = "environment variables"
PARTS = (HASHES, ADDRESSES, CLOCKS, DICE, PROCESS, ENVIRONMENT)
"""The aspects of the environment in which two interpreters can be made to differ."""


class PolicySource(NamedTuple):
    """How another process can load the policy."""

    named: str | None
    """The policy's name or dotted path; ``None``: it is a class in ``module``."""
    module: str = ""
    file: str | None = None
    """The module's file, if it cannot be imported by name."""
    qualname: str = ""
    given: Policy | None = None
    """The policy object, if one was given rather than its class."""


class Question(NamedTuple):
    """The plans to make: for the random case of a seed, for a given case, or for a named crowd."""

    seed: int | None = None
    case: Case | None = None
    """A case whose policy is replaced by the one loaded in the other process."""
    crowd: str = ""
    num_steps: int = 0
    """Steps during which requests of the crowd arrive."""


class ProcessAnswer(NamedTuple):
    """The answer to a ``Question``: the digest of its plans, and the variables that hooks read."""

    digest: str
    """The digest of all plans, or the error that ended the run."""
    reads: tuple[str, ...] = ()
    """The environment variables that hooks read, each with the line of code."""


FIRST_HOUR, HOURS = 3.0, 12.3  # time of day of the first interpreter, and the distance to the next
DAY = 86_400.0  # seconds: each has its own date
PACE = 1.7  # speed of the clocks, to the power of the number
FIRST_PID, NEXT_PID = 10_007, 101  # primes, so that remainders differ
SIZES = range(16, 512, 16)  # sizes of small objects in bytes
HOLES = 400  # free places per size for new objects
READERS = (
    os.__file__,
    "<frozen os>",
    "<frozen _collections_abc>",
)  # which read it for others
UNKNOWN = "1"  # value of unset environment variables in every second interpreter


def serve(line: Connection) -> None:
    """Answer the questions of the parent process until it closes the connection."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):  # discard what the policy prints
        os.dup2(nowhere, output)
    source, options, number, parts = line.recv()
    world = World(number, parts, source.module or (source.named or "").rpartition(".")[0])
    try:
        policy = load(source)
        given = line.recv()
    except BaseException as error:  # importing an author's module may raise anything
        line.send(
            f"the policy cannot be loaded in another process: {type(error).__name__}: {error}"
        )
        return
    line.send(None)
    while True:
        try:
            question = line.recv()
        except EOFError:
            return
        line.send(answer(question, policy if given is None else given, options, world))


def answer(
    question: Question, policy: Any, options: dict[str, Any] | None, world: World
) -> ProcessAnswer:
    """Plan the question's run in the changed environment. An exception becomes the answer's
    text."""
    world.scatter()
    del world.reads[:]
    try:
        digest = digest_of(question, policy, options)
    except Exception as error:  # an error is an answer, too
        digest = f"{type(error).__name__}: {error}"
    return ProcessAnswer(digest, tuple(dict.fromkeys(world.reads)))


def digest_of(question: Question, policy: Any, options: dict[str, Any] | None) -> str:
    """The digest of all plans for the question. Raises an exception for a broken rule."""
    if question.crowd:
        [kind] = [kind for kind in KINDS if kind.name == question.crowd]
        kind = kind._replace(num_steps=question.num_steps)
        return Crowd(policy, options or {}, kind, is_patient=True).run().digest
    if question.case is not None:
        drawn = question.case.setup.config.policy_options
        case = with_policy(question.case, policy, drawn if options is None else options)
    else:
        assert question.seed is not None
        case = draw_case(question.seed, policy, options)
    return Simulation(case, every=2**62, leaks=False).run().digest


def with_policy(case: Case, policy: Any, options: dict[str, Any]) -> Case:
    """The case with this policy and its options in place of the case's own."""
    given = {**vars(case.setup.config), "scheduling_policy": policy, "policy_options": options}
    setup = msgspec.structs.replace(case.setup, config=SchedulerConfig(**given))
    return msgspec.structs.replace(case, setup=setup)


def load(source: PolicySource) -> Any:
    """Load the policy. May raise any exception of its module."""
    if source.named is not None:
        return source.named
    try:
        found = _look_up(importlib.import_module(source.module), source.qualname)
    except (ImportError, AttributeError):
        found = None
    if source.module == "__main__" or not isinstance(found, type):
        found = _look_up(_from_file(source.module, source.file), source.qualname)
    return found


def _look_up(module: Any, qualname: str) -> Any:
    for name in qualname.split("."):
        module = getattr(module, name)
    return module


def _from_file(name: str, file: str | None) -> Any:
    spec = importlib.util.spec_from_file_location(name, file or "")
    if spec is None or spec.loader is None:
        raise ImportError(f"module {name!r} has no source file")
    module = importlib.util.module_from_spec(spec)
    if name == "__main__":  # code under `if __name__ == "__main__"` does not run
        module.__name__ = "__mp_main__"
    sys.modules[name] = module
    spec.loader.exec_module(module)
    if name == "__main__":
        module.__name__ = name
    return module


class World:
    """Changes clocks, random numbers, process id and environment of this process. ``number``: which
    interpreter this is; ``parts``: what differs by number; ``home``: the policy's module."""

    def __init__(self, number: int, parts: Collection[str], home: str) -> None:
        self._home = home
        self.reads: list[str] = []
        self._number_of = {part: number if part in parts else 1 for part in PARTS}
        self._kept: list[bytes] = []
        random.seed(self._number_of[DICE])
        np.random.seed(self._number_of[DICE])
        pid = FIRST_PID + NEXT_PID * self._number_of[PROCESS]
        os.getpid = lambda: pid
        self._change_clocks(self._number_of[CLOCKS])
        self._change_environment()

    def scatter(self) -> None:
        """Make new objects get different addresses, in a different order."""
        dice = random.Random(self._number_of[ADDRESSES])
        blocks = [bytes(size) for size in SIZES for _ in range(2 * HOLES)]
        dice.shuffle(blocks)
        self._kept = blocks[: len(blocks) // 2]

    def _change_clocks(self, number: int) -> None:
        # It is night in one interpreter and afternoon in the other, whenever this runs.
        hour = FIRST_HOUR + HOURS * (number - 1)
        local = time.localtime()
        passed = 3600 * local.tm_hour + 60 * local.tm_min + local.tm_sec
        pace, shift = PACE**number, DAY * number + 3600.0 * hour - passed
        for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
            setattr(time, name, _warped(getattr(time, name), pace, shift))
            setattr(time, f"{name}_ns", _in_ns(getattr(time, name)))
        for name in ("localtime", "gmtime", "ctime"):
            setattr(time, name, _now_if_none(getattr(time, name)))
        for name in ("strftime", "asctime"):
            setattr(time, name, _local_if_none(getattr(time, name)))
        datetime.datetime = Datetime  # type: ignore[misc]
        datetime.date = Date  # type: ignore[misc]

    def _change_environment(self) -> None:
        world = self

        class Environment(type(os.environ)):  # type: ignore[misc]
            """``os.environ``, recording which variables hooks read. In interpreters with an even
            number, the policy's code finds every variable set."""

            def __getitem__(self, name: str) -> str:
                world.note(name)
                try:
                    value: str = super().__getitem__(name)
                    return value
                except KeyError:
                    if world.is_full and world.is_authors():
                        return UNKNOWN
                    raise

            def __iter__(self) -> Iterator[str]:
                world.note("all names")
                yield from super().__iter__()

        os.environ.__class__ = Environment

    @property
    def is_full(self) -> bool:
        return self._number_of[ENVIRONMENT] % 2 == 0

    def is_authors(self) -> bool:
        """True if the code that is reading the environment belongs to the policy's package."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename in READERS and frame.f_back is not None:
            frame = frame.f_back
        name = str(frame.f_globals.get("__name__", ""))
        return bool(self._home) and name.partition(".")[0] == self._home.partition(".")[0]

    def note(self, name: str) -> None:
        """Record that a policy hook reads this environment variable; ignore all other readers."""
        reader, frame = None, sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if file == hooks.__file__ and reader is not None:
                self.reads.append(f"{reader} reads {name!r} of the environment")
                return
            if reader is None and file not in READERS:
                reader = f"{frame.f_code.co_qualname} (line {frame.f_lineno})"
            frame = frame.f_back  # type: ignore[assignment]


def _warped(clock: Callable[[], float], pace: float, shift: float) -> Callable[[], float]:
    begun = clock()
    return lambda: begun + shift + pace * (clock() - begun)


def _in_ns(clock: Callable[[], float]) -> Callable[[], int]:
    return lambda: int(1e9 * clock())


def _now_if_none(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function such as ``time.localtime`` to use the changed clock if called without a
    time."""
    return lambda seconds=None: ask(time.time() if seconds is None else seconds)


def _local_if_none(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function such as ``time.strftime``: without a time as last argument, it uses the
    current time of the changed clock."""

    def with_time(*given: Any) -> Any:
        has_time = given and not isinstance(given[-1], str)
        return ask(*given) if has_time else ask(*given, time.localtime())

    return with_time


class Datetime(datetime.datetime):
    """The class ``datetime`` with a current time from the changed clock."""

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> Any:
        return cls.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> Any:
        return cls.now()


class Date(datetime.date):
    """The class ``date`` with a current day from the changed clock."""

    @classmethod
    def today(cls) -> Any:
        return cls.fromtimestamp(time.time())
