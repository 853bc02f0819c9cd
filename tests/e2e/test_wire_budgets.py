"""What the way to a core in a process may cost; benchmarks/wire_costs.py measures what it does."""

import statistics

import pytest
from measure import Usage
from wire_costs import round_trips, throughputs, waiting

from engine.assets import BOX_MODEL

BUSY_CORES = 0.3  # used by others: the machine is not quiet enough for budgets on time


@pytest.mark.perf
def test_waiting_is_cheap_and_short() -> None:
    before = Usage.now()
    ours, spin = waiting("ours", 5.0), waiting("spin", 5.0)
    if Usage.now().since(before)["others_s"] > BUSY_CORES * 30.0:
        pytest.skip("others use this machine")
    assert ours["idle_percent"] <= 1.0
    assert ours["wake_us_median"] <= 1000.0
    for running in (1, 64):
        assert ours[f"cpu_percent_{running}"] <= 2.0
        added = ours[f"added_us_median_{running}"] - spin[f"added_us_median_{running}"]
        assert added < 100.0


@pytest.mark.perf
def test_a_process_of_its_own_costs_little() -> None:
    assert round_trips("multiprocess")["median_us"] < 1000.0
    rates = throughputs(str(BOX_MODEL), 5)
    assert statistics.median(each["multiprocess"] / each["in-process"] for each in rates) >= 0.95
