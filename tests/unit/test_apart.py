"""PrefillApart without processes: who computes a prompt, and who waits until when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from support.simulate import make_request

from engine.errors import RefusedError, RequestError
from engine.messages.requests import AddRequest, CoreOutputs, Finished, FinishReason, Started
from engine.rpc.apart import GRACE_SECONDS, PrefillApart, Roles
from engine.rpc.balance import Balancer
from engine.rpc.zmq_client import EngineCoreClient

LONG, OTHER, SHORT = list(range(1, 200)), list(range(201, 400)), [1, 2, 3]


class FakeCore:
    """Notes what is sent to it, and answers when ``answers`` is set."""

    decided = SimpleNamespace(capabilities=())

    def __init__(self) -> None:
        self.added: list[AddRequest] = []
        self.aborted: list[str] = []
        self.stopped: list[str] = []
        self.answers = True
        self.refusal: Exception | None = None

    def begin_add(self, requests: Sequence[AddRequest]) -> tuple[list[Any], dict[int, Exception]]:
        self.added += requests
        return [SimpleNamespace(number=len(self.added))], {}

    def is_answered(self, number: int) -> bool:
        return self.answers

    def end_add(self, parts: Sequence[Any]) -> dict[int, Exception]:
        return {} if self.refusal is None else {0: self.refusal}

    def abort(self, names: Sequence[str]) -> None:
        self.aborted += names

    def begin_call(self, name: str, names: list[str]) -> int:
        assert name == "stop_awaiting"
        self.stopped += names
        return 0

    def end_call(self, name: str, number: int) -> None:
        assert self.answers


class Cores:
    """A prefill core, two decode cores and what routes between them."""

    def __init__(self) -> None:
        self.cores = [FakeCore() for _ in range(3)]
        self.balancer = Balancer(3, 16)
        self.now = 0.0
        clients = cast(list[EngineCoreClient], self.cores)
        self.apart = PrefillApart(
            Roles(1, 64), clients, self.balancer, self.named, clock=lambda: self.now
        )

    @contextmanager
    def named(self, core: int) -> Iterator[None]:
        yield

    def add(self, name: str, prompt: list[int]) -> tuple[int, AddRequest]:
        self.now += 0.001
        chosen = self.apart.choose(make_request(name, prompt, 5))
        self.apart.tend()
        return chosen

    def put_out(
        self, name: str, end: FinishReason | None = None, started: bool = False
    ) -> list[str]:
        """The ids in the outputs that the user sees."""
        batch = CoreOutputs([name], [7], None, self.now)
        if started:
            batch = replace(batch, started=[Started(0, 0, 0.0)])
        if end is not None:
            batch = replace(batch, finished=[Finished(0, end)])
            self.balancer.end(name)
        return [each for kept in self.apart.take([batch]) for each in kept.request_ids]

    @property
    def prefills(self) -> list[str]:
        return [each.request_id for each in self.cores[0].added]


@pytest.fixture
def cores() -> Cores:
    return Cores()


def test_long_prompts_are_computed_once_and_short_ones_go_straight(cores: Cores) -> None:
    chosen = {name: cores.add(name, LONG) for name in ("a", "b")} | {"c": cores.add("c", SHORT)}
    assert all(core > 0 for core, _ in chosen.values())
    waits = {name: bool(request.kv_transfer_params) for name, (_, request) in chosen.items()}
    assert waits == {"a": True, "b": True, "c": False}
    (prefill,) = cores.cores[0].added
    assert prefill.prompt_token_ids == LONG and prefill.max_tokens == 1
    assert cores.apart.num_unfinished() == 1
    assert cores.put_out(prefill.request_id, "length") == []
    assert cores.apart.num_unfinished() == 0
    assert cores.put_out("a", started=True) == ["a"]
    cores.now += 2 * GRACE_SECONDS  # b has not started
    assert cores.put_out("c") == ["c"]
    assert cores.cores[1].stopped + cores.cores[2].stopped == ["b"]


@pytest.mark.parametrize("fault", ["refused", "failed", "died"])
def test_nobody_waits_for_a_prefill_that_fails(fault: str, cores: Cores) -> None:
    prefill_core = cores.cores[0]
    if fault == "refused":
        prefill_core.refusal = RefusedError("the queue is full", 1.0)
    core, _ = cores.add("a", LONG)
    (name,) = cores.prefills
    if fault == "failed":
        assert cores.put_out(name, "error") == []
    if fault == "died":
        assert cores.apart.lost(0, [*cores.balancer.remove(0), "z"]) == ["z"]
    cores.apart.tend()
    assert cores.cores[core].stopped == ["a"] and cores.apart.num_unfinished() == 0
    if fault == "died":
        assert not cores.add("b", OTHER)[1].kv_transfer_params


def test_a_prefill_is_aborted_when_no_request_needs_it(cores: Cores) -> None:
    prefill_core = cores.cores[0]
    prefill_core.answers = False
    cores.add("a", LONG)
    cores.add("b", LONG)
    (name,) = cores.prefills
    for each in ("a", "b"):
        assert prefill_core.aborted == []
        cores.apart.end(each)
        cores.apart.tend()
    assert prefill_core.aborted == [name]
    cores.add("c", LONG)  # does not join it
    assert len(cores.prefills) == 2
    assert cores.put_out(name, "abort") == []
    assert cores.apart.prefills_of(["a", "b", "c"]) == [cores.prefills[1]]


def test_without_decode_cores_prefill_cores_do_everything(cores: Cores) -> None:
    for core in (1, 2):
        cores.balancer.remove(core)
    core, request = cores.add("a", LONG)
    assert core == 0 and not request.kv_transfer_params and not cores.prefills
    with pytest.raises(RequestError, match="marks requests of prefill_cores"):
        cores.add("a\x1fprefill", SHORT)
