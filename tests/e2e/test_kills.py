"""A sample of the kill matrix, which `tools/kill_matrix.py` has whole: one of each kind of process.

What clients hear of a core that raises, hangs or stops is in `contract/test_clients_end.py`, of
one that is started again in `contract/test_restarts.py`.
"""

import pytest
from support.kill_cells import Cell, run_cell

SAMPLE = (
    "core/SIGKILL/decode",
    "core/garbage/decode",
    "client/SIGKILL/decode",
    "parent/SIGKILL/handshake",
    "server/SIGKILL/decode",
    pytest.param("rank1/SIGSTOP/shutdown", marks=pytest.mark.slow),
    pytest.param("rank2/raise/shutdown", marks=pytest.mark.slow),
)


@pytest.mark.behaviour(110, 116)
@pytest.mark.parametrize("cell", SAMPLE)
def test_everybody_knows_in_time_and_nothing_is_left(cell: str) -> None:
    outcome = run_cell(Cell(*cell.split("/")), patience=30.0)
    assert not outcome.failures, outcome
