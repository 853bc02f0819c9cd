"""Many streams against a core in a process; `tools/soak.py` is the long form."""

import pytest

from tools.soak import Soak, run


@pytest.mark.behaviour(106, 126)
def test_a_hundred_streams_with_cancels_lose_nothing(seed: int) -> None:
    result = run(Soak(seconds=3.0, num_streams=100, num_clients=4, seed=seed))
    assert not result.failures()
    assert result.counts.finished > 20 and result.counts.cancelled > 5
    assert not result.counts.refused
