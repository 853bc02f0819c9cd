"""What is checked of a cluster before weights are loaded, and the room that cores ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.spawned import fake_config

from engine.cluster.nodes.checks import check_nodes, local_models, wanted_from
from engine.cluster.nodes.node import describe
from engine.config.engine import EngineConfig
from engine.errors import ConfigError

SECRET = "a secret of more than sixteen characters"


def on_ray(num: int, **options: Any) -> EngineConfig:
    return fake_config(
        multiprocess=True, data_parallel_size=num, data_parallel_backend="ray", **options
    )


def with_model(tmp_path: Any) -> EngineConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    config = on_ray(2)
    return replace(config, model=replace(config.model, model=str(model)))


def report(config: EngineConfig, **changes: Any) -> dict[str, Any]:
    """What a node like this machine reports, apart from ``changes``."""
    models = local_models(config)
    about = {**describe(*wanted_from(models)), "node": "n" * 56, "ip": "10.0.0.7", "host": "h7"}
    if (files := changes.pop("files", None)) is not None:
        changes["models"] = {models[0]: files}
    for name, value in changes.items():
        about[name] = {**about[name], **value} if isinstance(value, dict) and value else value
    return about


def check(config: EngineConfig, *reports: dict[str, Any]) -> None:
    check_nodes(config.core.core_secret, [("", each) for each in reports], "cores")


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"python": "3.9"}, r"Python is 3\.9, here 3\.\d+; use the same"),
        ({"versions": {"torch": "1.0"}}, r"torch is 1\.0, here [\d.]+; install the same version"),
        ({"versions": {"msgspec": None}}, r"msgspec is not installed; pip install msgspec==\d"),
        ({"files": {}}, r"model /.*/model does not exist; copy it to the same path"),
        (
            {"files": {"config.json": "3 bytes"}},
            r"config.json has 3 bytes, here 2 bytes \(SHA-256 \w+\); copy it",
        ),
        ({"source": "5eed"}, r"files of the engine differ \(5eed, here \w+\); install the same"),
        ({"variables": {"METRONOME_CPU_ISA": "sse2"}}, r"METRONOME_CPU_ISA is 'sse2', here None"),
    ],
)
def test_a_node_that_differs_is_named_with_the_value_and_the_way_out(
    changes: dict[str, Any], text: str, tmp_path: Any
) -> None:
    config = with_model(tmp_path)
    check(config, report(config))
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.7 \(h7\): .*" + text):
        check(config, report(config), report(config, node="m", **changes))


def test_a_secret_of_the_front_end_must_be_set_on_every_node(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_model(tmp_path)
    config = replace(config, core=replace(config.core, core_secret=SECRET))
    with pytest.raises(ConfigError, match="METRONOME_CORE_SECRET is not set; set the secret of"):
        check(config, report(config))
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET)
    check(config, report(config))
    monkeypatch.setenv("METRONOME_CORE_SECRET", SECRET + "!")
    other = report(config)
    with pytest.raises(ConfigError, match="METRONOME_CORE_SECRET is another secret") as raised:
        check(config, other)
    assert SECRET not in str(raised.value) and SECRET not in str(other)


@pytest.mark.parametrize(
    "options, nodes, bundle",
    [
        ({}, [{"CPU": 8}, {"CPU": 8}], {"CPU": 8}),
        ({}, [{"CPU": 8}, {"CPU": 3}], {"CPU": 4}),
        ({}, [{"CPU": 1}], {"CPU": 1}),  # too little room: the reservation says so
        ({"num_threads": 2}, [{"CPU": 8}, {"CPU": 8}], {"CPU": 2}),
        ({}, [{"CPU": 8, "GPU": 2}], {"CPU": 1, "GPU": 1}),
        ({"device": "cpu"}, [{"CPU": 8, "GPU": 2}], {"CPU": 4}),
        ({"device": "cuda"}, [{"CPU": 8}], {"CPU": 1, "GPU": 1}),
    ],
)
def test_each_core_gets_a_gpu_or_an_equal_share_of_the_processors(
    options: dict[str, Any], nodes: list[dict[str, float]], bundle: dict[str, float]
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install metronome-engine[ray]")
    from engine.cluster.cores.places import bundle_of

    assert bundle_of(replace(on_ray(2), **options), nodes) == bundle
