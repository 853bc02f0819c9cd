"""Makes the k-th call that can fail raise, for k = 1, 2, ... until there is no k-th.

After an error in a hook its default is used: all requests get the right tokens, and nothing is
lost. An error of the worker, or a lack of memory, ends the engine with this error, and all that it
holds can be released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Literal, NamedTuple

from engine.sched.plugins.hooks import HOOKS
from engine.sched.plugins.resources import HOOKS as OWN_HOOKS
from engine.sched.policy import Policy
from engine.sched.resource import Resource
from engine.states.decide import StateSnapshots
from policylab.verify.case import Case
from policylab.verify.needs import Need
from policylab.verify.pictures import Pictures
from policylab.verify.simulation import Simulation

# A resource that raises where it keeps its books (take, release, ...) may be wrong for ever after.
# Only the resource of snapshots may fail anywhere.
RESOURCE_HOOKS = ("watches", "extra", "fit", "added", "parked")
Part = Literal["hook", "worker", "memory"]  # of the engine, in which a call fails


class Injected(Exception):
    """A failure that the sweep injects."""


class InjectedMemoryError(MemoryError):
    """A lack of memory that the sweep injects."""


class Meter:
    """Counts calls and makes one of them raise."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.num_calls = 0
        self.culprit = ""
        self.part: Part = "hook"
        self._outermost: Part | None = None  # part of the watched call that is being made

    def watch(self, part: Part, owner: Any, name: str, error: type[Exception] = Injected) -> None:
        """Count the calls of this method, which belongs to this part of the engine."""
        inner: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                self.culprit = f"{type(owner).__name__}.{name}"
                self.part = self._outermost or part
                raise error(f"call {self.num_calls}, {self.culprit}")
            before, self._outermost = self._outermost, self._outermost or part
            try:
                return inner(*args, **kwargs)
            finally:
                self._outermost = before

        setattr(owner, name, call)


class Swept(NamedTuple):
    """The call that raised, and how the run ended."""

    fails_at: int
    culprit: str
    part: Part
    ended: bool  # the engine ended with the error; otherwise it went on


def sweep(case: Case, *, most: int = 100_000) -> Iterator[Swept]:
    """Run the case once for each call that can fail. ``AssertionError`` names k and the call."""
    for fails_at in count(1):
        meter = Meter(fails_at)
        simulation = Simulation(case, leaks=False, plugins=False)
        watch_everything(simulation, meter)
        ended = False
        try:
            simulation.run()
        except (Injected, InjectedMemoryError):
            ended = True
        except Exception as error:
            raise AssertionError(f"k = {fails_at}, {meter.culprit}: {error!r}") from error
        if not meter.culprit:
            return
        if ended:
            check_abandoned(simulation, meter)
        yield Swept(fails_at, meter.culprit, meter.part, ended)
        if fails_at >= most:
            return


def watch_everything(simulation: Simulation, meter: Meter) -> None:
    """Count calls of the policy's own hooks, hooks of resources, the worker and the pool."""
    scheduler = simulation.scheduler
    policy = scheduler.policy
    for hook in HOOKS:
        if getattr(type(policy), hook) is not getattr(Policy, hook):
            meter.watch("hook", policy, hook)
    for need in simulation.needs:
        keeps_books = ("added", "parked") if isinstance(need, Pictures) else ()
        for hook in (each for each in RESOURCE_HOOKS if each not in keeps_books):
            if getattr(type(need), hook) not in (getattr(Resource, hook), getattr(Need, hook)):
                meter.watch("hook", need, hook)
    for resource in scheduler.resources.members:
        if isinstance(resource, StateSnapshots):  # without it, no further snapshots are taken
            for hook in OWN_HOOKS:
                if hook in vars(type(resource)):
                    meter.watch("hook", resource, hook)
    meter.watch("worker", simulation.worker, "launch")
    meter.watch("worker", simulation.worker, "collect")
    meter.watch("memory", scheduler.kv.pool, "take", InjectedMemoryError)


def check_abandoned(simulation: Simulation, meter: Meter) -> None:
    """After the engine ended within a step, abort all requests; nothing may stay held."""
    scheduler, where = simulation.scheduler, f"k = {meter.fails_at}, {meter.culprit}"
    scheduler.guard.faults.reentry.end()  # the step, which raised, did not
    scheduler.finish_requests(None)
    assert not scheduler.has_unfinished_requests(), f"{where}: somebody is left"
    assert scheduler.kv.num_free == scheduler.kv.num_usable, f"{where}: blocks are lost"
    assert not any(scheduler.kv.pool.num_refs), f"{where}: blocks are referenced"
    num_seats = scheduler.config.max_num_seqs
    assert scheduler.roster.num_free_seats == num_seats, f"{where}: seats are lost"
