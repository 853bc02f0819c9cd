"""Ranks over NCCL, with a group that notes what torch's would be asked to do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.patience import WAIT_SECONDS

from engine.config.env import BLOCKING_WAIT
from engine.errors import ConfigError, RankError
from engine.parallel.nccl import NcclCollectives

LOST = RuntimeError("NCCL error: remote process exited\nException raised from somewhere")


class Noted:
    """The place of ``torch.distributed.ProcessGroupNCCL``, for one group."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.environment: str | None = None
        self.error: RuntimeError | None = None  # of the communicator
        self.may_abort = threading.Event()
        self.may_abort.set()
        self.has_aborted = threading.Event()

    def __call__(self, store: Any, rank: int, size: int, options: Any) -> Noted:
        self.environment = os.environ.get(BLOCKING_WAIT)
        return self

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Noted:
        self.calls.append("all_reduce" if opts and not opts.asyncOp else "first")
        return self

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, opts: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append("all_gather")

    def wait(self) -> None:
        """The work of the first operation, which has long ended."""
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.may_abort.wait(WAIT_SECONDS)
        self.calls.append("abort")
        self.has_aborted.set()


Make = Callable[..., NcclCollectives]


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    group = Noted()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: group.calls.append("synchronize"))
    return group


@pytest.fixture
def make(noted: Noted) -> Make:
    store = dist.HashStore()

    def make(rank: int = 0, size: int = 1, wait_seconds: float = WAIT_SECONDS) -> NcclCollectives:
        return NcclCollectives(store, rank, size, "cpu", wait_seconds=wait_seconds)

    return make


def test_torch_does_not_watch_a_group_and_other_groups_are_as_before(noted: Noted, make: Make):
    before = dict(os.environ)
    make()
    assert noted.environment == "1"
    assert dict(os.environ) == before


def test_operations_are_put_on_the_current_stream(noted: Noted, make: Make):
    ranks, x = make(), torch.ones(3)
    assert ranks.all_reduce(x) is x
    assert ranks.all_gather(x).shape == (1, 3)
    assert noted.calls == ["first", "all_reduce", "all_gather"]


def test_ranks_wait_for_each_other_before_they_connect(noted: Noted, make: Make):
    early, late = make(0, 2), make(1, 2)
    thread = threading.Thread(target=early.all_reduce, args=(torch.ones(1),))
    thread.start()
    assert not noted.calls
    late.all_reduce(torch.ones(1))
    thread.join(WAIT_SECONDS)
    assert sorted(noted.calls) == ["all_reduce", "all_reduce", "first", "first"]


def test_a_rank_that_does_not_come_is_named(make: Make):
    with pytest.raises(RankError, match=r"^rank 1 has not come in 0\.05 s"):
        make(0, 2, 0.05).all_reduce(torch.ones(1))


def test_a_wait_for_a_rank_that_does_not_come_can_be_stopped(noted: Noted, make: Make):
    ranks = make(0, 2)
    timer = threading.Timer(0.05, ranks.stop)
    timer.start()
    with pytest.raises(RankError, match=r"^the group has stopped$"):
        ranks.all_reduce(torch.ones(1))
    timer.join()
    assert noted.has_aborted.wait(WAIT_SECONDS)


def test_a_stop_returns_before_nccl_has_freed_what_recordings_hold(noted: Noted, make: Make):
    ranks = make()
    ranks.all_reduce(torch.ones(1))
    noted.may_abort.clear()
    for _ in range(2):
        ranks.stop()
    for operation in (ranks.check, lambda: ranks.all_gather(torch.ones(1))):
        with pytest.raises(RankError, match=r"^the group has stopped$"):
            operation()
    assert noted.calls == ["first", "all_reduce"]
    noted.may_abort.set()
    assert noted.has_aborted.wait(WAIT_SECONDS)
    assert noted.calls == ["first", "all_reduce", "abort"]


def test_an_error_of_the_communicator_is_found_after_replays(noted: Noted, make: Make):
    ranks = make()
    ranks.all_reduce(torch.ones(1))
    ranks.check()
    noted.error = LOST
    for _ in range(2):
        with pytest.raises(RankError, match=r"^rank 0 failed in an operation: NCCL error"):
            ranks.check()
    with pytest.raises(RankError, match=r"process exited$"):
        ranks.all_reduce(torch.ones(1))
    assert noted.calls == ["first", "all_reduce"]


def test_an_operation_that_fails_is_named(noted: Noted, make: Make):
    ranks = make()
    ranks.all_reduce(torch.ones(1))
    noted.error = LOST
    with pytest.raises(RankError, match=r"^rank 0 failed in all_gather: NCCL error"):
        ranks.all_gather(torch.ones(1))


@pytest.mark.parametrize("was_stopped", [False, True])
def test_the_communicator_is_freed_at_the_end(was_stopped: bool, noted: Noted, make: Make):
    ranks = make()
    ranks.all_reduce(torch.ones(1))
    if was_stopped:
        ranks.stop()
    for _ in range(2):
        ranks.close()
    last = ["abort"] if was_stopped else ["synchronize", "abort"]
    assert noted.calls == ["first", "all_reduce", *last]


def test_a_torch_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="this build of torch has no NCCL"):
        NcclCollectives(dist.HashStore(), 0, 1)
