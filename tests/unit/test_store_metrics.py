"""What an operator sees of stores of KV blocks, and of cores with a role: metrics and ``top``."""

from __future__ import annotations

import time

from rich.console import Console
from support.metric_pages import page_with, stats

from engine.cli.readings import EngineReading, Page, stats_of
from engine.cli.top import Screen
from engine.core.client import NumCores
from engine.messages.stats import SchedulerStats, StoreUse
from engine.rpc.joined import DeadCounters, sum_of
from engine.server.store_metrics import apart_metrics, store_metrics

COUNTERS = {
    "kv load.host.hits": 40,
    "kv load.host.bytes_loaded": 4096,
    "kv load.disk.left_out": 1,
    "kv load.misses": 7,
    "prefill apart.sent": 5,
    "prefill apart.done": 4,
    "prefill apart.milliseconds": 2500,
}
STORES = {"host": StoreUse(3, 3 << 20), "disk": StoreUse(10, 10 << 20, 0, is_common=True)}


def page_of(of: SchedulerStats) -> str:
    return page_with([*store_metrics("box", of), *apart_metrics("box", of)])


def test_each_store_has_metrics() -> None:
    text = page_of(stats(stores=STORES, counters=COUNTERS))
    for line in (
        'metronome_kv_store_blocks{model_name="box",store="host"} 3.0',
        'metronome_kv_store_cores{model_name="box",store="disk"} 0.0',
        'metronome_kv_store_hit_blocks_total{model_name="box",store="host"} 40.0',
        'metronome_kv_store_hit_blocks_total{model_name="box",store="disk"} 0.0',
        'metronome_kv_store_loaded_bytes_total{model_name="box",store="host"} 4096.0',
        'metronome_kv_store_left_out_total{model_name="box",store="disk"} 1.0',
        'metronome_kv_store_missed_blocks_total{model_name="box"} 7.0',
        'metronome_prefills_apart_total{event="done",model_name="box"} 4.0',
        'metronome_prefill_apart_seconds_total{model_name="box"} 2.5',
    ):
        assert line in text.splitlines(), text
    assert stats_of(Page(text)).stores == {
        "host": StoreUse(3, 3 << 20),
        "disk": StoreUse(10, 10 << 20, 0),
    }


def test_an_engine_without_stores_and_roles_has_none_of_these_metrics() -> None:
    assert not page_of(stats(counters={"drafts.num_drafts": 3})).strip()


def test_stores_of_several_cores_are_added_but_for_blocks_that_all_count() -> None:
    other = {"host": StoreUse(5, 5 << 20), "disk": StoreUse(12, 12 << 20, is_common=True)}
    summed = sum_of([stats(stores=STORES), stats(stores=other)])
    assert summed is not None and summed.stores == {
        "host": StoreUse(8, 8 << 20, 2),
        "disk": StoreUse(12, 12 << 20, 1, is_common=True),
    }
    counters = DeadCounters()
    counters.update(0, stats(stores=STORES, num_expired=2))
    counters.add_dead(0)  # what it had in memory is gone
    left = counters.add_to(stats(stores=other))
    assert left is not None and (left.stores, left.num_expired) == (other, 2)


def test_top_shows_stores_and_roles() -> None:
    cores = NumCores(2, 3, 1, num_prefill=1, prefill_alive=1).by_role
    assert cores == {"prefill": (1, 1), "decode": (1, 2)} and not NumCores(2, 2).by_role
    screen = Screen("server", 1.0)
    for second in range(2):
        of = stats(stores=STORES)
        screen.add(EngineReading(time.monotonic() + second, of, cores=cores))
    console = Console(width=200, markup=False)
    with console.capture() as captured:
        console.print(screen.render())
    text = " ".join(captured.get().split())
    for line in (
        "prefill cores 1 of 1",
        "decode cores 1 of 2",
        "KV store host 3 blocks, 3.0 MiB",
        "KV store disk 10 blocks, 10.0 MiB, not used",
    ):
        assert line in text
    assert screen.figures.as_dict()["stores"]["host"]["num_blocks"] == 3
