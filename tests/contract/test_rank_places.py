"""Where Ray places the ranks of a group, and what each gets."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
from support.spawned import fake_config

from engine.config.parallel import ParallelConfig
from engine.core.ranks import start_placed_group
from engine.errors import ConfigError

RAY = "Ray is not installed: pip install metronome-engine[ray]"


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("core.placed_ranks", "cluster.nodes.room", "cluster.nodes.kept"):
        monkeypatch.delitem(sys.modules, f"engine.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"'ray', and ray is not installed: .*-engine\[ray\]"):
        start_placed_group(*[nothing] * 7)


def test_ranks_of_a_node_follow_each_other_and_the_first_stays_first() -> None:
    pytest.importorskip("ray", reason=RAY)
    from engine.core.placed_ranks import in_order

    assert in_order(["a", "b", "a", "c", "b"]) == [0, 2, 1, 4, 3]


def test_rank_0_has_the_gpu_of_its_process() -> None:
    pytest.importorskip("ray", reason=RAY)
    from engine.core.placed_ranks import with_first

    assert with_first("0", ["0", "1", "2"]) == ["0", "1", "2"]
    assert with_first("2", ["0", "1", "2"]) == ["2", "1", "0"]
    with pytest.raises(ConfigError, match=r"GPUs 4, 5, but .* on 0: set CUDA_VISIBLE_DEVICES=4"):
        with_first("0", ["4", "5"])


def test_each_rank_has_an_equal_share_of_the_threads() -> None:
    pytest.importorskip("ray", reason=RAY)
    from engine.core.placed_ranks import bundle_of

    config = fake_config()
    config = replace(config, parallel=ParallelConfig(tensor_parallel_size=2))
    nodes = {"here": {"CPU": 2.0}, "there": {"CPU": 8.0}}
    assert bundle_of(config, nodes, "here", on_gpus=False) == {"CPU": 2}
    assert bundle_of(config, nodes, "there", on_gpus=False) == {"CPU": 4}
    assert bundle_of(config, nodes, "there", on_gpus=True) == {"CPU": 1, "GPU": 1}
    config = replace(config, num_threads=1)
    assert bundle_of(config, nodes, "there", on_gpus=False) == {"CPU": 1}


@pytest.mark.parametrize(
    ("sizes", "others", "message"),
    [
        ({}, {}, "tensor_parallel_size is 1, so there are no ranks to place"),
        (
            {"tensor_parallel_size": 2},
            {"data_parallel_size": 2},
            "data_parallel_size=2 needs all ranks on one machine",
        ),
        (
            {"pipeline_parallel_size": 2},
            {},
            "pipeline_parallel_size needs all ranks on one machine",
        ),
        (
            {"tensor_parallel_size": 2},
            {"data_parallel_backend": "ray"},
            "tensor_parallel_size is 2, and data_parallel_backend is 'ray'.*leave it out",
        ),
    ],
)
def test_what_does_not_go_with_ranks_on_nodes_is_named(
    sizes: dict[str, int], others: dict[str, Any], message: str
) -> None:
    config = fake_config(multiprocess=True, **others)
    ranks = ParallelConfig(**sizes, distributed_executor_backend="ray")
    with pytest.raises(ConfigError, match=message):
        replace(config, parallel=ranks)
