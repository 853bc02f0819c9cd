"""A sample of the kill matrix, and what it has found; `tools/kill_matrix.py` has all of it."""

import os
import signal
import time

import pytest
from support.kill_cells import Cell, run_cell
from support.live_core import pid_of, start

from engine.errors import EngineDeadError
from engine.rpc.zmq_client import EngineCoreClient

SAMPLE = (
    "core/SIGKILL/decode",
    "core/SIGSTOP/decode",
    "core/SIGTERM/decode",
    "core/raise/prefill",
    "core/hang/decode",
    "core/hang/add",
    "core/garbage/decode",
    "client/SIGKILL/decode",
    "client/SIGSTOP/decode",
    "client/garbage/prefill",
    "parent/SIGKILL/prefill",
    "parent/SIGKILL/handshake",
    "parent/raise/decode",
    "served_core/SIGSTOP/decode",
    "restarted_core/SIGKILL/decode",
    "restarted_core/SIGTERM/draining",
    "server/SIGKILL/decode",
    "ngram/SIGKILL/decode",
    "draft_model/SIGKILL/decode",
    "draft_model/SIGTERM/prefill",
)


@pytest.mark.behaviour(110, 116)
@pytest.mark.parametrize("cell", SAMPLE)
def test_everybody_knows_in_time_and_nothing_is_left(cell: str) -> None:
    outcome = run_cell(Cell(*cell.split("/")), patience=30.0)
    assert not outcome.failures, outcome


@pytest.mark.behaviour(110)
def test_who_asks_a_core_that_just_died_hears_of_it() -> None:
    """Without waiting until last words reach nobody, which takes a second."""
    assert min(seconds_to_hear_of_a_death() for _ in range(4)) < 0.8, "last words for nobody"


def seconds_to_hear_of_a_death() -> float:
    owner = start()
    client = EngineCoreClient(owner.address)
    assert client.call("echo", 1) == 1
    os.kill(pid_of(owner), signal.SIGKILL)
    time.sleep(0.2)
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        client.call("stats")
    client.shutdown()
    owner.shutdown()
    return time.monotonic() - began
