"""GGUF files by name, as OWNER/NAME:TYPE, against a hub on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from support.fake_hub import FakeHub

from engine.errors import ModelError
from engine.hub.download import Download
from engine.hub.files import Repository

PARTS = {f"Q8_0/tiny-Q8_0-0000{n}-of-00003.gguf": bytes([n]) * 3000 for n in (1, 2, 3)}
FILES = {
    "README.md": b"read me",
    "config.json": b"{}",
    "tiny-Q4_K_M.gguf": b"GGUF four bits" * 100,
    "tiny-UD-Q4_K_XL.gguf": b"GGUF four bits, more",
    "tiny.Q5_0.gguf": b"GGUF five bits",
    "tiny-IQ4_XS.gguf": b"GGUF",
    "tiny-BF16.gguf": b"GGUF sixteen bits",
    "mmproj-tiny-BF16.gguf": b"GGUF of an image encoder",
    "imatrix.gguf": b"GGUF of statistics",
    **PARTS,
}
Fetch = Callable[..., Path]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    with FakeHub().running() as running:
        running.add("org/tiny-GGUF", FILES)
        yield running
    huggingface_hub.close_session()


@pytest.fixture
def fetch(hub: FakeHub, tmp_path: Path) -> Fetch:
    """Download from the repository; options are those of ``Repository``."""
    asked = Repository(
        option="model",
        name="org/tiny-GGUF",
        token=False,
        cache=str(tmp_path / "cache"),
        has_weights=True,
        has_tokenizer=True,
    )

    def run(kind: str | None, *, is_offline: bool = False, **changes: Any) -> Path:
        hub.asked.clear()
        download = Download(replace(asked, gguf=kind, **changes), hub.url)
        download.is_offline = is_offline
        return download.run()

    return run


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q4_k_m", "tiny-Q4_K_M.gguf"),
        ("UD-Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        ("Q4_K_XL", "tiny-UD-Q4_K_XL.gguf"),
        ("Q5_0", "tiny.Q5_0.gguf"),
        ("IQ4_XS", "tiny-IQ4_XS.gguf"),
        ("BF16", "tiny-BF16.gguf"),
        ("tiny.Q5_0.gguf", "tiny.Q5_0.gguf"),
    ],
)
def test_a_type_fetches_its_file_alone(hub: FakeHub, fetch: Fetch, kind: str, name: str) -> None:
    found = fetch(kind)
    assert found.name == name
    assert found.read_bytes() == FILES[name]
    assert hub.fetched() == [name]


@pytest.mark.parametrize("kind", ["Q8_0", "Q8_0/tiny-Q8_0-00001-of-00003.gguf"])
def test_a_split_file_is_fetched_with_all_parts(hub: FakeHub, fetch: Fetch, kind: str) -> None:
    first = fetch(kind)
    assert first.name == "tiny-Q8_0-00001-of-00003.gguf"
    assert sorted(hub.fetched()) == sorted(PARTS)
    assert sorted(file.name for file in first.parent.iterdir()) == sorted(
        name.removeprefix("Q8_0/") for name in PARTS
    )


def test_a_type_that_is_missing_lists_what_there_is(fetch: Fetch) -> None:
    with pytest.raises(ModelError, match=r"no GGUF file of the type 'Q2_K'") as caught:
        fetch("Q2_K")
    for kind in ("Q4_K_M", "UD-Q4_K_XL", "Q5_0", "IQ4_XS", "BF16", "Q8_0"):
        assert f"org/tiny-GGUF:{kind}" in str(caught.value)
    assert "mmproj" not in str(caught.value)


def test_a_type_that_fits_several_files_lists_them(hub: FakeHub, fetch: Fetch) -> None:
    with pytest.raises(ModelError, match=r"2 GGUF files that fit 'Q4_K'.*:Q4_K_M, .*:UD-Q4_K_XL"):
        fetch("Q4_K")
    hub.add("org/tiny-GGUF", {"a-Q4_0.gguf": b"a", "b-Q4_0.gguf": b"b"})
    with pytest.raises(ModelError, match=r"org/tiny-GGUF:a-Q4_0.gguf, org/tiny-GGUF:b-Q4_0.gguf"):
        fetch("Q4_0")
    assert fetch("b-Q4_0.gguf").read_bytes() == b"b"


def test_a_split_file_that_lacks_a_part_is_no_choice(hub: FakeHub, fetch: Fetch) -> None:
    hub.add("org/tiny-GGUF", dict(list(PARTS.items())[:2]))
    with pytest.raises(ModelError, match="no complete GGUF file"):
        fetch("Q8_0")


@pytest.mark.parametrize("has_weights", [True, False])
@pytest.mark.parametrize("has_config", [True, False])
def test_a_repository_of_gguf_files_named_without_a_type_lists_them(
    hub: FakeHub, fetch: Fetch, has_weights: bool, has_config: bool
) -> None:
    files = {name: data for name, data in FILES.items() if has_config or name != "config.json"}
    hub.add("org/tiny-GGUF", files)
    if has_config and not has_weights:
        assert fetch(None, has_weights=False).is_dir()
        return
    with pytest.raises(ModelError, match=r"only as GGUF: choose one with .*org/tiny-GGUF:Q4_K_M"):
        fetch(None, has_weights=has_weights)
    assert hub.fetched() == []


def test_the_cache_serves_without_the_hub(hub: FakeHub, fetch: Fetch) -> None:
    first, split = fetch("Q4_K_M"), fetch("Q8_0")
    assert fetch("Q4_K_M") == first
    assert hub.fetched() == []
    assert fetch("Q4_K_M", is_offline=True) == first
    assert fetch("Q8_0", is_offline=True) == split
    assert hub.asked == []
    hub.down_with = 503
    assert fetch("q4_k_m") == first
    with pytest.raises(ModelError, match="status 503"):
        fetch("Q5_0")


def test_offline_without_the_file_says_what_is_missing(hub: FakeHub, fetch: Fetch) -> None:
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set, and .* does not have it"):
        fetch("Q4_K_M", is_offline=True)
    fetch("Q4_K_M")
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set, and .* lacks a GGUF file 'Q5_0'"):
        fetch("Q5_0", is_offline=True)


def test_a_revision_is_followed(hub: FakeHub, fetch: Fetch) -> None:
    repo = hub.repos["org/tiny-GGUF"]
    commit = repo.commit({"tiny-Q4_K_M.gguf": b"GGUF newer"}, "newer")
    assert fetch("Q4_K_M", revision="newer").read_bytes() == b"GGUF newer"
    assert fetch("Q4_K_M", revision=commit, is_offline=True).read_bytes() == b"GGUF newer"
    assert fetch("Q4_K_M").read_bytes() == FILES["tiny-Q4_K_M.gguf"]
    with pytest.raises(ModelError, match="no such branch, tag or commit"):
        fetch("Q4_K_M", revision="older")


def test_an_interrupted_part_is_not_taken_for_complete(hub: FakeHub, fetch: Fetch) -> None:
    repo = hub.repos["org/tiny-GGUF"]
    repo.cuts["Q8_0/tiny-Q8_0-00002-of-00003.gguf"] = 99
    hub.down_after_cut = 503
    with pytest.raises(ModelError):
        fetch("Q8_0")
    repo.cuts.clear()
    hub.down_with = hub.down_after_cut = None
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        fetch("Q8_0", is_offline=True)
    assert fetch("Q8_0").exists()
