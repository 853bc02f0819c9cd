"""What sliding windows are worth: KV read in the least time of a step, and requests in one pool."""

from dataclasses import replace

import numpy as np
import pytest
import windows

from engine.models.work import Shapes


@pytest.fixture(scope="module")
def served() -> dict:
    return windows.service(num_requests=20)


def test_a_pool_runs_four_times_the_requests_of_32k_tokens(served: dict) -> None:
    running = served["running"]
    assert running["windows"]["most"] >= 4 * running["one group"]["most"] > 0


def test_first_tokens_come_no_later_at_the_same_load(served: dict) -> None:
    for load in served["first_tokens_s"].values():
        for quantile, seconds in load["windows"].items():
            assert seconds <= load["one group"][quantile]


@pytest.mark.parametrize("name", windows.PUBLISHED)
def test_the_least_time_of_a_step_counts_the_keys_in_windows_alone(name: str) -> None:
    spec = windows.spec_of(name)
    assert [layer.window for layer in spec.layers] == [
        layer.window for layer in windows.GEOMETRIES[name]
    ]
    three, context = np.ones(3, dtype=np.int64), np.array([0, 500, 100_000])
    work = Shapes(spec).work(three, context, (2, 2), num_logits=0)
    idle = replace(spec, layers=tuple(replace(layer, window=1) for layer in spec.layers))
    without = Shapes(idle).work(three, 0 * context, (2, 2), num_logits=0)
    earlier = sum(
        min(before, window - 1 if window else before)
        for window in (layer.window for layer in spec.layers)
        for before in context.tolist()
    )
    assert work.bytes - without.bytes == earlier * 2 * 2 * spec.attention.kv_width
    assert work.operations - without.operations == earlier * 4 * spec.attention.q_width
