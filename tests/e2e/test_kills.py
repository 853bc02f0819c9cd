"""A sample of the kill matrix, and what it has found; `tools/kill_matrix.py` has all of it."""

import pytest
from support.kill_cells import Cell, run_cell

SAMPLE = (  # one of each kind of fault and of each kind of process
    "core/SIGKILL/decode",
    "core/SIGSTOP/decode",
    "core/raise/prefill",
    "core/hang/add",
    "core/garbage/decode",
    "client/SIGKILL/decode",
    "parent/SIGKILL/handshake",
    "server/SIGKILL/decode",
    "restarted_core/SIGKILL/decode",
    "draft_model/SIGKILL/decode",
)


@pytest.mark.behaviour(110, 116)
@pytest.mark.parametrize("cell", SAMPLE)
def test_everybody_knows_in_time_and_nothing_is_left(cell: str) -> None:
    outcome = run_cell(Cell(*cell.split("/")), patience=30.0)
    assert not outcome.failures, outcome
