"""A rank that fails while a plug-in looks for blocks ends the engine; no plug-in is blamed."""

from __future__ import annotations

import pytest
from support.simulate import make_request, make_run

from engine.errors import RankError
from engine.sched import Policy, Resource


class Looks(Policy):
    def rank(self, req, view):
        raise RankError("rank 1 was killed by SIGKILL")


class Finds(Resource):
    name = "blocks elsewhere"

    def fit(self, req, num_tokens, step):
        raise RankError("rank 1 was killed by SIGKILL")


@pytest.mark.parametrize("added", [{"policy": Looks()}, {"resources": [Finds()]}])
def test_the_failure_of_a_rank_is_not_a_fault_of_a_plug_in(added) -> None:
    run = make_run(**added)
    with pytest.raises(RankError, match="SIGKILL"):
        run.add(make_request("a", [1, 2]))
        run.scheduler.schedule()
    assert run.scheduler.make_stats().num_policy_faults == 0
