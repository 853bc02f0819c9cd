"""``metronome top``: a server's page as statistics, two readings as figures, and their table."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from engine.cli.main import main
from engine.cli.readings import EngineReading, Page, stats_of
from engine.cli.top import Screen
from engine.messages.stats import AdapterUse, GroupUse, SchedulerStats

PAGE = r"""# HELP metronome_engine_up 1 if the core answers in time.
# TYPE metronome_engine_up gauge
metronome_engine_up{model_name="box"} 1.0
metronome_requests_running{model_name="box"} 4.0
vllm:num_requests_running{model_name="box"} 4.0
metronome_requests_waiting{model_name="box"} 3.0
metronome_requests_waiting_by_reason{model_name="box",reason="capacity"} 2.0
metronome_requests_waiting_by_reason{model_name="box",reason="deferred"} 1.0
metronome_kv_usage_ratio{model_name="box"} 0.25
metronome_kv_blocks_in_use{group="0",model_name="box",attention="full",window="0"} 30.0
metronome_kv_blocks_in_use{group="1",model_name="box",attention="sliding",window="512"} 7.0
metronome_prefix_cache_missed_tokens_total{model_name="box",reason="never seen"} 64.0
metronome_steps_total{model_name="box"} 1.5e+03
metronome_scheduled_tokens_total{model_name="box"} 9000.0 1764057600000
metronome_generation_tokens_total{model_name="box"} 700.0
metronome_prompt_tokens_total{model_name="box"} 8000.0
metronome_preemptions_total{model_name="box"} 5.0
metronome_queue_blocked{model_name="box"} 0.0
metronome_wait_seconds_total{cause="seats",model_name="box"} 1.5
metronome_wait_seconds_total{model_name="a \"b\\c\"\n}",cause="preempted by \"x\", {y}"} 2.0
metronome_hook_seconds_total{hook="EDF.rank",model_name="box"} 0.125
metronome_feature_events_total{event="drafts.num_drafts",model_name="box"} 7.0
metronome_state_snapshots{model_name="box"} 12.0
metronome_state_snapshot_usage_ratio{model_name="box"} 0.125
metronome_first_token_seconds_bucket{le="+Inf",model_name="box"} 3.0
metronome_requests_waiting_by_cause{cause="seats",model_name="box"} 2.0
metronome_requests_waiting_by_cause{cause="grammar",model_name="box"} 1.0
metronome_adapter_slots{model_name="box"} 8.0
metronome_adapter_slots_used{model_name="box"} 2.0
metronome_adapter_host_copies{model_name="box"} 5.0
metronome_adapter_host_bytes{model_name="box"} 300.0
metronome_adapter_requests{adapter="sql",model_name="box",state="running"} 2.0
metronome_adapter_requests{adapter="sql",model_name="box",state="waiting"} 1.0
metronome_broken{model_name="box"} many
"""


def test_a_page_becomes_statistics() -> None:
    page = Page(PAGE)
    assert stats_of(page) == SchedulerStats(
        num_running=4,
        num_waiting=2,
        num_parked=1,
        kv_usage=0.25,
        prefix_queries=0,
        prefix_hits=0,
        num_preemptions=5,
        num_failed=0,
        num_steps=1500,
        num_scheduled_tokens=9000,
        wait_seconds={"seats": 1.5, 'preempted by "x", {y}': 2.0},
        hook_seconds={"EDF.rank": 0.125},
        counters={"drafts.num_drafts": 7},
        prefix_missed={"never seen": 64},
        kv_groups=[GroupUse(0, 30), GroupUse(512, 7)],
        num_snapshots=12,
        snapshot_usage=0.125,
        adapters=AdapterUse(8, 2, 5, 300, {"sql": 2}, {"sql": 1}),
        waiting_by_cause={"seats": 2, "grammar": 1},
    )
    assert page.sum("generation_tokens_total") == 700 and page.sum("no_such") == 0
    assert "broken" not in page and page.by("no_such", "cause") == {}


def reading(time: float, **stats: object) -> EngineReading:
    told = {"num_running": 2, "num_waiting": 1, "num_parked": 0, "kv_usage": 0.5}
    none = dict.fromkeys(("prefix_queries", "prefix_hits", "num_preemptions", "num_failed"), 0)
    generated = stats.pop("generated", None)
    made = SchedulerStats(**{**told, **none, "num_steps": 0, "num_scheduled_tokens": 0, **stats})
    return EngineReading(time, made, generated, generated)


def shown(screen: Screen) -> str:
    console = Console(width=200, markup=False)
    with console.capture() as captured:
        console.print(screen.render())
    return captured.get()


def test_rates_are_between_the_first_and_the_last_reading() -> None:
    screen = Screen("an engine", 1.0)
    assert "waiting for the first answer" in shown(screen)
    for second in range(9):  # only the last five intervals count
        screen.add(
            reading(
                100.0 + 2 * second,
                num_steps=10 * second**2,
                num_scheduled_tokens=100 * second,
                prefix_queries=100 * second,
                prefix_hits=25 * second,
                prefix_missed={"evicted": 20 * second, "never seen": 1000},
                kv_groups=[GroupUse(0, 1200), GroupUse(512, 3), GroupUse(512, second)],
                num_preemptions=second,
                num_refused=3,
                wait_seconds={"seats": 1.0 * second, "[x]": 30.0} if second > 4 else {},
                hook_seconds={"EDF.rank": 0.1 * second},
                counters={"drafts.num_drafts": 100 * second, "grammars.none": 0},
                waiting_by_cause={"KV blocks": second, "seats": 1},
                generated=40 * second,
            )
        )
    figures = screen.figures
    told = figures.as_dict()
    assert told["seconds"] == 10.0 and told["steps_per_second"] == (640 - 90) / 10
    assert told["computed_tokens_per_second"] == 50 and told["generated_tokens_per_second"] == 20
    assert told["prefix_hit_ratio"] == 0.25 and told["preemptions"] == 5
    assert told["prefix_missed"] == {"evicted": 100, "never seen": 0}
    assert told["total"]["prefix_missed"] == {"evicted": 160, "never seen": 1000}
    assert told["kv_groups"][1:] == [
        {"window": 512, "num_blocks": n, "is_chunked": False} for n in (3, 8)
    ]
    assert told["wait_seconds"] == {"seats": 8.0, "[x]": 30.0}
    assert told["counters"] == {"drafts.num_drafts": 500.0, "grammars.none": 0.0}
    assert told["total"]["refused"] == 3 and told["total"]["wait_seconds"]["seats"] == 8.0
    lines = [line.split() for line in shown(screen).splitlines()]
    assert lines[0] == ["an", "engine"] and " ".join(lines[1]) == "last 10 s since its start"
    for line in (
        "requests running 2",
        "KV in use 50.0 %",
        "KV blocks, full attention 1,200",
        "KV blocks, sliding attention of 512 tokens, 2 groups 11",
        "prefix hits 25.0 % 25.0 %",
        "prompt tokens not cached: evicted 100 160",
        "prompt tokens not cached: never seen 0 1,000",
        "steps/s 55.0 640",
        "tokens generated/s 20.0 320",
        "preemptions 5 8",
        "requests refused 0 3",
        "drafts.num_drafts/s 50.0 800",
        "waiting now for KV blocks 8",
        "waiting now for seats 1",
        "waited for [x] 30.00 s 30.00 s",
        "in EDF.rank 5.0 % 0.80 s",
    ):
        assert line.split() in lines, line


def test_what_a_core_does_not_count_is_left_out_and_silence_is_told() -> None:
    screen = Screen("an engine", 1.0)
    screen.add(reading(0.0, num_steps=7, blocked="a: needs 9 blocks"))
    text = shown(screen)
    assert "generated" not in text and "refused" not in text
    assert "the core is in a long step, or hangs" in text and "blocked: a: needs 9 blocks" in text
    assert screen.figures.as_dict()["generated_tokens_per_second"] is None
    assert "last figures" not in text
    screen.add(replace(reading(1.0, num_steps=7), is_fresh=False))
    assert "the core does not answer its server: these are its last figures" in shown(screen)
    assert screen.figures.as_dict()["steps_per_second"] == 0.0


def test_another_core_at_the_same_place_begins_anew() -> None:
    screen = Screen("an engine", 1.0)
    for time, num_steps in ((1.0, 500), (2.0, 600), (3.0, 10)):
        screen.add(reading(time, num_steps=num_steps))
    assert not screen.has_rates and screen.figures.growth("num_steps") == 0


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (["--url", "localhost:8000"], 2, "--url is 'localhost:8000', must look like http://127"),
        (["--connect", "127.0.0.1:5"], 2, "core address '127.0.0.1:5' must begin with ipc://"),
        (["--connect", "ipc:///no/core"], 2, "there is no core at 'ipc:///no/core'"),
        (["--connect", "ipc:///c", "--api-key", "k"], 2, "--api-key is given with --connect"),
        (["--url", "http://x", "--interval", "0"], 2, "--interval is 0, must be from 0.1 to 3600"),
    ],
)
def test_mistakes_are_one_line(
    args: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", *args]) == status
    printed = capsys.readouterr()
    assert message in printed.err and len(printed.err.splitlines()) == 1 and not printed.out


def test_adapters_are_shown_with_their_requests() -> None:
    use = AdapterUse(8, 2, 5, 3 << 20, {"sql": 2, "de": 1}, {"sql": 1})
    screen = Screen("core", 1.0)
    for second in range(2):
        screen.add(reading(100.0 + second, adapters=use))
    text = " ".join(shown(screen).split())
    for line in (
        "adapters in slots 2 of 8",
        "adapters in memory 5, 3.0 MiB",
        "adapter sql 2 running, 1 waiting",
        "adapter de 1 running, 0 waiting",
    ):
        assert line in text
    assert screen.figures.as_dict()["adapters"]["running"] == {"sql": 2, "de": 1}


@pytest.mark.parametrize("counters", [{}, {"snapshots.published": 0}])
def test_snapshots_are_shown_for_models_that_take_them(counters: dict[str, int]) -> None:
    screen = Screen("an engine", 1.0)
    for second in range(2):
        taken = {"num_snapshots": 1234, "snapshot_usage": 0.125, "counters": counters}
        screen.add(reading(100.0 + second, **taken))
    text = " ".join(shown(screen).split())
    for line in ("snapshots of states 1,234", "KV blocks in snapshots 12.5 %"):
        assert (line in text) == bool(counters)
    assert screen.figures.as_dict()["state_snapshots"] == 1234
