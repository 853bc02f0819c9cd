"""Many runs: policies on the same requests, over seeds and settings, in several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from math import inf
from os import cpu_count
from typing import Any, TypeVar

from engine.config.sched import SchedulerConfig
from engine.errors import ConfigError, EngineDeadError, PolicyError
from engine.ipc.pool import workers
from policylab.sim.figures import Figures, figures, period_of
from policylab.sim.promises import Limit
from policylab.sim.run import Engine, Run, run
from policylab.sim.steady import BACKLOG, Window
from policylab.sim.workloads import Workload

MAX_SEEDS = 10_000
OF_POLICY = ("scheduling_policy", "policy_options")
FLAGS = tuple(each.name for each in fields(Engine) if isinstance(each.default, bool))
UNPAIRED_STRIDE = 100_003  # distance between the seeds of two policies

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Policies to run, and the workload, engine and seed for all of their runs."""

    policies: tuple[Any, ...]
    workload: Workload
    engine: Engine = field(default_factory=Engine)
    seed: int = 0
    rate: float | None = None
    """Requests per second; ``None``: the workload's own rate."""
    slo: tuple[Limit, ...] = ()
    is_paired: bool = True
    """Whether all policies get the same requests; if not, each policy has its own seed."""
    is_whole: bool = False
    """Whether all requests count, including those of the warm-up and of overloaded runs."""

    def seed_of(self, place: int) -> int:
        """The seed for the policy at index ``place``."""
        return self.seed if self.is_paired else self.seed + place * UNPAIRED_STRIDE


@dataclass(frozen=True)
class NoFigures:
    """Takes the place of a policy's figures if its run failed or if defaults replaced some of its
    answers."""

    why: str


def measure(setting: Setting) -> list[Figures | NoFigures]:
    """Run each policy. Returns its figures, or the reason why it has none. Policies with the same
    requests are measured on the same ones: those after the longest warm-up or, in a backlog,
    all."""
    requests = (setting.workload, setting.engine)
    runs = [
        own_run(policy, *requests, setting.seed_of(place), setting.rate)
        for place, policy in enumerate(setting.policies)
    ]
    own = [each for each in runs if isinstance(each, Run)]
    found = iter(_figures_of(own, setting))
    return [next(found) if isinstance(each, Run) else each for each in runs]


def own_run(
    policy: Any, workload: Workload, engine: Engine, seed: int, rate: float | None
) -> Run | NoFigures:
    """Run one policy. Returns ``NoFigures`` if the run fails, or if defaults replaced some of the
    policy's answers."""
    try:
        found = run(policy, workload, engine, seed=seed, rate=rate)
    except PolicyError as error:
        return NoFigures(str(error))
    return NoFigures(found.not_own) if found.not_own else found


def _figures_of(runs: Sequence[Run], setting: Setting) -> list[Figures]:
    periods = [period_of(each) for each in runs]
    if setting.is_whole:
        periods = [period.whole() for period in periods]
    elif setting.is_paired and any(period.is_whole for period in periods):
        periods = [period.whole(BACKLOG) for period in periods]
    elif setting.is_paired:
        steady = [period for period in periods if period.num_warmup]
        periods = [reduce(Window.joined, steady, period) for period in periods]
    return [
        figures(each, slo=setting.slo, period=period)
        for each, period in zip(runs, periods, strict=True)
    ]


def in_processes(
    work: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Iterator[Result]:
    """The result of ``work`` for each item, in the order of the items, computed in ``jobs``
    processes.

    Raises ``ConfigError`` for too many jobs, ``EngineDeadError`` if a process dies, and what
    ``work`` raises.
    """
    check_jobs(jobs)
    if jobs == 1 or len(items) == 1:
        yield from map(work, items)
        return
    with workers(min(jobs, len(items))) as pool:
        pending = [pool.submit(work, item) for item in items]
        try:
            for future in pending:
                yield future.result()
        except BrokenProcessPool as error:
            raise EngineDeadError(
                "a simulating process died (killed, or out of memory); its part of the "
                "figures is lost: run again, with fewer --jobs if memory is short"
            ) from error


def check_jobs(jobs: int) -> None:
    """Raise ``ConfigError`` for more processes than processors, or for none."""
    most = max(1, cpu_count() or 1)
    if not 1 <= jobs <= most:
        raise ConfigError(f"--jobs is {jobs}, must be in 1..{most}, the number of processors")


def seeds_from(first: int, count: int) -> range:
    """Returns the ``count`` seeds from ``first`` on. Raises ``ConfigError``."""
    if not 1 <= count <= MAX_SEEDS:
        raise ConfigError(f"--seeds is {count}, must be in 1..{MAX_SEEDS}")
    if not 0 <= first < 2**31:
        raise ConfigError(f"--seed is {first}, must be in 0..{2**31 - 1}")
    return range(first, first + count)


def with_option(
    name: str, value: Any, workload: Workload, engine: Engine
) -> tuple[Workload, Engine]:
    """Returns the workload and the engine with the option ``name`` set to ``value``. It may be an
    option of the workload, the engine or the engine's scheduler.

    Raises ``ConfigError`` for an unknown option or a value that it cannot have.
    """
    try:
        return _with_option(name, value, workload, engine)
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{name} cannot be {value!r}: {error}") from error


def _with_option(
    name: str, value: Any, workload: Workload, engine: Engine
) -> tuple[Workload, Engine]:
    in_engine = {each.name for each in fields(Engine)} - {"scheduler", "cost"}
    in_workload = {each.name for each in fields(workload)}
    in_scheduler = {each.name for each in fields(SchedulerConfig)} - {*OF_POLICY}
    if name in OF_POLICY:
        raise ConfigError(
            f"option {name!r} belongs to the policy; write it after the policy's name, as "
            "in edf(default_deadline=5)"
        )
    if name in FLAGS and not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}, must be True or False")
    if name in in_engine:
        return workload, replace(engine, **{name: value})
    if name in in_workload:
        return replace(workload, **{name: value}), engine
    if name in in_scheduler:
        return workload, replace(engine, scheduler={**engine.scheduler, name: value})
    raise ConfigError(
        f"option {name!r} is unknown to the engine ({', '.join(sorted(in_engine))}), the "
        f"workload ({', '.join(sorted(in_workload))}) and the scheduler; write options of a "
        "policy after its name, as in edf(default_deadline=5)"
    )


def check_rate(rate: float | None) -> None:
    """Raise ``ConfigError`` for a rate that is not above 0."""
    if rate is not None and not 0 < rate <= inf:
        raise ConfigError(f"--rate is {rate:g}, must be above 0")


def distinct(names: Iterable[str]) -> list[str]:
    """Returns the names, with a number added to each one that occurs again, as in ``fcfs #2``."""
    found: list[str] = []
    for name in names:
        again = sum(other == name or other.startswith(f"{name} #") for other in found)
        found.append(f"{name} #{again + 1}" if again else name)
    return found
