"""Replaying a step log gives the same decisions; the first that differs is named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from support.data_plane import FeatureWorker, guess
from support.fakes import FakeClock
from support.simulate import make_request, random_requests

from engine.cli.main import main
from engine.config.cache import CacheConfig
from engine.config.kv_groups import FULL, Group
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.recording import RecordingScheduler, describe, record
from engine.core.replay import replay
from engine.errors import ConfigError, RefusedError, RequestError
from engine.kv.manager import KVManager
from engine.lora.decide import AdapterSlots
from engine.observe import steplog
from engine.observe.steplog import StepLog, StepLogWriter
from engine.sched.interface import PauseState
from engine.sched.plugins.find import choose, make_scheduler
from engine.sched.policies.fcfs import FCFS
from engine.spec.worker_drafts import WorkerDrafts
from policylab.verify.draw import WILD_CACHE
from policylab.verify.fake import DigestWorker

BLOCK_SIZE = 4


def recorded(
    path: Path,
    clock: Callable[[], float],
    num_blocks: int = 40,
    groups: Sequence[Group] = (FULL,),
    **options: object,
) -> RecordingScheduler:
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "max_model_len": 64, **options}
    config = SchedulerConfig(**options)
    kv = KVManager(choose(config).pool(num_blocks), BLOCK_SIZE, groups=groups)
    header = describe(config, CacheConfig(block_size=BLOCK_SIZE), kv, seed=7)
    return record(path, header, lambda own: make_scheduler(config, kv, clock=own, seed=7), clock)


def run(path: Path, rng: random.Random, depth: int = 2, **options: object) -> RecordingScheduler:
    """A run with everything in it: aborts, pauses, resets, failing rows, preemptions, deadlines."""
    clock = FakeClock()
    scheduler = recorded(path, clock, num_blocks=14, **options)
    worker = DigestWorker(
        14, BLOCK_SIZE, fail=lambda seq, position: "broken" if position == 33 else None
    )
    core = EngineCore(scheduler, worker, depth)
    for number, request in enumerate(random_requests(rng, 40)):
        with suppress(RefusedError):
            scheduler.add_request(request)
        for _ in range(rng.randrange(3)):
            clock.now += rng.random()
            core.step()
        if rng.random() < 0.2:
            scheduler.finish_requests(str(rng.randrange(number + 1)))
        if rng.random() < 0.1:
            state = rng.choice([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
            scheduler.set_pause_state(state)
            core.step()
            scheduler.set_pause_state(PauseState.UNPAUSED)
        if rng.random() < 0.05:
            scheduler.reset_prefix_cache(reset_running=True)
            scheduler.reset_encoder_cache()
    while core.has_work:
        clock.now += rng.random()
        core.step()
    scheduler.shutdown()
    return scheduler


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority", "residual-sjf", "vtc", "least-computed"])
def test_a_run_replays_to_identical_plans(
    tmp_path: Path, seed: int, policy: str, depth: int
) -> None:
    path = tmp_path / "log"
    options = {"scheduling_policy": policy, "max_waiting_requests": 20}
    scheduler = run(path, random.Random(seed), depth, **options)
    stats = scheduler.make_stats()
    assert stats is not None and stats.num_preemptions > 0
    outcome = replay(path)
    assert outcome.difference is None and outcome.num_steps > 50
    assert str(outcome) == f"identical: {outcome.num_steps} steps, 40 requests"


@pytest.mark.parametrize("name", ["programs", "shares", WILD_CACHE])
def test_a_run_with_a_cache_policy_replays_to_identical_plans(
    tmp_path: Path, seed: int, name: str
) -> None:
    run(tmp_path / "log", random.Random(seed), cache_policy=name)
    assert replay(tmp_path / "log").difference is None
    if name == WILD_CACHE:
        assert replay(tmp_path / "log", cache_policy="lru").difference is not None


def test_a_replay_names_the_groups_of_a_model_with_windows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for groups in ([FULL, Group(window=8, max_blocks=9), Group(window=8, max_blocks=9)], [FULL]):
        path = tmp_path / f"{len(groups)}"
        scheduler = recorded(path, FakeClock(), groups=groups)
        scheduler.add_request(make_request("a", [1] * 30, 3))
        scheduler.schedule()
        scheduler.shutdown()
        assert main(["replay", str(path)]) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert first == "identical: 1 steps, 1 requests"
        named = [
            "KV groups by attention: full attention: 1, attention in sliding windows of 8 tokens: 2"
        ]
        assert rest == (named if len(groups) > 1 else [])


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "priority"},
        {"policy": FCFS(), "max_num_batched_tokens": 16},
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 8},
    ],
)
def test_a_change_is_named_where_it_begins(
    tmp_path: Path, seed: int, changes: dict[str, object]
) -> None:
    path = tmp_path / "log"
    run(path, random.Random(seed), scheduling_policy="fcfs")
    outcome = replay(path, **changes)
    assert outcome.difference is not None
    print(outcome)
    assert replay(path, **changes) == outcome


def test_the_difference_names_step_request_and_both_plans(tmp_path: Path) -> None:
    scheduler = recorded(tmp_path / "log", FakeClock())
    scheduler.add_request(make_request("a", list(range(20)), 4))
    scheduler.add_request(make_request("b", list(range(30, 50)), 4))
    scheduler.schedule()
    scheduler.shutdown()
    difference = replay(tmp_path / "log", max_num_batched_tokens=22).difference
    assert difference is not None
    assert difference == (1, "b", "4 tokens from position 0", "2 tokens from position 0")
    assert str(difference).startswith("step 1, request b: recorded 4 tokens from position 0, now 2")


def test_a_request_that_would_be_refused_now_is_a_difference(tmp_path: Path) -> None:
    scheduler = recorded(tmp_path / "log", FakeClock())
    for name in "abc":
        scheduler.add_request(make_request(name, [1, 2, 3], 4))
    scheduler.shutdown()
    difference = replay(tmp_path / "log", max_waiting_requests=2).difference
    assert difference is not None and difference.request_id == "c" and difference.then == "taken"
    assert "RefusedError" in difference.now and "max_waiting_requests" in difference.now


def test_deadlines_fall_at_the_same_readings_of_the_clock(tmp_path: Path) -> None:
    clock = FakeClock(0.0)
    scheduler = recorded(tmp_path / "log", clock)
    core = EngineCore(scheduler, DigestWorker(40, BLOCK_SIZE))
    scheduler.add_request(make_request("a", [1] * 8, 30, end_deadline=1.0))
    scheduler.add_request(make_request("b", [2] * 8, 30))
    while core.has_work:
        clock.now += 0.125
        core.step()
    scheduler.shutdown()
    stats = scheduler.make_stats()
    assert stats is not None and stats.num_expired == 1
    assert replay(tmp_path / "log").difference is None


def test_what_features_learn_from_results_is_replayed(tmp_path: Path, seed: int) -> None:
    """Drafts come with results and change what the next plans compute."""
    rng = random.Random(seed)
    path, features = tmp_path / "log", (WorkerDrafts(3), AdapterSlots(1))
    scheduler = recorded(path, FakeClock(), resources=features, max_num_seqs=3)
    worker = FeatureWorker(
        40, BLOCK_SIZE, propose=lambda tokens: guess(tokens, rng.randint(0, 3), 3)
    )
    core = EngineCore(scheduler, worker)
    for number in range(20):
        prompt = [rng.randrange(9) for _ in range(rng.randint(1, 20))]
        adapter = rng.choice([None, "a", "b"])
        scheduler.add_request(make_request(str(number), prompt, 12, adapter=adapter))
        core.step()
    while core.has_work:
        core.step()
    scheduler.shutdown()
    assert features[0].stats.num_accepted_tokens > 20
    outcome = replay(path, resources=(WorkerDrafts(3), AdapterSlots(1)))
    assert outcome.difference is None and outcome.num_steps > 20
    assert replay(path, resources=(WorkerDrafts(2), AdapterSlots(1))).difference is not None
    with pytest.raises(ConfigError, match="resources was given as an object of"):
        replay(path)


def test_plans_that_follow_from_the_one_before_cost_little(tmp_path: Path) -> None:
    """A steady decode leaves out rows, counts and starts."""
    scheduler = recorded(
        tmp_path / "log", FakeClock(), num_blocks=400, max_num_seqs=16, max_num_batched_tokens=256
    )
    core = EngineCore(scheduler, DigestWorker(400, BLOCK_SIZE))
    for number in range(16):
        scheduler.add_request(make_request(str(number), [number] * 4, 20))
    while core.has_work:
        core.step()
    scheduler.shutdown()
    plans = [r for r in StepLog(tmp_path / "log") if isinstance(r, steplog.PlanRecord)]
    assert all((p.rows, p.counts, p.starts) == (None, None, None) for p in plans[2:20])


def test_an_object_must_be_given_again(tmp_path: Path) -> None:
    recorded(tmp_path / "log", FakeClock(), scheduling_policy=FCFS()).shutdown()
    with pytest.raises(ConfigError, match=r"given as an object of .*--policy \S+FCFS and"):
        replay(tmp_path / "log")
    assert replay(tmp_path / "log", policy=FCFS()).difference is None


def test_a_class_is_found_again_by_its_path(tmp_path: Path) -> None:
    recorded(tmp_path / "log", FakeClock(), scheduling_policy=FCFS).shutdown()
    assert replay(tmp_path / "log").num_steps == 0


@pytest.mark.parametrize(
    "fields", [{"hints": {"n": object()}}, {"hints": {"n": 10**30}}, {"user": "half \ud800"}]
)
def test_what_is_no_data_is_refused_before_it_is_queued(tmp_path: Path, fields: dict) -> None:
    scheduler = recorded(tmp_path / "log", FakeClock())
    with pytest.raises(RequestError, match=r"'a' cannot be recorded in step_log: .*step_log off"):
        scheduler.add_request(make_request("a", [1], 4, **fields))
    assert not scheduler.has_unfinished_requests()
    scheduler.shutdown()
    assert replay(tmp_path / "log").num_requests == 0


def damaged(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is not a step log"),
        (lambda data: b"PK\x03\x04" + data, "is not a step log"),
        (lambda data: data[:22], "ends within its header.*it cannot be read"),
        (lambda data: data[:-3], "ends after record [0-9]+.*killed.*allow_truncated"),
        (lambda data: data[:-1] + b"\xc1", "is damaged in record [0-9]+"),
        (lambda data: data[:40] + b"?" + data[41:], "is damaged in its header"),
    ],
)
def test_files_that_cannot_be_replayed(
    tmp_path: Path, seed: int, change: Callable[[bytes], bytes], message: str
) -> None:
    run(tmp_path / "log", random.Random(seed))
    with pytest.raises(ConfigError, match=message):
        replay(damaged(tmp_path / "log", change))


def test_a_log_of_another_format_or_with_other_options(tmp_path: Path) -> None:
    scheduler = recorded(tmp_path / "log", FakeClock())
    scheduler.shutdown()
    header = StepLog(tmp_path / "log").header
    for change, message in (
        ({"format": 99}, f"has format 99 .of engine {header.version}., this engine reads format 3"),
        (
            {"cache": {"colour": "red"}},
            "'colour' is not an option of the KV cache; there are",
        ),
        (
            {"scheduler": {"colour": "red"}},
            "'colour' is not an option of a scheduler; there are",
        ),
    ):
        StepLogWriter(tmp_path / "other", msgspec.structs.replace(header, **change)).close()
        with pytest.raises(ConfigError, match=message):
            replay(tmp_path / "other", resources=())


def test_every_flipped_byte_is_noticed(tmp_path: Path, seed: int) -> None:
    """Else a damaged log would be replayed as something else, or end in the depths."""
    rng = random.Random(seed)
    run(tmp_path / "log", rng)
    whole = (tmp_path / "log").read_bytes()
    for _ in range(50):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (tmp_path / "other").write_bytes(data)
        with pytest.raises(ConfigError, match=r"damaged|ends (after|within)|not a step log"):
            list(StepLog(tmp_path / "other"))


def test_a_log_that_is_not_there_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be written"):
        recorded(tmp_path / "no" / "where", FakeClock())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int) -> None:
    path = str(tmp_path / "log")
    run(Path(path), random.Random(seed))
    capsys.readouterr()
    assert main(["replay", path]) == 0
    assert capsys.readouterr().out.startswith("identical: ")
    assert main(["replay", path, "--policy", "residual-sjf", "--changes", '{"max_num_seqs": 2}'])
    printed = capsys.readouterr().out
    assert "first difference after" in printed
    assert f"metronome simulate --policy residual-sjf --workload {path} --rate own" in printed
    assert main(["replay", path, "--changes", '{"seats": 2}']) == 2
    assert "'seats' is not an option of a scheduler" in capsys.readouterr().err
    for changes, message in (
        ('{"policy": "fcfs"}', "'policy': give it as an option or argument"),
        ('{"max_num_seqs": "8"}', "max_num_seqs is '8' (str), must be a whole number"),
        ('{"resources": 5}', "resources is 5 (int), must be a tuple"),
    ):
        assert main(["replay", path, "--changes", changes]) == 2
        assert message in capsys.readouterr().err
    assert main(["replay", path, "--policy", "nonsense"]) == 2
