"""Adapters while processes die: loads reach all cores or none, and a core that starts again has
what was loaded."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.adapters import digest_of
from support.core_clients import HostedCore
from support.data_plane import answer
from support.patience import WAIT_SECONDS
from support.simulate import make_request
from support.spawned import VOCAB_SIZE, AdapterBuild, fake_config

from engine.errors import EngineDeadError, EngineError, RequestError
from engine.frontend.adapters import AdapterLoad, call
from engine.messages.adapters import AdapterSource
from engine.rpc.launch import start_cores
from engine.rpc.many_client import ManyCoresClient
from engine.rpc.zmq_client import EngineCoreClient


@contextmanager
def cores(folder: Path, num: int, death: str = "restart") -> Iterator[ManyCoresClient]:
    config = fake_config(multiprocess=True, data_parallel_size=num, on_core_death=death)
    client = start_cores(config, AdapterBuild(folder=str(folder)))
    try:
        yield client
    finally:
        client.shutdown()


def until(client: ManyCoresClient, holds: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not holds():
        assert time.monotonic() < end, "it has not come to be"
        client.step()


def load(client: ManyCoresClient, name: str, path: str, *, replaces: bool = False) -> None:
    loading = AdapterLoad(client, name, path, replaces=replaces)
    loading.begin()
    while loading.poll() is None:
        time.sleep(0.001)


def tokens(client: ManyCoresClient, names: list[str], *, salt: str = "") -> list[list[int]]:
    """Output tokens of a request with each adapter."""
    found: dict[str, list[int]] = {f"{salt}{i}": [] for i in range(len(names))}
    for i, name in enumerate(names):
        client.add(make_request(f"{salt}{i}", [7 + i] * 20, 3, adapter=name))
    while client.num_unfinished():
        for batch in client.step():
            counts = batch.counts or [1] * len(batch.request_ids)
            given = iter(batch.token_ids)
            for request_id, count in zip(batch.request_ids, counts, strict=True):
                found[request_id] += [next(given) for _ in range(count)]
            assert all(end.reason == "length" for end in batch.finished), batch.finished
    return list(found.values())


def right(content: str, place: int = 0) -> list[int]:
    request = make_request("?", [7 + place] * 20, 3, adapter=digest_of(content))
    return [token % VOCAB_SIZE for token in answer(request)]


def kill(client: ManyCoresClient, index: int) -> None:
    os.kill(client.pids[index], signal.SIGKILL)
    until(client, lambda: client.num_cores().alive < client.num_cores().total)


def again(client: ManyCoresClient) -> None:
    """Wait until all cores serve."""
    until(client, lambda: client.num_cores().alive == client.num_cores().total)


@pytest.mark.parametrize("num", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_core_that_starts_again_has_what_was_loaded(num: int, tmp_path: Path) -> None:
    for name, content in (("a", "A"), ("b", "B"), ("c", "C")):
        (tmp_path / name).write_text(content)
    with cores(tmp_path, num) as client:
        for name, path in (("x", "a"), ("y", "b"), ("z", "c")):
            load(client, name, path)
        (tmp_path / "a").write_text("A2")
        load(client, "x", "a", replaces=True)
        call(client, "remove_adapter", "z")
        for index in range(num):  # one after the other: none of the first processes is left
            kill(client, index)
            if num > 1:
                wanted = [right("A2"), right("B", 1)]
                assert tokens(client, ["x", "y"], salt=f"one {index} ") == wanted
            again(client)
        names = ["x", "y"] * 4
        wanted = [right("A2" if name == "x" else "B", i) for i, name in enumerate(names)]
        assert tokens(client, names, salt="both ") == wanted
        assert [each["name"] for each in call(client, "adapters")] == ["x", "y"]
        with pytest.raises(RequestError, match="adapter 'z' is not loaded"):
            client.add(make_request("z", [7] * 20, 3, adapter="z"))


def test_a_core_that_dies_amid_a_load_gets_the_adapter_when_it_is_back(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    (tmp_path / "hold").touch()
    with cores(tmp_path, 2) as client:
        loading = AdapterLoad(client, "x", "a")
        loading.begin()
        assert loading.poll() is None
        kill(client, 0)
        (tmp_path / "hold").unlink()
        while loading.poll() is None:
            client.step()
        again(client)
        wanted = [right("A", i) for i in range(6)]
        assert tokens(client, ["x"] * 6) == wanted


def test_the_death_of_all_cores_amid_a_load_is_an_error_and_nothing_is_loaded(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").write_text("A")
    (tmp_path / "hold").touch()
    with cores(tmp_path, 1) as client:
        loading = AdapterLoad(client, "x", "a")
        loading.begin()
        source = AdapterSource("a")
        client.add(make_request("r", [7] * 20, 3, adapter="y", adapter_source=source))
        client.step()
        os.kill(client.pids[0], signal.SIGKILL)
        ends = []
        end = time.monotonic() + WAIT_SECONDS
        while not ends:
            assert time.monotonic() < end
            ends = [each for batch in client.step() for each in batch.finished]
        assert ends[0].code == "core_died"
        again(client)
        (tmp_path / "hold").unlink()
        with pytest.raises(EngineError, match="no adapter is being read"):
            while loading.poll() is None:
                pass
        assert call(client, "adapters") == []
        load(client, "x", "a")
        assert tokens(client, ["x"]) == [right("A")]


def test_a_client_that_dies_amid_a_load_leaves_the_core_to_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    (tmp_path / "hold").touch()
    with HostedCore(AdapterBuild(folder=str(tmp_path))) as core:
        first = EngineCoreClient(core.address)
        AdapterLoad(first, "x", "a").begin()
        source = AdapterSource("a")
        first.add(make_request("r", [7] * 20, 3, adapter="y", adapter_source=source))
        first.shutdown()
        (tmp_path / "hold").unlink()
        second = EngineCoreClient(core.address)
        load(second, "x", "a")
        assert tokens(second, ["x"]) == [right("A")]
        second.shutdown()
    assert not [each for each in threading.enumerate() if each.name.startswith("adapters")]


@pytest.mark.slow
def test_without_restarts_a_load_ends_with_the_last_core(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    (tmp_path / "hold").touch()
    with cores(tmp_path, 2, death="exit") as client:
        loading = AdapterLoad(client, "x", "a")
        loading.begin()
        for pid in client.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            while loading.poll() is None:
                time.sleep(0.001)
