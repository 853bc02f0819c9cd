"""Explores every state that a few small requests can bring a scheduler to.

    python -m tools.explore [--requests 3] [--seats 2] [--policy fcfs] [--jobs 1]

From every state everything that can happen next is tried: each request that is not there yet comes,
each that is there is aborted, a step is planned and computed, the oldest result arrives. States
that differ only in names (of blocks, seats, steps) are one. All checks run in every state, and from
every state steps alone must lead to an end. A depth of 2 covers 1: nothing forces a second step to
be planned before the first is settled.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

from engine.config.sched import SchedulerConfig
from engine.ipc.pool import workers
from engine.kv.manager import KVManager
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.messages.step import StepPlan, StepResult
from engine.sched.plugins.find import find_policy
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler
from policylab.verify.check import check_empty, check_plan, check_ranked, check_state
from policylab.verify.fake import DigestWorker, token_after
from policylab.verify.invariants import check_faults, check_mirror, check_order
from tools.clone import clone

BLOCK_SIZE = 2
USABLE_BLOCKS = 4
LONGEST_PROMPT = 4
MOST_OUTPUTS = 2
OLD_STEPS = 6  # since the last offer, from which on a paused request is a victim for anybody
Parts = tuple[Any, ...]
Key = bytes
Move = tuple[str, int]


class Spec(NamedTuple):
    """A request: its tokens are all ``token``, so equal ones share what is cached."""

    token: int
    num_prompt: int
    max_tokens: int
    priority: int = 0

    def add(self, name: int) -> AddRequest:
        return AddRequest(
            str(name),
            [self.token] * self.num_prompt,
            SamplingParams(max_tokens=self.max_tokens),
            seed=0,
            arrival_time=0.0,
            max_tokens=self.max_tokens,
            priority=self.priority,
        )


class Scenario(NamedTuple):
    """An engine and the requests that come to it."""

    specs: tuple[Spec, ...]
    policy: str = "fcfs"
    options: tuple[tuple[str, Any], ...] = ()
    depth: int = 2
    seats: int = 2
    budget: int = 3
    caching: bool = True


class World:
    """One state: scheduler, worker, steps in flight and what clients heard."""

    def __init__(self, scenario: Scenario) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=scenario.budget,
            max_num_seqs=scenario.seats,
            max_model_len=LONGEST_PROMPT + MOST_OUTPUTS + 1,
            num_steps_in_flight=scenario.depth,
        )
        kv = KVManager(USABLE_BLOCKS + 1, BLOCK_SIZE, enable_prefix_caching=scenario.caching)
        policy = find_policy(scenario.policy, dict(scenario.options))
        self.scheduler = Scheduler(config, kv, policy, clock=float)
        self.worker = DigestWorker(kv.num_blocks, BLOCK_SIZE)
        self.flight: list[tuple[StepPlan, StepResult]] = []
        self.reqs: dict[int, Request] = {}  # by number of the spec; ended ones are out
        self.ended: set[int] = set()
        self.outputs: dict[int, list[int]] = {}

    # -- what can happen

    def moves(self, scenario: Scenario) -> Iterator[Move]:
        """Everything that can happen next."""
        for name in range(len(scenario.specs)):
            if name not in self.reqs and name not in self.ended:
                yield "add", name
        for name in self.reqs:
            yield "abort", name
        if len(self.flight) < scenario.depth:
            yield "schedule", 0
        if self.flight:
            yield "settle", 0

    def do(self, move: Move, scenario: Scenario) -> None:
        """Let it happen; raises ``AssertionError`` if something is wrong then."""
        kind, name = move
        if kind == "add":
            self.reqs[name] = self.scheduler.add_request(scenario.specs[name].add(name))
            self.outputs[name] = []
        elif kind == "abort":
            (ended,) = self.scheduler.finish_requests(str(name))
            assert ended.request_id == self.reqs[name].request_id
            self._end(name)
        elif kind == "schedule":
            self._schedule()
        else:
            self._settle(scenario)
        check_state(self.scheduler)
        check_faults(self.scheduler)
        if not (self.reqs or self.flight):
            check_empty(self.scheduler)

    def _schedule(self) -> None:
        plan = self.scheduler.schedule()
        check_order(self.scheduler)
        check_ranked(self.scheduler, plan)
        if not plan.is_empty:
            check_plan(self.scheduler, plan)
            self.flight.append((plan, self.worker.launch(plan)))
            check_mirror(self.scheduler, self.worker)

    def _settle(self, scenario: Scenario) -> None:
        plan, result = self.flight.pop(0)
        for out in self.scheduler.update_from_output(plan, result).values():
            tokens = iter(out.token_ids)
            for request_id in out.request_ids:
                name = int(request_id)
                assert name in self.reqs, f"{name}: an output, and it is not under way"
                self.outputs[name].append(next(tokens))
                spec = scenario.specs[name]
                heard = self.outputs[name]
                right = token_after([spec.token] * spec.num_prompt + heard[:-1])
                assert heard[-1] == right, f"{name}: {heard}, the last should be {right}"
            for end in out.finished:
                name = int(out.request_ids[end.index])
                assert end.reason == "length", f"{name} ends with {end.reason}"
                assert len(self.outputs[name]) == scenario.specs[name].max_tokens
                self._end(name)

    def _end(self, name: int) -> None:
        assert self.reqs.pop(name).is_finished
        self.ended.add(name)
        del self.outputs[name]

    # -- which state is this

    def key(self) -> Key:
        """Equal for states from which the same can follow."""
        scheduler = self.scheduler
        names = _block_names(scheduler, self.reqs)
        pool, cache = scheduler.kv.pool, scheduler.kv.cache
        cached = [(cache.hash_of(block), self.worker.kv[block]) for block in names]
        parts = (
            sorted(self.ended),
            [self._request_parts(name, names) for name in self._in_order()],
            [names[block] for block in pool.free_order()],
            [(block_hash, kv) if block_hash else None for block_hash, kv in cached],
            [self._flight_parts(plan, result) for plan, result in self.flight],
            len(scheduler.roster.freed_slots),
        )
        return blake2b(repr(parts).encode(), digest_size=16).digest()

    def _in_order(self) -> list[int]:
        return sorted(self.reqs, key=lambda name: self.reqs[name].arrival)

    def _request_parts(self, name: int, names: dict[int, int]) -> Parts:
        req, scheduler = self.reqs[name], self.scheduler
        table, held = req.table, scheduler.kv.held(req)
        kv = [self.worker.kv[b][: req.num_computed - i * BLOCK_SIZE] for i, b in enumerate(held)]
        age = scheduler.settler.counters.num_steps - req.considered
        return (
            name,
            req.status.value,
            req.row,
            req.num_tokens,
            req.num_computed,
            req.num_pending,
            table.in_flight.at[req.row],
            int(scheduler.kv.num_published[req.row]),
            scheduler.kv.num_adopted(req),
            min(age, OLD_STEPS),
            [names[block] for block in held],
            kv,
        )

    def _flight_parts(self, plan: StepPlan, result: StepResult) -> Parts:
        """A step in flight: rows of requests that have ended count only until it has retired."""
        table = self.scheduler.roster.table
        current = (table.generation.all[plan.rows] == plan.generations) & (
            table.alive.all[plan.rows] == 1
        )
        columns = (plan.rows, plan.starts, plan.counts, current, result.counts, result.token_ids)
        return tuple(column.tolist() for column in columns)


def _block_names(scheduler: Scheduler, reqs: dict[int, Request]) -> dict[int, int]:
    """Blocks by the place at which they are met first: tables in order of arrival, then free ones
    in the order in which they will be taken."""
    names: dict[int, int] = {}
    for req in sorted(reqs.values(), key=lambda req: req.arrival):
        for block in scheduler.kv.held(req):
            names.setdefault(block, len(names))
    for block in scheduler.kv.pool.free_order():
        names.setdefault(block, len(names))
    return names


class Explored(NamedTuple):
    """Counts of an exploration."""

    num_states: int = 0
    num_moves: int = 0
    num_ends: int = 0

    def plus(self, other: Explored) -> Explored:
        """Both together."""
        return Explored(*(one + more for one, more in zip(self, other, strict=True)))


class Wrong(AssertionError):
    """Something is wrong in a state; says by which moves it is reached."""


def explore(scenario: Scenario) -> Explored:
    """Every state of a scenario. Raises ``Wrong``."""
    world = World(scenario)
    first = world.key()
    paths: dict[Key, tuple[Move, ...]] = {first: ()}
    steady: dict[Key, Key | None] = {}  # where steps alone lead to
    ends: set[Key] = set()
    num_moves = 0
    todo = [(world, first)]
    while todo:
        world, key = todo.pop()
        if not (world.reqs or world.flight):
            ends.add(key)
        reached: dict[str, Key] = {}
        moves = list(world.moves(scenario))
        for move in moves:
            after = world if move is moves[-1] else clone(world)
            try:
                after.do(move, scenario)
            except Exception as error:
                raise Wrong(f"{scenario}: {[*paths[key], move]}: {error!r}") from error
            num_moves += 1
            reached[move[0]] = new = after.key()
            if new not in paths:
                paths[new] = (*paths[key], move)
                todo.append((after, new))
        planned = reached.get("schedule")
        steady[key] = planned if planned not in (None, key) else reached.get("settle")
    num_ends = len(ends)
    for key in steady:
        if not leads_to_end(key, steady, ends):
            raise Wrong(f"{scenario}: {list(paths[key])}: steps alone lead to no end")
    return Explored(len(paths), num_moves, num_ends)


def leads_to_end(key: Key, steady: dict[Key, Key | None], ends: set[Key]) -> bool:
    """Does this state come to an end if nothing but steps happens? Then it is added to ``ends``."""
    way: list[Key] = []
    on_way: set[Key] = set()
    at: Key | None = key
    while at is not None and at not in ends and at not in on_way:
        way.append(at)
        on_way.add(at)
        at = steady[at]
    if at is None or at not in ends:
        return False
    ends.update(way)
    return True


def all_specs(priorities: Sequence[int]) -> list[Spec]:
    """Every request: two contents, prompts of 1 to 4, outputs of 1 to 2, these priorities."""
    return [
        Spec(token, num_prompt, max_tokens, priority)
        for token in (1, 2)
        for num_prompt in range(1, LONGEST_PROMPT + 1)
        for max_tokens in range(1, MOST_OUTPUTS + 1)
        for priority in priorities
    ]


def all_scenarios(num_requests: int, priorities: Sequence[int], **engine: Any) -> list[Scenario]:
    """Every choice of this many requests. They come in any order, so their order here does not
    matter, nor does which of the two contents is which."""
    chosen: dict[tuple[Spec, ...], None] = {}
    for specs in combinations_with_replacement(all_specs(priorities), num_requests):
        twins = tuple(sorted(spec._replace(token=3 - spec.token) for spec in specs))
        chosen.setdefault(min(tuple(sorted(specs)), twins))
    return [Scenario(specs, **engine) for specs in chosen]


def explore_all(scenarios: Sequence[Scenario], jobs: int = 1) -> Iterator[Explored]:
    """The counts of each, as they come."""
    if jobs == 1:
        yield from map(explore, scenarios)
        return
    with workers(jobs) as pool:
        yield from pool.map(explore, scenarios, chunksize=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=3, metavar="N")
    parser.add_argument("--depth", type=int, default=2, metavar="N", help="steps in flight")
    parser.add_argument("--seats", type=int, default=2, metavar="N")
    parser.add_argument("--budget", type=int, default=3, metavar="N", help="tokens of a step")
    parser.add_argument("--policy", default="fcfs", metavar="NAME", help="fcfs or priority")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    parsed = parser.parse_args()
    has_classes = parsed.policy == "priority"
    scenarios = all_scenarios(
        parsed.requests,
        (0, 1) if has_classes else (0,),
        policy=parsed.policy,
        options=(("preempt_for_waiting", True),) if has_classes else (),
        depth=parsed.depth,
        seats=parsed.seats,
        budget=parsed.budget,
    )
    total = Explored()
    for index, explored in enumerate(explore_all(scenarios, parsed.jobs), start=1):
        total = total.plus(explored)
        if index % 20 == 0 or index == len(scenarios):
            print(
                f"{index} of {len(scenarios)} scenarios: {total.num_states:,} states, "
                f"{total.num_moves:,} moves, {total.num_ends:,} ends",
                flush=True,
            )
    print(f"complete: {total.num_states:,} states, no violation")


if __name__ == "__main__":
    main()
