"""Options for copies of KV blocks outside the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config.args import EngineArgs
from engine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0}, r"kv_offloading_size is 0, must be in 0\.001\.\."),
        ({"kv_offload_dir": ""}, r"kv_offload_dir is '', must be a path"),
        (
            {"kv_offloading_size": 2.0, "enable_prefix_caching": False},
            r"kv_offloading_size is 2\.0, but enable_prefix_caching is False.*leave",
        ),
        (
            {"kv_offload_dir": "kv", "enable_prefix_caching": False},
            r"kv_offload_dir is '.*/kv', but enable_prefix_caching is False",
        ),
        (
            {"kv_offloading_size": 1, "prefix_caching_hash_algo": "fast"},
            r"kv_offloading_size is 1, but prefix_caching_hash_algo is 'fast'.*='sha256', or",
        ),
    ],
)
def test_errors_name_value_limit_and_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**options).create_config()


def test_the_directory_is_absolute_in_the_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    config = EngineArgs(kv_offload_dir="kv", kv_offloading_size=0.5).create_config()
    assert config.cache.kv_offload_dir == str(tmp_path / "kv")
    assert config.cache.kv_offloading_size == 0.5
