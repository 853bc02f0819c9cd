"""Files of others and of ours become workloads; a line that is none is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.core.engine_core import EngineCore
from engine.core.recording import describe as describe_scheduler
from engine.core.recording import record
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.sched.plugins.find import make_scheduler
from policylab.sim.job import Job, Span
from policylab.sim.run import Engine, run
from policylab.sim.worker import StepCost, TimedWorker, VirtualClock
from policylab.sim.workloads import find_workload
from policylab.sim.workloads.describe import as_if_served
from policylab.sim.workloads.jsonl import EXAMPLE, FORMAT, Head, write
from policylab.sim.workloads.reuse import PrefixReuse

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:18:03.9799600,12,3
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01.009930+00:00,2399,6
"""
BURSTGPT_HEAD = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type\n"
BURSTGPT = f"""{BURSTGPT_HEAD}5,12,1.5,ChatGPT,472,18,Conversation log
45,12,3.5,ChatGPT,1087,230,Conversation log
118,,0,GPT-4,417,0,API log
124,7,0.5,GPT-4,1360,304,API log
"""
VIDUR = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,100,10
1.5,200,20
"""
VIDUR_LENGTHS = """,num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
0,100,10,110,10.0
1,200,20,220,10.0
"""


UNKNOWN_KEY = '{"id":"a","arrival":0,"prompt":[["t",3,0]],"output":2,"deadlin":5}'


def mooncake(*rows: tuple[float, int, int, list[int]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


MOONCAKE = mooncake(
    (0, 1000, 50, [0, 1]),
    (0, 600, 5, [0, 2]),
    (3000, 1024, 7, [0, 1]),
    (3500, 10, 1, [9]),
)

Write = Callable[[str], Path]


@pytest.fixture
def file(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "requests"
        path.write_text(text)
        return path

    return written


def read(kind: str, path: Path, rate: float | None = None, **options: object) -> list[Job]:
    return list(find_workload(kind, path=str(path), **options).source(0, rate))


def lengths(jobs: list[Job]) -> list[tuple[int, int]]:
    return [(job.num_prompt, job.num_output) for job in jobs]


def test_azure(file: Write) -> None:
    jobs = read("azure-csv", file(AZURE))
    assert lengths(jobs) == [(4808, 10), (110, 27), (12, 3)]
    assert [job.arrival for job in jobs] == pytest.approx([0.0, 0.052, 60.0], abs=1e-6)
    jobs = read("azure-csv", file(AZURE_2024))
    assert lengths(jobs) == [(2162, 5), (2399, 6)] and jobs[1].arrival == pytest.approx(1.0)


def test_burstgpt(file: Write) -> None:
    jobs = read("burstgpt-csv", file(BURSTGPT))
    assert lengths(jobs) == [(472, 18), (1087, 230), (1360, 304)]  # the third had failed
    assert [job.arrival for job in jobs] == [0.0, 40.0, 119.0]
    assert [job.program for job in jobs] == ["12", "12", "7"]
    assert [job.tier for job in jobs] == ["ChatGPT", "ChatGPT", "GPT-4"]
    old = BURSTGPT.replace("Session ID,Elapsed time,", "")
    rows = [line.split(",") for line in old.splitlines()[1:]]
    old = old.splitlines()[0] + "\n" + "\n".join(",".join([r[0], *r[3:]]) for r in rows)
    assert lengths(read("burstgpt-csv", file(old))) == lengths(jobs)


def test_vidur(file: Write) -> None:
    jobs = read("vidur-csv", file(VIDUR))
    assert lengths(jobs) == [(100, 10), (200, 20)] and [job.arrival for job in jobs] == [0.0, 1.5]
    jobs = read("vidur-csv", file(VIDUR_LENGTHS), arrivals="gamma(cv=0)", rate=4.0)
    assert lengths(jobs) == [(100, 10), (200, 20)] and jobs[1].arrival == 0.25


def test_mooncake(file: Write) -> None:
    path = file(MOONCAKE)
    jobs = read("mooncake-jsonl", path)
    assert sorted(lengths(jobs)) == [(10, 1), (600, 5), (1000, 50), (1024, 7)]
    first, second, third, last = jobs
    assert 0 <= first.arrival <= second.arrival < third.arrival < last.arrival
    assert third.prompt == (Span("block 0", 512), Span("block 1", 512))
    assert {second.prompt[0], first.prompt[0]} == {Span("block 0", 512)}
    reuse = PrefixReuse(512)
    assert [reuse.add(job) for job in jobs] == [0, 512, 512, 0]
    assert first.tokens()[:512] == third.tokens()[:512]
    stamped = read("mooncake-jsonl", path, tick=0)
    assert [job.arrival for job in stamped] == [0.0, 0.0, 3.0, 3.5]


def test_requests_of_a_tick_are_spread_over_it(file: Write) -> None:
    rows = [(3000 * (n // 300), 100, 10, [n]) for n in range(900)]
    jobs = read("mooncake-jsonl", file(mooncake(*rows)))
    gaps = [later.arrival - earlier.arrival for earlier, later in pairwise(jobs)]
    assert min(gaps) >= 0.0 and max(gaps) < 0.2
    assert 2.9 < jobs[599].arrival - jobs[299].arrival < 3.1


def test_files_are_played_faster_or_cut(file: Write) -> None:
    path = file(AZURE)
    assert read("azure-csv", path, speed=2)[-1].arrival == pytest.approx(30.0)
    workload = find_workload("azure-csv", path=str(path))
    assert workload.natural_rate == pytest.approx(2 / 60)
    assert (workload.max_prompt, workload.max_output) == (4808, 27)
    assert read("azure-csv", path, rate=1.0)[-1].arrival == pytest.approx(2.0)
    assert len(read("azure-csv", path, num_requests=2)) == 2
    jobs = read("burstgpt-csv", file(BURSTGPT), users="ann", tiers="chat(ttft=1)")
    assert {(job.user, job.tier, job.ttft) for job in jobs} == {("ann", "chat", 1.0)}
    alone = find_workload("azure-csv", path=str(file("\n".join(AZURE.splitlines()[:2]))))
    assert alone.natural_rate == 1.0 and len(list(alone.source(0))) == 1


# Our own


def test_what_was_written_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "written.jsonl"
    for name in (
        "tiers",
        "conversations",
        "mooncake-conv",
        "azure-conv(num_users=3,num_adapters=4)",
    ):
        workload = find_workload(name, num_requests=100)
        jobs = list(as_if_served(workload.source(7, 3.0)))
        write(path, Head(FORMAT, str(workload), 7, 3.0), jobs)
        again = find_workload("jsonl", path=str(path))
        assert list(again.source(0)) == jobs
        assert max(job.num_prompt for job in jobs) == again.max_prompt <= workload.max_prompt


def test_given_tokens_are_written_too(tmp_path: Path) -> None:
    path = tmp_path / "written.jsonl"
    texts = {"log:a": [5, 6, 7]}
    prompt = (Span("log:a", 3),)
    job = Job(request_id="a", arrival=1.5, prompt=prompt, num_output=2, max_tokens=9, texts=texts)
    write(path, Head(FORMAT, "steps-log", 0), [job])
    assert list(find_workload("jsonl", path=str(path)).source(0)) == [job]


def _served(path: Path, policy: str = "fcfs", num_blocks: int = 60, depth: int = 1) -> list[Job]:
    """Serve a workload, with a step log; what was asked."""
    workload = find_workload(
        "log-uniform(num_requests=60,prompt_tokens=(8, 60),output_tokens=(2, 40),shared_prefix=32,"
        "tiers='chat(ttft=1),batch(deadline=9,priority=2)')"
    )
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=200,
        scheduling_policy=policy,
    )
    kv, clock = KVManager(num_blocks, 16), VirtualClock()
    scheduler = record(
        path,
        describe_scheduler(config, CacheConfig(block_size=16, num_kv_blocks=num_blocks), kv, 0),
        lambda recorded: make_scheduler(config, kv, clock=recorded),
        clock,
    )
    jobs = list(workload.source(0, 40.0))
    known = {job.request_id: job.num_output for job in jobs}
    core = EngineCore(scheduler, TimedWorker(clock, StepCost(), 8, known), depth)
    clock.now = 1000.0  # an engine's clock starts anywhere
    coming = list(jobs)
    while coming or core.has_work:
        while coming and coming[0].arrival + 1000.0 <= clock.now:
            job = coming.pop(0)
            add = job.request(50)
            add = type(add)(**{**_fields(add), "arrival_time": 1000.0 + job.arrival})
            if add.deadline is not None:
                add = type(add)(**{**_fields(add), "deadline": add.deadline + 1000.0})
            scheduler.add_request(add)
        core.step()
        if core.is_idle and coming:
            clock.now = max(clock.now, coming[0].arrival + 1000.0)
    scheduler.shutdown()
    return jobs


def _fields(add: object) -> dict[str, object]:
    return {name: getattr(add, name) for name in add.__struct_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_log_is_the_traffic_that_was_served(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "steps.log"
    asked = _served(path, depth=depth)
    workload = find_workload("steps-log", path=str(path))
    seen = list(workload.source(0))
    assert [job.request_id for job in seen] == [job.request_id for job in asked]
    assert lengths(seen) == lengths(asked)
    assert [job.tokens() for job in seen] == [job.tokens() for job in asked]
    first = asked[0].arrival
    assert [job.arrival for job in seen] == pytest.approx([job.arrival - first for job in asked])
    for before, after in zip(asked, seen, strict=True):
        assert (after.user, after.priority) == (before.user, before.priority)
        assert (after.tier, after.ttft) == (before.tier, before.ttft)
        assert after.deadline == (None if before.deadline is None else pytest.approx(9.0))
        assert after.hints_for() == before.hints_for() and after.max_tokens == 50
    reuses = [PrefixReuse(16), PrefixReuse(16)]
    assert [reuses[0].add(job) for job in seen] == [reuses[1].add(job) for job in asked]
    assert workload.max_output == 50
    figures = run("residual-sjf", workload, Engine(max_num_seqs=8, num_blocks=60))
    assert set(figures.requests.names["outcome"]) == {"done"}


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("azure-csv", AZURE.replace("110", "many"), "line 3: ContextTokens is 'many', must be"),
        ("azure-csv", AZURE.replace("18:18", "18:16"), "line 4: TIMESTAMP is .*; sort the file"),
        (
            "azure-csv",
            AZURE.replace("ContextTokens", "Context"),
            "line 1: the head is .*, must be TIMESTAMP,ContextTokens,GeneratedTokens",
        ),
        (
            "burstgpt-csv",
            BURSTGPT.replace("45,", "nan,"),
            "line 3: Timestamp is 'nan', must be",
        ),
        ("vidur-csv", VIDUR.replace("1.5", "-1.5"), "line 3: arrived_at is '-1.5', must be no"),
        (
            "mooncake-jsonl",
            MOONCAKE.replace("[0, 2]", "[0]"),
            "line 2: hash_ids .* of 2 ids",
        ),
        ("mooncake-jsonl", MOONCAKE.replace('"output_length": 7', '"out": 7'), "line 3: the line "),
        ("mooncake-jsonl", MOONCAKE + "{", "line 5: the line is '{', must be a request"),
        ("jsonl", MOONCAKE, "line 1: the line is .*, must be the head of a workload"),
        ("jsonl", f"{EXAMPLE}\n{UNKNOWN_KEY}", "line 2: the line is .*unknown field `deadlin`"),
        ("jsonl", '{"metronome":"workload","format":9,"workload":"a","seed":0}', "has format 9"),
        ("steps-log", AZURE, "is not a step log"),
    ],
)
def test_lines_that_are_none(file: Write, kind: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(kind, file(text))


def test_lines_of_ours_that_are_none(file: Write) -> None:
    head = '{"metronome":"workload","format":1,"workload":"a","seed":0}\n'
    line = '{"id":"a","arrival":0.5,"prompt":[["p",4,0]],"output":2}\n'
    for text, message in (
        (line.replace("[4", "").replace("4,0", "-4,0"), "line 2: length of 'p' is -4"),
        (line.replace('"output":2', '"output":0'), "line 2: output is 0, must be a whole number"),
        (line + line.replace("0.5", "0.25"), "line 3: arrival is 0.25, must be no earlier"),
        (line.replace(',"output":2', ""), "line 2: the line is .*missing required field"),
        (line.replace('[["p",4,0]]', "[]"), "line 2: the prompt's length is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            read("jsonl", file(head + text))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nowhere cannot be read: No such file"):
        read("azure-csv", Path("nowhere"))
