"""Swarm: runs random cases of many seeds and reports those that break a rule."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import ConfigError
from policylab.verify.apart import ApartSimulation, is_apart
from policylab.verify.case import Add, Case, Jump, to_python
from policylab.verify.draw import draw_case
from policylab.verify.halves import MakeHalves, is_adaptive
from policylab.verify.shrink import GoesOn, shrink, to_its_end
from policylab.verify.simulation import CaseOutcome, Simulation
from policylab.verify.starvation import Waited

CORPUS = Path(__file__).with_name("corpus.jsonl")
TWICE_EVERY = 16  # one in this many seeds runs again, and must give the same plans
NO_CLOCK = ("fcfs", "priority")  # policies that do not depend on the clock
BY_AGE = "marconi"  # the policy of snapshots that weighs how long each was not used


class Broken(NamedTuple):
    """A failure: its message and the place in the code that raised it. Failures at the same place
    count as the same."""

    message: str
    place: str
    num_steps: int = 0  # steps planned before the failure


class FoundCase(NamedTuple):
    """A case that breaks a rule. ``seed`` is -1 for a case that was not drawn from a seed."""

    seed: int
    case: Case
    broken: Broken


class KeptCases(msgspec.Struct, frozen=True):
    """One line of the corpus file: a case that once broke a rule, and a note on it."""

    note: str
    case: Case


@dataclass
class Report:
    """Counts over the runs of a swarm, and the cases that broke a rule."""

    num_steps: int = 0
    num_runs: int = 0
    num_requests: int = 0
    num_drafts_right: int = 0
    num_followed: int = 0  # texts that followed a grammar to its end
    num_loads: int = 0  # of adapters into slots
    num_failed_loads: int = 0  # adapters that could not be read
    num_encoded: int = 0  # media items
    num_failed_media: int = 0  # items of which that could not be encoded
    steps_by_policy: Counter[str] = field(default_factory=Counter)
    steps_by_windows: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """Steps by the sliding windows of the groups of layers, 0 for full attention."""
    found: list[FoundCase] = field(default_factory=list)
    waited: Waited | None = None  # result of the overload trial, if it ran

    def add(self, other: Report) -> None:
        """Add the counts and cases of another report."""
        self.num_steps += other.num_steps
        self.num_runs += other.num_runs
        self.num_requests += other.num_requests
        self.num_drafts_right += other.num_drafts_right
        self.num_loads += other.num_loads
        self.num_failed_loads += other.num_failed_loads
        self.num_encoded += other.num_encoded
        self.num_failed_media += other.num_failed_media
        self.num_followed += other.num_followed
        self.steps_by_policy += other.steps_by_policy
        self.steps_by_windows += other.steps_by_windows
        self.found += other.found
        self.waited = self.waited or other.waited


class Swarm:
    """Runs a random engine and workload for each seed, with all checks.

    ``policy``: a name, dotted path, class or object; ``None``: a random shipped policy.
    ``options``: arguments of the policy; ``None``: random. ``every``: the whole state is checked
    once in this many operations, and one in this many runs is searched for references to ended
    requests; other checks are always made. ``halves``: makes real drafters and grammars for half of
    the runs."""

    def __init__(
        self,
        policy: Any = None,
        options: dict[str, Any] | None = None,
        *,
        every: int = 1,
        halves: MakeHalves | None = None,
    ) -> None:
        self.policy = policy
        self.halves = halves
        self.options = options
        self.every = every

    def run(self, seeds: Iterable[int], num_steps: int) -> Report:
        """Run the cases of these seeds until ``num_steps`` steps were planned or a rule was
        broken."""
        report = Report()
        for seed in seeds:
            if report.num_steps >= num_steps:
                break
            has_halves = self.halves is not None
            case = draw_case(seed, self.policy, self.options, has_halves=has_halves)
            self.enter(report, seed, case)
            if report.found:
                break
        return report

    def enter(self, report: Report, seed: int, case: Case) -> None:
        """Run a case and add its outcome to the report."""
        done = self.judge(case, twice=seed % TWICE_EVERY == 0, leaks=seed % self.every == 0)
        report.num_runs += 1
        report.num_steps += done.num_steps
        if isinstance(done, Broken):
            report.found.append(FoundCase(seed, case, done))
            return
        report.num_requests += done.num_accepted
        report.num_drafts_right += done.num_drafts_right
        report.num_loads += done.num_loads
        report.num_failed_loads += done.num_failed_loads
        report.num_encoded += done.num_encoded
        report.num_failed_media += done.num_failed_media
        report.num_followed += done.num_followed
        report.steps_by_policy[name_of(case.setup.config.scheduling_policy)] += done.num_steps
        report.steps_by_windows[case.setup.windows] += done.num_steps

    def judge(self, case: Case, *, twice: bool = True, leaks: bool = True) -> CaseOutcome | Broken:
        """Run a case; returns its outcome, or the rule that it broke. ``twice``: run it again, also
        without clock jumps, and compare the plans. ``leaks``: search for references to ended
        requests."""
        simulation = None
        try:
            simulation = simulate(case, every=self.every, leaks=leaks, halves=self.halves)
            outcome = simulation.run()
            if twice:
                check_same(case, outcome, self.halves)
            return outcome
        except Exception as error:  # any error is a finding
            return what_broke(error, simulation.num_steps if simulation is not None else 0)


def simulate(
    case: Case, *, every: int, leaks: bool = True, halves: MakeHalves | None = None
) -> Simulation | ApartSimulation:
    """A simulation of a case, on one core or on several; see ``Simulation``."""
    return kind_of(case)(case, every=every, leaks=leaks, halves=halves)


def kind_of(case: Case) -> type[Simulation | ApartSimulation]:
    """The class that simulates a case."""
    return ApartSimulation if is_apart(case.setup) else Simulation


def check_same(case: Case, outcome: CaseOutcome, halves: MakeHalves | None = None) -> None:
    """Check that the case gives the same plans when it is run again and, if its policies use no
    clock, when it is run without clock jumps."""
    again = simulate(case, every=max(1, outcome.num_steps), halves=halves).run()
    assert again == outcome, "the same case gives different plans"
    setup = case.setup
    reads_clock = setup.config.scheduling_policy not in NO_CLOCK or is_adaptive(setup)
    reads_clock |= bool(setup.snapshot_blocks) and setup.snapshot_policy == BY_AGE
    reads_clock |= setup.config.cache_policy is not None or is_apart(setup)
    # A request that has waited long for an adapter's slot gets one.
    if reads_clock or "adapters" in setup.needs or has_deadlines(case):
        return
    calm = [event for event in case.events if not isinstance(event, Jump)]
    if calm and len(calm) < len(case.events) and calm[-1].at == case.events[-1].at:
        calmly = Simulation(
            msgspec.structs.replace(case, events=calm),
            every=max(1, outcome.num_steps),
            halves=halves,
        ).run()
        assert calmly.digest == outcome.digest, "clock jumps change the plans"


def has_deadlines(case: Case) -> bool:
    """True if a request of the case has a hard deadline, so that its end depends on the clock."""
    adds = [event.request for event in case.events if isinstance(event, Add)]
    return any(add.queue_deadline is not None or add.end_deadline is not None for add in adds)


def what_broke(error: Exception, num_steps: int) -> Broken:
    """Describe an exception as a failure: its message and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = frames[-1]
    place = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno} {frame.name}"
    return Broken(str(error) or frame.line or "", place, num_steps)


