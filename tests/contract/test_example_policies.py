"""The policies in examples/ are plug-ins as a stranger would write them, and keep their word."""

import random
from collections import Counter

import pytest

from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.errors import RefusedError
from engine.kv.manager import KVManager
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.plugins.find import make_scheduler
from engine.sched.scheduler import Scheduler
from policylab.verify.check import check_empty, check_plan, check_state
from policylab.verify.fake import DigestWorker, token_after
from policylab.verify.testing import check_policy

POLICIES = (
    "examples.policies.fair_share.FairShare",
    "examples.policies.shortest_first.ShortestFirst",
    "examples.policies.deadlines.EarliestDeadline",
    "examples.policies.tiers.TieredDeadlines",
    "examples.policies.level_fair.LevelFair",
    "examples.policies.cautious_srpt.CautiousSRPT",
    "examples.policies.pressure_chunk.PressureChunk",
    "examples.policies.longest_out.LongestOut",
)
BLOCK_SIZE = 4
NUM_BLOCKS = 24


class CheckedWorker(DigestWorker):
    """Checks every plan before it runs."""

    scheduler: Scheduler

    def launch(self, plan):
        check_plan(self.scheduler, plan)
        check_state(self.scheduler)
        return super().launch(plan)


class Harness:
    """A core with a fake worker that runs out of blocks, on a clock that ticks once a step."""

    def __init__(self, policy: str, *, max_num_seqs: int = 4, depth: int = 1) -> None:
        self.now = 0.0
        config = SchedulerConfig(
            max_num_batched_tokens=16,
            max_num_seqs=max_num_seqs,
            max_model_len=64,
            scheduling_policy=policy,
        )
        kv = KVManager(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = make_scheduler(config, kv, clock=lambda: self.now)
        worker = CheckedWorker(NUM_BLOCKS, BLOCK_SIZE)
        worker.scheduler = self.scheduler
        self.core = EngineCore(self.scheduler, worker, depth)
        self.tokens: dict[str, list[int]] = {}
        self.ended: list[str] = []

    def add(self, request_id: str, prompt: list[int], num_output: int, **fields: object) -> None:
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        self.tokens[request_id] = []
        self.scheduler.add_request(
            AddRequest(request_id, prompt, params, 0, self.now, max_tokens=num_output, **fields)
        )

    def step(self) -> None:
        self.now += 1.0
        for outputs in self.core.step().values():
            for request_id, token in zip(outputs.request_ids, outputs.token_ids, strict=True):
                self.tokens[request_id].append(token)
            self.ended += [outputs.request_ids[end.index] for end in outputs.finished]

    def drain(self, limit: int = 3000) -> None:
        while self.core.has_work:
            self.step()
            limit -= 1
            assert limit, "the requests do not end"


def expected(prompt: list[int], num_output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_output):
        tokens.append(token_after(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_its_tokens_under_memory_pressure(
    policy: str, depth: int, seed: int
) -> None:
    rng = random.Random(seed)
    harness = Harness(policy, depth=depth)
    wanted = {}
    for index in range(24):
        shared = [1] * rng.randrange(0, 10)
        prompt = [*shared, *(rng.randrange(100) for _ in range(rng.randint(1, 24)))]
        num_output = rng.randint(1, 24)
        name = f"r{index}"
        deadline = rng.choice([None, float(rng.randrange(200))])
        harness.add(name, prompt, num_output, user=rng.choice("ab"), deadline=deadline)
        wanted[name] = expected(prompt, num_output)
        for _ in range(rng.randrange(4)):
            harness.step()
    harness.drain()
    assert harness.tokens == wanted
    check_empty(harness.scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [POLICIES[4], *POLICIES[3::2]])
def test_those_with_the_newer_hooks_break_no_rule(policy: str, seed: int) -> None:
    options = {"refuse": False} if policy.endswith("TieredDeadlines") else {}
    assert check_policy(policy, options=options, steps=1000, seed=seed).num_steps >= 1000


def test_tiered_deadlines_refuses_what_would_come_too_late_and_counts_it() -> None:
    harness = Harness(POLICIES[3])
    for index in range(12):
        harness.add(f"r{index}", [index] * 8, 40)
    with pytest.raises(RefusedError, match="promised"):
        harness.scheduler.policy.tiers["standard"] = 1e-6
        harness.add("late", [1] * 8, 4)
    harness.drain()
    counters = harness.scheduler.make_stats().counters
    assert counters["policy.refused"] == 1 and counters["policy.late tokens"] > 0


def test_level_fair_lets_a_light_user_pass_a_heavy_one() -> None:
    harness = Harness(POLICIES[4], max_num_seqs=2)
    harness.scheduler.policy.quantum, harness.scheduler.policy.period = 16.0, 1000.0
    for index in range(12):
        harness.add(f"heavy{index}", [index] * 8, 8, user="heavy")
    for _ in range(20):
        harness.step()
    harness.add("light", [99] * 8, 4, user="light")
    harness.drain()
    assert harness.ended.index("light") < 7, harness.ended


def test_fair_share_serves_a_light_user_beside_a_heavy_one() -> None:
    harness = Harness(POLICIES[0], max_num_seqs=2)
    for index in range(12):
        harness.add(f"heavy{index}", [index] * 8, 8, user="heavy")
    for _ in range(6):
        harness.step()
    harness.add("light", [99] * 8, 8, user="light")
    harness.drain()
    assert harness.ended.index("light") < 6, harness.ended


def test_shortest_first_lets_the_short_one_go_ahead_but_not_for_ever() -> None:
    harness = Harness(POLICIES[1], max_num_seqs=1)
    harness.add("long", [1] * 8, 20)
    harness.add("short", [2] * 8, 2)
    harness.drain()
    assert harness.ended == ["short", "long"]

    harness.add("long", [1] * 8, 20)
    for index in range(40):
        harness.add(f"short{index}", [index] * 4, 2)
        harness.step()
    harness.drain()
    assert harness.ended.index("long", 2) < len(harness.ended) - 10


def test_earliest_deadline_takes_the_seat_of_a_relaxed_request() -> None:
    harness = Harness(POLICIES[2], max_num_seqs=1)
    harness.add("relaxed", [1] * 8, 20)
    for _ in range(4):
        harness.step()
    harness.add("urgent", [2] * 8, 2, deadline=10.0)
    harness.drain()
    assert harness.ended == ["urgent", "relaxed"]
    assert harness.tokens["relaxed"] == expected([1] * 8, 20)
    assert Counter(harness.ended) == {"urgent": 1, "relaxed": 1}
