"""Simulations of LoRA adapters: slots, copies in the host's memory, and the time of loads."""

from __future__ import annotations

from math import isnan

import numpy as np
import pytest
from support.adapters import FakeReader, digest_of, slots_of
from support.data_plane import FeatureWorker
from support.simulate import make_request

from engine.cli.main import main
from engine.config.cache import CacheConfig
from engine.config.sched import SchedulerConfig
from engine.core.recording import describe, record
from engine.errors import ConfigError
from engine.kv.manager import KVManager
from engine.messages.adapters import AdapterSource
from engine.sched.policies import POLICIES
from engine.sched.predict.profile import AdapterCost
from engine.sched.scheduler import Scheduler
from policylab.sim.figures import figures
from policylab.sim.recorded import engine_of, read_log, resimulate
from policylab.sim.run import Engine, Run, run
from policylab.sim.workloads import find_workload

SHORT = "log-uniform(num_requests={}, prompt_tokens=(16, 64), output_tokens=(4, 16), {})"
COSTLY = AdapterCost(copy=0.5, read=2.0)


def simulated(options: str, number: int = 40, *, rate: float = 1e9, policy="fcfs", **engine) -> Run:
    engine = {"max_loras": 2, "adapter_cost": COSTLY, **engine}
    return run(policy, SHORT.format(number, options), Engine(**engine), rate=rate)


def ttft(of: Run):
    return of.requests.times("first") - of.requests.times("arrival")


def test_first_tokens_wait_for_reads_and_copies_and_the_base_model_does_not():
    found = simulated("num_adapters=3, adapter_skew=0, base_share=0.3", max_loras=3)
    names = found.requests.names["adapter"]
    first = {name: ttft(found)[[n == name for n in names]].min() for name in set(names)}
    assert first[""] < 0.5
    read = sorted(first[name] for name in first if name)
    assert read[0] > 2.5 and read[1] > 2.5, "two threads read, then a step copies"
    assert 4.5 < read[2] < 6.0, "the third is read after one of the two"
    assert {name: found.totals["counters"][f"adapter.{name}"] for name in ("num_read",)} == {
        "num_read": 3
    }
    waits = found.requests.waits["adapter"]
    assert waits[[name == "" for name in names]].max() == 0.0 < waits.max()


def test_copies_that_left_the_hosts_memory_are_read_again():
    options = "num_adapters=6, adapter_skew=0"
    few = figures(simulated(options, 120, rate=1.0, max_cpu_loras=2)).values()
    many = figures(simulated(options, 120, rate=1.0)).values()
    assert many["adapter_reads"] == pytest.approx(6 / 120)
    assert few["adapter_reads"] > 0.3 and few["adapter_loads"] >= few["adapter_reads"]


def test_without_adapters_nothing_changes():
    plain = simulated("", 100, rate=50.0)
    assert (
        plain.totals["decisions"] == simulated("", 100, rate=50.0, max_loras=1).totals["decisions"]
    )
    assert isnan(figures(plain).values()["adapter_loads"])
    assert "adapter.num_read" not in plain.totals["counters"] or not any(
        value for name, value in plain.totals["counters"].items() if name.startswith("adapter.")
    )


def test_clustering_loads_less_and_a_bound_keeps_the_longest_wait():
    options = "num_adapters=24, adapter_skew=0.5"
    cost = AdapterCost(copy=0.02, read=0.0)
    found = {
        policy: simulated(
            options, 300, policy=policy, adapter_cost=cost, max_loras=4, max_num_seqs=4, rate=60.0
        )
        for policy in ("fcfs", "adapter-clustering")
    }
    loads = {name: figures(each).values()["adapter_loads"] for name, each in found.items()}
    assert loads["adapter-clustering"] < 0.8 * loads["fcfs"]
    mean = {name: np.mean(ttft(each)) for name, each in found.items()}
    assert mean["adapter-clustering"] < mean["fcfs"]


def test_a_run_with_adapters_survives_a_file(tmp_path):
    made = simulated("num_adapters=3", 20)
    made.write(tmp_path / "run.jsonl")
    again = Run.read(tmp_path / "run.jsonl")
    assert figures(again).values() == pytest.approx(figures(made).values(), nan_ok=True)
    assert again.requests.names["adapter"] == made.requests.names["adapter"]


def test_commands_show_loads_next_to_those_of_fcfs(capsys):
    options = ["--workload", SHORT.format(60, "num_adapters=8"), "--rate", "200", "--whole"]
    sizes = ["--max-loras", "2", "--max-cpu-loras", "4", "--adapter-seconds", "0.01", "0.1"]
    compared = ["compare", "fcfs", "adapter-clustering", "--seeds", "2", *options, *sizes]
    assert main(compared) == 0
    shown = capsys.readouterr().out
    assert "2 adapter slots, 10 ms a copy into one, 100 ms a read" in shown
    assert "adapter_loads" in shown and "adapter_reads" in shown
    assert main(["simulate", "--policy", "adapter-clustering", *options, *sizes]) == 0
    assert "reads from a disk per request with an adapter" in capsys.readouterr().out


def test_a_recorded_run_with_adapters_is_simulated(tmp_path):
    path = str(tmp_path / "steps.log")
    slots = slots_of(FakeReader(a="A", b="B", c="C"), 2, waits=True)
    config = SchedulerConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
    kv, worker = KVManager(100, 4), FeatureWorker(100, 4)

    def make(clock) -> Scheduler:
        return Scheduler(config, kv, POLICIES["fcfs"](), clock=clock, resources=[slots])

    scheduler = record(path, describe(config, CacheConfig(), kv, 0, max_loras=2), make, float)
    for index, name in enumerate("abcab"):
        source = AdapterSource(name)
        request = make_request(f"{index}", [7] * 9, 4, adapter=name, adapter_source=source)
        scheduler.add_request(slots.resolved(request))
    while not (plan := scheduler.schedule()).is_empty:
        scheduler.update_from_output(plan, worker.collect(worker.launch(plan)))
    scheduler.shutdown()
    log = read_log(path)
    outcome, again = resimulate(log.path, log)
    assert outcome.difference is None and outcome.num_requests == 5
    assert again.totals["counters"]["adapter.num_slot_loads"] == 3
    engine = engine_of(log.header)
    assert engine.max_loras == 2
    found = run("adapter-clustering", find_workload("steps-log", path=path), engine)
    assert list(found.requests.names["adapter"]) == [digest_of(n) for n in "ABCAB"]
    assert found.totals["counters"]["adapter.num_read"] == 3


def test_mistakes_are_named(capsys):
    with pytest.raises(ConfigError, match="max_loras is 0"):
        Engine(max_loras=0)
    assert main(["simulate", "--adapter-seconds", "-1", "0"]) == 2
    assert "--adapter-seconds is [-1.0, 0.0], must be" in capsys.readouterr().err
    real = ["simulate", "--real", "--rate", "5", "--requests", "5", "--adapters", "3"]
    assert main(real) == 2
    assert "leave num_adapters out of a real run" in capsys.readouterr().err
