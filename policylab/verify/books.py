"""Does what a policy keeps grow with the requests that have ended?

Many small requests come and end. Now and then, when none is left, everything that can be reached
from the policy is measured: its attributes and what is in them, those of its classes, defaults and
closures of their functions, and the globals of their modules. Books by user or by program stay as
they are, since users and programs do; what is kept for each request shows.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from engine.config.sched import SchedulerConfig
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.policy import Policy
from engine.sched.request import Request
from policylab.verify.case import Abort, Add, Case, Setup
from policylab.verify.simulation import Simulation

FIRST_LOOK = 300  # requests, and then twice as many each time
LEAST_LOOKS = 3
MOST_LOOKS = 6  # while it grows; what has a bound has reached it by then, or is too large a book
LEAST_GROWTH = 0.5  # bytes a request
USERS = 4
ABORT_EVERY = 17
AT_ONCE = 12  # requests that are under way at once
SOMEWHERE = "a book that cannot be reached from the policy, and holds requests that have ended,"
OURS = ("engine", "policylab")
FOREIGN = ("logging", "_pytest", "pytest", "unittest", "threading", "importlib")


class BookGrowth(NamedTuple):
    """Where a book is, and what it grows by with each request."""

    place: str
    bytes_per_request: float
    num_requests: int


def find_growth(policy: Any, options: dict[str, Any]) -> BookGrowth | None:
    """The book that grows most with requests that have ended; ``None`` if none does.

    Raises ``AssertionError`` for a rule that is broken meanwhile.
    """
    simulation = Simulation(Case(setup=_setup(policy, options)), every=2**62, leaks=False)
    names, rng = count(), Random(7)
    sizes, num_before = Counter[str](), 0
    for look in range(MOST_LOOKS):
        num_requests = FIRST_LOOK * 2**look
        _serve(simulation, names, rng, num_requests - num_before)
        before, sizes = sizes, measured(simulation.scheduler.guard.inner)
        more = {place: size - before[place] for place, size in sizes.items()}
        place = max(more, key=more.__getitem__)
        share = more[place] / (num_requests - num_before)
        num_before = num_requests
        if look + 1 >= LEAST_LOOKS and share < LEAST_GROWTH:
            return None
    return BookGrowth(place, share, num_before)


def measured(policy: Policy) -> Counter[str]:
    """Bytes of what can be reached from a policy, by where it is."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    own = own_modules(policy)
    todo = list(_roots(policy, own))
    while todo:
        place, value = todo.pop()
        if id(value) in seen or not _is_own(value, own):
            continue
        seen.add(id(value))
        sizes[place] += _size(value)
        todo += _inside(place, value)
    gc.collect()
    ended = sum(type(each) is Request for each in gc.get_objects())
    sizes[SOMEWHERE] += ended  # a byte each: wherever a book of them is, it is larger
    return sizes


def own_modules(policy: Policy) -> set[str]:
    """Modules of the policy's classes."""
    ready = (Policy.__module__, "builtins", "abc", "typing")
    return {cls.__module__ for cls in type(policy).__mro__ if cls.__module__ not in ready}


def _serve(simulation: Simulation, names: Iterator[int], rng: Random, num_requests: int) -> None:
    """This many small requests come and end; each 17th is aborted on its way."""
    for _ in range(num_requests):
        index = next(names)
        simulation.happen(Add(at=0, request=_small(str(index), rng, simulation.now)))
        if index % ABORT_EVERY == 0:
            simulation.step()
            simulation.happen(Abort(at=0, request_ids=[str(index)]))
        tries = 0
        while len(simulation.clients.live) >= AT_ONCE and tries < 4 * AT_ONCE:
            simulation.step()
            tries += 1
    simulation.drain()


def _small(name: str, rng: Random, now: float) -> AddRequest:
    num_prompt, num_output = rng.randint(1, 6), rng.randint(1, 4)
    user = f"u{rng.randrange(USERS)}"
    return AddRequest(
        name,
        [rng.randrange(8) for _ in range(num_prompt)],
        SamplingParams(max_tokens=num_output),
        seed=0,
        arrival_time=now,
        max_tokens=num_output,
        priority=rng.randrange(2),
        user=user,
        deadline=now + 10.0,
        hints={"output_tokens": num_output, "program": f"program of {user}"},
    )


def _setup(policy: Any, options: dict[str, Any]) -> Setup:
    """An engine with too few blocks, so that requests are preempted too."""
    config = SchedulerConfig(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=16,
        scheduling_policy=policy,
        policy_options=options,
        length_predictor="history",
    )
    return Setup(config=config, num_blocks=18, block_size=2, tick=0.25)


# -- what can be reached


def _roots(policy: Policy, own: set[str]) -> Iterator[tuple[str, object]]:
    name = type(policy).__name__
    yield name, policy
    for cls in type(policy).__mro__:
        if cls.__module__ in own:
            yield cls.__name__, cls
    for module in sorted(own):
        for key, value in list(vars(sys.modules.get(module, ModuleType(module))).items()):
            if not key.startswith("__"):
                yield f"{module}.{key}", value


def _is_own(value: object, own: set[str]) -> bool:
    """Is it the policy's, rather than the engine's or a library's?"""
    if isinstance(value, type | FunctionType):
        return value.__module__ in own
    if isinstance(value, ModuleType):
        return _is_own_module(value, own)
    home = type(value).__module__
    return home in own or home.partition(".")[0] not in (*OURS, *FOREIGN)


def _is_own_module(module: ModuleType, own: set[str]) -> bool:
    """Whether the policy's author wrote this module too: same package or same directory."""
    name = module.__name__
    if name.partition(".")[0] in {*OURS, *sys.stdlib_module_names, *FOREIGN}:
        return False
    path = str(getattr(module, "__file__", None) or "")
    files = (getattr(sys.modules.get(each), "__file__", None) or "" for each in own)
    return any(path.rpartition("/")[0] == file.rpartition("/")[0] for file in files)


def _inside(place: str, value: object) -> Iterator[tuple[str, object]]:
    """What a value holds, and where it is. Elements of a container are where it is."""
    if isinstance(value, MethodType):
        yield place, value.__self__
        value = value.__func__
    if isinstance(value, type | FunctionType):
        place = value.__qualname__
    if isinstance(value, FunctionType):
        yield f"{place}.__defaults__", (value.__defaults__, value.__kwdefaults__)
        yield f"{place}.__closure__", value.__closure__
        yield f"{place}.__wrapped__", vars(value)
    elif isinstance(value, type | ModuleType):
        for name, inner in list(vars(value).items()):
            if not name.startswith("__"):
                yield f"{place}.{name}", inner
    elif isinstance(value, Request):
        return
    elif type(value).__module__ != "builtins" and hasattr(value, "__dict__"):
        for name, inner in list(vars(value).items()):
            yield f"{place}.{name}", inner
        others = [each for each in gc.get_referents(value) if each is not vars(value)]
        yield from ((place, each) for each in others)
    else:
        yield from ((place, inner) for inner in gc.get_referents(value))


def _size(value: object) -> int:
    try:
        return sys.getsizeof(value)
    except Exception:  # a class of the author's may answer anything
        return 0
