"""Stores of KV blocks by options: wrong options are named, and other content has another name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine import EngineArgs
from engine.config.cache import CacheConfig, share_of_cache
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import ConfigError
from engine.kv_transfer.opening import GIB, PlannedStores, namespace_of, weights_digest
from engine.kv_transfer.stores import StoreIdentity


class Store:
    """A store that does nothing."""

    name = "nothing"

    def __init__(self, identity: StoreIdentity, fault: str = "") -> None:
        if fault:
            raise OSError(fault)

    def nothing(self, *_: Any) -> Any:
        return []

    contains = read = write = forget = clear = counts = close = nothing


class Nameless(Store):
    name = 5  # type: ignore[assignment]


class Blind(Store):
    read = None  # type: ignore[assignment]


def planned(**options: Any) -> PlannedStores:
    return PlannedStores(EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(**options)))


WRONG: list[tuple[Any, str]] = [
    ({}, "lacks kv_connector: give the name or the dotted path"),
    ({"kv_connecter": Store}, "has 'kv_connecter', which is not known; it takes kv_connector,"),
    ({"kv_connector": "nobody"}, "kv_connector 'nobody' is not known"),
    ({"kv_connector": "NixlConnector"}, "which vLLM has: here 'peers' lets engines on other hosts"),
    ({"kv_connector": ""}, "kv_connector '' is not known"),
    ({"kv_connector": "no.such.Store"}, "cannot load 'no.such.Store': ModuleNotFoundError"),
    ({"kv_connector": "unit.test_kv_opening.Stor"}, "did you mean 'unit.test_kv_opening.Store'?"),
    ({"kv_connector": "os.sep"}, "is 'os.sep', must be a BlockStore class or a function"),
    ({"kv_connector": 7}, "is 7, must be a BlockStore class or a function"),
    ({"kv_connector": Store, "kv_role": "both"}, "kv_role is 'both', must be one of kv_both,"),
    ({"kv_connector": Store, "kv_role": ["kv_both"]}, "kv_role is ['kv_both'], must be one of"),
    ({"kv_connector": Store, "kv_connector_extra_config": 3}, "extra_config is 3, must be a dict"),
    ({"kv_connector": Store, "kv_load_failure_policy": "stop"}, "is 'stop', must be 'recompute'"),
    ({"kv_load_failure_policy": "fail"}, "lacks kv_connector"),
]
UNOPENED: list[tuple[Any, str]] = [
    ({"kv_connector": "os.getcwd"}, "'os.getcwd' cannot be opened: TypeError"),
    ({"kv_connector": "builtins.dict"}, "'builtins.dict' cannot be opened: TypeError"),
    (
        {"kv_connector": Store, "kv_connector_extra_config": {"port": 1}},
        "cannot be opened: TypeError: Store.__init__() got an unexpected keyword argument 'port'",
    ),
    (
        {"kv_connector": Store, "kv_connector_extra_config": {1: 2}},
        "cannot be opened: TypeError",
    ),
    (
        {"kv_connector": Store, "kv_connector_extra_config": {"fault": "no route"}},
        "cannot be opened: OSError: no route",
    ),
    ({"kv_connector": Nameless}, "is no BlockStore: it lacks a name (a string)"),
    ({"kv_connector": Blind}, "is no BlockStore: it lacks read"),
    ({"kv_connector": lambda identity: None}, "is no BlockStore: it lacks contains, read, write"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_named_before_the_model_is_loaded(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(kv_transfer_config=options)
    assert message in str(error.value) and "kv_transfer_config" in str(error.value)


@pytest.mark.parametrize(("options", "message"), UNOPENED)
def test_a_store_that_cannot_be_opened_is_named(options: Any, message: str, tmp_path: Path) -> None:
    """Stores that were opened before it are closed."""
    stores = planned(kv_transfer_config=options, kv_offload_dir=tmp_path / "kv")
    for _ in range(2):  # the directory's segments are not locked the second time
        with pytest.raises(ConfigError) as error:
            stores.open("00", 64)
        assert message in str(error.value) and "kv_transfer_config" in str(error.value)


def test_a_role_says_which_way_blocks_go(tmp_path: Path) -> None:
    for role, ways in [("kv_both", (1, 1)), ("kv_producer", (0, 1)), ("kv_consumer", (1, 0))]:
        stores = planned(kv_transfer_config={"kv_connector": Store, "kv_role": role})
        (opened,) = stores.open("00", 64)
        assert (opened.reads, opened.writes) == ways


def test_what_follows_a_failed_load_needs_no_connector(tmp_path: Path) -> None:
    options = {"kv_load_failure_policy": "fail"}
    stores = planned(kv_transfer_config=options, kv_offload_dir=tmp_path / "kv")
    assert stores.failure_policy == "fail" and len(stores.speeds) == 1


def test_each_core_counts_its_share_of_the_memory_once() -> None:
    """What ``share_of_cache`` leaves to one of two cores."""
    cache = share_of_cache(CacheConfig(kv_offloading_size=0.5), 2)
    config = EngineConfig(model=ModelConfig(model="m"), cache=cache, core_index=1, num_cores=2)
    assert PlannedStores(config).own_bytes == GIB // 4


def make_model(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"hidden_size": 8}))
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 100)
    (path / "tokenizer.json").write_text("{}")
    (path / "missing.json").symlink_to(path / "nowhere")
    return path


def test_only_what_changes_the_content_of_blocks_changes_the_digest(tmp_path: Path) -> None:
    path = make_model(tmp_path / "m")
    digest, weights = weights_digest(path), path / "model.safetensors"
    (path / "tokenizer.json").write_text("{1}")
    (path / "README.md").write_text("new")
    assert weights_digest(path) == digest
    time = weights.stat().st_mtime_ns
    changes = [
        lambda: weights.write_bytes(bytes(range(255)) * 100),
        lambda: os.utime(weights, ns=(time, time + 1)),
        lambda: (path / "config.json").write_text("{}"),
        lambda: (path / "quantize_config.json").write_text("{}"),
        lambda: (path / "modeling.py").write_text("pass"),
        lambda: (path / "more.safetensors").write_bytes(b"0"),
    ]
    known = {digest}
    for change in changes:
        change()
        digest = weights_digest(path)
        assert digest not in known
        known.add(digest)
    assert weights_digest(weights) not in known  # a single file


def test_stages_have_names_of_their_own() -> None:
    """Two stages and two ranks of each layer are as many ranks."""
    names = []
    for sizes in ({}, {"pipeline_parallel_size": 2}, {"pipeline_layer_split": [1, 2]}):
        count = 2 if sizes else 1
        given = EngineArgs(**{"pipeline_parallel_size": count, **sizes}).create_config()
        about: Any = SimpleNamespace(
            **{name: getattr(given, name) for name in ("model", "cache", "media", "parallel")},
            scheduler=SimpleNamespace(max_model_len=9),
            block_size=8,
            device="cpu",
        )
        facts: Any = SimpleNamespace(block_bytes=64, kv_groups=[], snapshot_blocks=0)
        names.append(namespace_of(about, facts, None))
    assert len(set(names)) == 3
