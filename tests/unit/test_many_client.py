"""Several cores behind one client, as scripts: what is read before a death and counted after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from support.simulate import make_request

from engine.errors import ConfigError, EngineDeadError
from engine.ipc.address import Address
from engine.messages.media import MediaContent
from engine.messages.requests import AddRequest, CoreOutputs
from engine.messages.stats import SchedulerStats
from engine.rpc.many_client import ManyCoresClient


class ScriptedCore:
    """Each look brings what the script says next, and nothing behind its end."""

    decided = SimpleNamespace(max_model_len=64, vocab_size=9, eos_token_ids=[], block_size=16)
    id_prefix = place = ""
    sources = ()
    reads_shared_memory = False
    route = None
    stats: SchedulerStats

    def __init__(self, name: str, script: list[list[int] | EngineDeadError]) -> None:
        self.address = Address(f"ipc:///{name}", b"")
        self.brought: list[list[str]] = []
        self._script = script

    def fail(self, error: EngineDeadError) -> None:
        self._script = [error]

    def follow(self, receive: object) -> None:
        pass

    def add_all(self, requests: Sequence[AddRequest]) -> dict[int, Exception]:
        return {}

    def bring(self, request_ids: Sequence[str], content: MediaContent) -> None:
        self.check_alive()
        self.brought.append(list(request_ids))

    def check_alive(self) -> None:
        if self._script and isinstance(self._script[0], EngineDeadError):
            raise self._script[0]

    def begin_call(self, name: str, *args: object) -> object:
        return args

    def end_call(self, name: str, number: tuple[object, ...]) -> Any:
        return self.call(name, *number)

    def call(self, name: str, *args: object) -> SchedulerStats:
        self.check_alive()
        return self.stats

    def request_end(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def latest_stats(self) -> SchedulerStats:
        return self.call("stats")

    def take(self) -> list[CoreOutputs]:
        found = self._script.pop(0) if self._script else []
        if isinstance(found, EngineDeadError):
            self._script = [found]
            raise found
        return [CoreOutputs(["a"], [token], None, 0.0) for token in found]


Join = Callable[[Sequence[Any]], ManyCoresClient]


@pytest.fixture
def join() -> Iterator[Join]:
    """Puts cores after one client, which is shut down after the test."""
    with ExitStack() as clients:

        def join(cores: Sequence[Any]) -> ManyCoresClient:
            client = ManyCoresClient(cores)
            clients.callback(client.shutdown)
            return client

        yield join


@pytest.mark.parametrize("first_to_die", [0, 1])
def test_the_last_death_is_raised_when_all_that_had_come_was_read(
    first_to_die: int, join: Join
) -> None:
    """A look at a core brings what was read before, and only the next one what came since."""
    last = ScriptedCore("last", [[1], [2, 3], EngineDeadError("it fell over, too")])
    dying = ScriptedCore("dying", [EngineDeadError("it fell over")])
    client = join([dying, last] if first_to_die == 0 else [last, dying])
    tokens: list[int] = []
    for _ in range(2):
        with pytest.raises(
            EngineDeadError, match=f"core {1 - first_to_die} of 2 .* it fell over, too"
        ):
            for _ in range(9):
                tokens += [token for batch in client.step() for token in batch.token_ids]
    assert tokens == [1, 2, 3]


def test_counts_of_a_core_that_died_stay_in_the_sums(join: Join) -> None:
    """Totals that go back look like a counter that began anew, and rates jump."""
    dying, living = (ScriptedCore(name, []) for name in ("dying", "living"))
    dying.stats, living.stats = stats_of(7, 3), stats_of(5, 2)
    client = join([dying, living])
    both = client.call("stats")
    assert both is not None and (both.num_steps, both.num_running) == (12, 5)
    dying.fail(EngineDeadError("it fell over"))
    living.stats = stats_of(6, 1)
    one = client.call("stats")
    assert one is not None and (one.num_steps, one.num_running) == (13, 1)
    assert one.kv_usage == living.stats.kv_usage
    latest = client.latest_stats()
    assert latest is not None and latest.num_steps == 13


def test_all_cores_are_called_before_one_of_them_is_an_error(join: Join) -> None:
    """A core that was started again records no profile, and the others must still end theirs."""

    class Fresh(ScriptedCore):
        def call(self, name: str, *args: object) -> SchedulerStats:
            raise ConfigError("no profile is being recorded")

    recording = ScriptedCore("recording", [])
    calls: list[tuple[str, ...]] = []
    recording.call = lambda *args: calls.append(args)  # type: ignore[method-assign,assignment]
    client = join([Fresh("fresh", []), recording])
    with pytest.raises(ConfigError, match="no profile is being recorded"):
        client.call("profile", "stop")
    assert calls == [("profile", "stop")]
    assert client.num_cores().alive == 2


def test_no_core_is_waited_for_before_all_are_called(join: Join) -> None:
    """Each answers after its step: a call of eight cores would take eight steps in turn."""
    events: list[str] = []

    class Slow(ScriptedCore):
        def begin_call(self, name: str, *args: object) -> object:
            events.append(f"{self.address.data} is called")
            return args

        def end_call(self, name: str, number: tuple[object, ...]) -> None:
            events.append(f"{self.address.data} answers")

    client = join([Slow(name, []) for name in ("a", "b")])
    client.call("pause")
    assert [event.partition(" ")[2] for event in events] == ["is called"] * 2 + ["answers"] * 2


def test_content_goes_once_to_each_core_that_has_one_of_the_requests(join: Join) -> None:
    cores: list[Any] = [ScriptedCore(str(i), []) for i in range(3)]
    client = join(cores)
    names = list("abcdef")
    for name in names:
        assert not client.add_all([make_request(name, [1] * 8)])
    content = MediaContent("key", {})
    client.bring([*names, "unknown"], content)
    assert sorted(len(ids) for core in cores for ids in core.brought) == [2, 2, 2]
    assert sorted(name for core in cores for (ids,) in [core.brought] for name in ids) == names
    cores[1].fail(EngineDeadError("gone"))
    (lost,) = cores[1].brought
    client.bring(names, content)
    client.bring(lost, content)
    assert [len(core.brought) for core in cores] == [2, 1, 2], "the requests of a dead core end"


def stats_of(num_steps: int, num_running: int) -> SchedulerStats:
    return SchedulerStats(num_running, 0, 0, 0.25, 0, 0, 0, 0, num_steps, 0)
