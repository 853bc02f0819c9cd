"""Options of engines that serve KV blocks to each other: what is wrong is named at the start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.config.cache import DEFAULT_GIB, CacheConfig
from engine.config.core import CoreConfig
from engine.config.engine import EngineConfig
from engine.config.model import ModelConfig
from engine.errors import ConfigError
from engine.kv_transfer import store_thread
from engine.kv_transfer.opening import GIB, PlannedStores, content_digest
from engine.kv_transfer.params import read_params
from engine.kv_transfer.peers.messages import MAX_BLOCK_BYTES, Pace
from engine.kv_transfer.peers.options import MOST_SECONDS, PeerOptions, peer_options
from engine.kv_transfer.store_thread import BATCH_BYTES

SECRET = "a secret of some length"


def planned(options: dict[str, Any], secret: str | None = SECRET, **cache: Any) -> PlannedStores:
    peers = {"kv_connector": "peers", **options}
    config = EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(kv_transfer_config=peers, **cache),
        core=CoreConfig(core_secret=secret),
    )
    return PlannedStores(config)


def with_extra(**extra: Any) -> dict[str, Any]:
    return {"kv_connector_extra_config": extra}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kv_ip": "0.0.0.0"}, "kv_ip is '0.0.0.0', must be the IPv4 address by which other engines"),
    ({"kv_ip": "here"}, "kv_ip is 'here', must be the IPv4 address"),
    ({"kv_ip": 5}, "kv_ip is 5, must be the IPv4 address"),
    ({"kv_port": 0}, "kv_port is 0, must be in 1..65534"),
    ({"kv_port": "14579"}, "kv_port is '14579', must be in"),
    ({"kv_port": True}, "kv_port is True, must be in"),
    ({"kv_role": "producer"}, "kv_role is 'producer', must be one of kv_both,"),
    ({"kv_rank": 0}, "has 'kv_rank', which is not known; it takes kv_connector,"),
    ({"engine_id": 7}, "engine_id is 7, must be a string"),
    (with_extra(secret="s"), "has 'secret', which 'peers' does not know; it takes allowed,"),
    (with_extra(allowed="10.0.0.5"), "allowed is '10.0.0.5', must be a list of addresses"),
    (with_extra(allowed=["a.b"]), "allowed has 'a.b', must be an IPv4 address or network"),
    (with_extra(allowed=["10.0.0.5:x"]), "allowed has '10.0.0.5:x', must be"),
    (with_extra(allowed=["10.0.0.5/8"]), "allowed has '10.0.0.5/8', must be"),
    (with_extra(allowed=[3.5]), "allowed has 3.5, must be"),
    (with_extra(transport="rdma"), "transport is 'rdma', must be one of tcp, mooncake"),
    (with_extra(timeout=0), "timeout is 0, must be a number of seconds above 0 and at most 1.5"),
    (with_extra(timeout=2.5), "timeout is 2.5, must be"),
    (with_extra(timeout="1"), "timeout is '1', must be"),
    (with_extra(timeout=float("nan")), "timeout is nan, must be"),
    (with_extra(shares_memory=1), "shares_memory is 1, must be True or False"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        planned(options)
    assert message in str(error.value) and "kv_transfer_config" in str(error.value)


@pytest.mark.parametrize("secret", [None, "short"])
def test_a_secret_is_needed(secret: str | None) -> None:
    with pytest.raises(ConfigError, match="set METRONOME_CORE_SECRET to the same value for all"):
        planned({}, secret)


def test_each_core_has_a_port_of_its_own() -> None:
    options = {"kv_ip": "10.0.0.1", "kv_port": 65530}
    found = [peer_options(options, rank, 4) for rank in range(4)]
    assert [each.address for each in found] == [f"tcp://10.0.0.1:{65530 + n}" for n in range(4)]
    assert len({each.engine_id for each in found}) == 4
    with pytest.raises(ConfigError, match=r"kv_port is 65530, must be in 1\.\.65529; each rank"):
        peer_options(options, 0, 6)


def test_only_listed_addresses_and_this_machine_may_be_read_from() -> None:
    options = with_extra(allowed=["10.0.0.5:7", "10.1.0.0/16", "10.2.0.1"])
    allows = peer_options(options, 0, 1).allows
    right = [("127.0.0.1", 5), ("10.0.0.5", 7), ("10.1.2.3", 9), ("10.2.0.1", 1)]
    wrong = [("10.0.0.5", 8), ("10.0.0.6", 7), ("10.2.0.2", 1), ("0.0.0.0", 1), ("8.8.8.8", 53)]
    assert all(allows(*each) for each in right) and not any(allows(*each) for each in wrong)
    assert not PeerOptions().allows("10.0.0.5", 7)


def test_a_producer_keeps_blocks_in_memory_and_a_consumer_keeps_none() -> None:
    assert planned({"kv_role": "kv_producer"}).own_bytes == DEFAULT_GIB * GIB
    assert len(planned({"kv_role": "kv_producer"}).speeds) == 1
    assert len(planned({"kv_role": "kv_both"}).speeds) == 2
    consumer = planned({"kv_role": "kv_consumer"})
    assert consumer.own_bytes == 0 and len(consumer.speeds) == 1


def test_names_of_other_engines_are_accepted() -> None:
    given = {"transfer_id": "x", "remote_request_id": None, "remote_num_tokens": 5, "tp_size": 2}
    assert read_params(given).remote == read_params({}).remote
    nulls = dict.fromkeys(["do_remote_prefill", "remote_host", "remote_port", "remote_block_ids"])
    assert not read_params({**nulls, "do_remote_decode": False}).remote.sends


def test_a_read_ends_before_nothing_waits_for_it() -> None:
    num_bytes, seconds = max(BATCH_BYTES, MAX_BLOCK_BYTES), MOST_SECONDS
    assert seconds + Pace(grace_seconds=seconds).seconds(num_bytes) < store_thread.MOST_SECONDS


def test_copies_of_a_model_have_the_same_digest(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    (one / "config.json").write_text("{}")
    (one / "tokenizer.json").write_text("{}")
    (one / "model.safetensors").write_bytes(os.urandom(3_000_000))
    shutil.copytree(one, two)
    weights = two / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    (two / "tokenizer.json").write_text("{1}")
    assert content_digest(one) == content_digest(two)
    content = bytearray(weights.read_bytes())
    content[1_234_567] ^= 1
    weights.write_bytes(content)
    assert content_digest(one) != content_digest(two)
