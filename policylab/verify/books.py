"""Check that a policy does not keep data of finished requests.

Many small requests arrive and end. Whenever none is left, the memory reachable from the policy is
measured: its attributes, classes, functions' defaults and closures, and module globals. Users and
programs are always the same few, so data per user or program does not grow."""

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
from engine.messages.requests import AddRequest
from engine.sched.policy import Policy
from engine.sched.request import Request
from policylab.verify.case import Abort, Add, Case, Setup, plain_request
from policylab.verify.simulation import Simulation

FIRST_LOOK = 300  # requests before the first measurement; the number doubles each time
LEAST_LOOKS = 3
MOST_LOOKS = 6  # while it grows; bounded data has reached its bound by then
LEAST_GROWTH = 0.5  # bytes per request
USERS = 4
ABORT_EVERY = 17
AT_ONCE = 12  # unfinished requests at the same time
SOMEWHERE = "data that is not reachable from the policy, and holds finished requests,"
OURS = ("engine", "policylab")
FOREIGN = ("logging", "_pytest", "pytest", "unittest", "threading", "importlib")


class BookGrowth(NamedTuple):
    """The attribute or variable that grows most, its growth in bytes per request, and the number of
    requests that were served to find it."""

    place: str
    bytes_per_request: float
    num_requests: int


def find_growth(policy: Any, options: dict[str, Any]) -> BookGrowth | None:
    """Find which data of the policy grows with the number of finished requests; ``None`` if none
    does.

    Raises ``AssertionError`` if the policy breaks a rule during the run."""
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
    """The bytes of memory reachable from a policy, by name of the attribute or variable."""
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
    sizes[SOMEWHERE] += ended  # a byte each: the data that holds them is larger
    return sizes


def own_modules(policy: Policy) -> set[str]:
    """Names of the modules that define the policy's class and bases, without ``Policy`` and
    Python's own."""
    ready = (Policy.__module__, "builtins", "abc", "typing")
    return {cls.__module__ for cls in type(policy).__mro__ if cls.__module__ not in ready}


def _serve(simulation: Simulation, names: Iterator[int], rng: Random, num_requests: int) -> None:
    """Serve ``num_requests`` small requests to the end; every 17th is aborted."""
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
    prompt, priority = [rng.randrange(8) for _ in range(num_prompt)], rng.randrange(2)
    return plain_request(
        name, prompt, num_output, now, user, priority=priority, deadline=now + 10.0
    )


def _setup(policy: Any, options: dict[str, Any]) -> Setup:
    """A simulated engine with few KV blocks, so that requests are preempted."""
    config = SchedulerConfig(
        max_num_batched_tokens=32,
        max_num_seqs=8,
        max_model_len=16,
        scheduling_policy=policy,
        policy_options=options,
        length_predictor="history",
    )
    return Setup(config=config, num_blocks=18, block_size=2, tick=0.25)


# -- reachable values


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
    """True if the value belongs to the policy (its modules are ``own``), not to the engine or a
    library."""
    if isinstance(value, type | FunctionType):
        return value.__module__ in own
    if isinstance(value, ModuleType):
        return _is_own_module(value, own)
    home = type(value).__module__
    return home in own or home.partition(".")[0] not in (*OURS, *FOREIGN)


def _is_own_module(module: ModuleType, own: set[str]) -> bool:
    """True if the module is in the same directory as one of the policy's modules ``own``."""
    name = module.__name__
    if name.partition(".")[0] in {*OURS, *sys.stdlib_module_names, *FOREIGN}:
        return False
    path = str(getattr(module, "__file__", None) or "")
    files = (getattr(sys.modules.get(each), "__file__", None) or "" for each in own)
    return any(path.rpartition("/")[0] == file.rpartition("/")[0] for file in files)


def _inside(place: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield each object that ``value`` refers to, with its attribute's or variable's name; for
    elements of a container, the container's own name, ``place``."""
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