def name_of(policy: Any) -> str:
    """The name of a policy, given as a name, class or object."""
    if isinstance(policy, str):
        return policy
    return (policy if isinstance(policy, type) else type(policy)).__qualname__


def read_corpus(path: Path = CORPUS) -> list[KeptCases]:
    """Read the cases of a corpus file. Raises ``ConfigError`` for any other file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [msgspec.json.decode(line, type=KeptCases) for line in lines]
    except (OSError, ValueError) as error:  # includes decoding errors
        raise ConfigError(f"{path} is not a corpus of cases: {error}") from error


def replay_corpus(swarm: Swarm, path: Path = CORPUS) -> Report:
    """Run all cases of a corpus file; the report contains those that break a rule."""
    report = Report()
    for kept in read_corpus(path):
        swarm.enter(report, -1, kept.case)
    return report


def keep(found: FoundCase, small: Case, path: Path) -> None:
    """Append ``small``, the shrunken form of a found case, to a corpus file. Raises ``TypeError``
    if its policy is not given by name."""
    kept = KeptCases(f"seed {found.seed}: {found.broken.message[:200]}", small)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(msgspec.json.encode(kept).decode() + "\n")


def smallest(
    found: FoundCase,
    max_tries: int = 2000,
    *,
    halves: MakeHalves | None = None,
    goes_on: GoesOn = to_its_end,
) -> Case:
    """Shrink a case that broke a rule, as long as it breaks the same rule. Returns the case
    unchanged if it does not break the rule again.

    ``goes_on(tries, case)``: called before each run; False ends the search."""
    swarm = Swarm(every=1, halves=halves)

    def breaks(case: Case) -> bool:
        done = swarm.judge(case)
        return isinstance(done, Broken) and done.place == found.broken.place

    if not goes_on(0, found.case) or not breaks(found.case):
        return found.case
    return shrink(found.case, breaks, max_tries, goes_on=goes_on)


def reproduction(case: Case) -> str:
    """A Python program, as text, that runs the case."""
    config, kind = case.setup.config, kind_of(case)
    lines = [
        "from engine.config.sched import SchedulerConfig",
        "from engine.messages.params import SamplingParams",
        "from engine.messages.requests import AddRequest, MediaItem",
        "from engine.sched.interface import PauseState",
        "from engine.messages.adapters import AdapterSource",
        "from engine.messages.pooling import PoolingParams",
        "from policylab.verify.case import Abort, Add, Bring, Case, Jump, Kill, Load, Pause, Reset",
        "from policylab.verify.case import ResetEncoder, Setup, Unload, Wake, Write",
        f"from {kind.__module__} import {kind.__name__}",
    ]
    for given in (config.scheduling_policy, config.scheduler_cls):
        if given is not None and not isinstance(given, str):
            lines.append(f"import {(given if isinstance(given, type) else type(given)).__module__}")
    lines += ["", f"setup = {to_python(case.setup)}", "events = ["]
    lines += [f"    {to_python(event)}," for event in case.events]
    made = ""
    if case.setup.has_halves:
        lines.insert(0, "from policylab.simulated import SimulatedHalves")
        made = ", halves=SimulatedHalves()"
    lines += ["]", f"print({kind.__name__}(Case(setup=setup, events=events){made}).run())"]
    return "\n".join(lines)
