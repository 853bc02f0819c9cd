"""Micro-batches: how running requests share the steps in flight of a pipeline of stages.

The last stage samples. A sampled token is known to the scheduler when its step is collected, and to
the first stage with the next plan. So a request decodes in at most one step in flight, and decodes
are spread evenly over as many steps as there are stages, or else stages would be idle. Chunks of a
prompt, whose tokens are known, follow each other in successive steps, and are so small that a long
prompt has chunks in all stages.
"""

from __future__ import annotations

import numpy as np

from engine.messages.step import StepPlan
from engine.sched.request import Request
from engine.sched.resource import Fit, Resource
from engine.sched.roster import Roster
from engine.sched.step_state import Step

KNOWN = -1  # in ``StepPlan.new_token_ids``: the first stage knows the row's tokens
PARTS = 8  # of what is left of a prompt; measured with two stages on CPUs, prompts of 2 k and 8 k


class MicroBatches(Resource):
    """Limits the decodes of a step to its share of all decodes.

    Of n decodes and ``num_stages`` stages, a step may have n / ``num_stages``, rounded up in as
    many steps as the remainder requires. Those left over join the next step that has room, so the
    sizes of successive steps become equal as requests come and go."""

    name = "micro-batches"
    needs = ("new_token_ids",)

    def __init__(self, num_stages: int, roster: Roster) -> None:
        self._num_stages = num_stages
        self._roster = roster
        # By row of the request table: the last step that samples a token for the row.
        self._sampled_in = np.zeros(roster.table.num_rows, dtype=np.int64)

    def watches(self, req: Request) -> bool:
        return False  # decodes are granted in bulk if all that are ready have room

    def serializes(self, req: Request) -> bool:
        return True

    def begin_step(self, step: Step) -> None:
        table, rows = self._roster.table, self._roster.running_rows.columns.rows
        pending, decodes = table.num_pending.all[rows] > 0, table.has_output.all[rows] > 0
        goes_on = table.num_tokens.all[rows] + table.num_pending.all[rows] < table.limit.all[rows]
        in_flight = pending & (decodes | goes_on)  # also prompts that will decode
        num_decodes = int(np.count_nonzero(in_flight | (decodes & ~pending)))
        least, num_larger = divmod(num_decodes, self._num_stages)
        sizes = np.unique(self._sampled_in[rows[in_flight]], return_counts=True)[1]
        step.decode_room = least + int(np.count_nonzero(sizes > least) < num_larger)

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        if step.decode_room > 0 or not self._decodes(req):
            return Fit(num_tokens)
        return Fit(0, "a later micro-batch")

    def take(self, req: Request, num_tokens: int, step: Step) -> None:
        step.decode_room -= self._decodes(req)

    def describe(self, plan: StepPlan) -> None:
        table, rows = self._roster.table, plan.rows
        if (missing := table.num_rows - len(self._sampled_in)) > 0:
            more = np.zeros(missing, dtype=np.int64)
            self._sampled_in = np.concatenate([self._sampled_in, more])
        self._sampled_in[rows[plan.samples > 0]] = plan.step
        decodes = table.has_output.all[rows] > 0
        if decodes.any():
            tokens = np.full(len(rows), KNOWN, dtype=np.int32)
            tokens[decodes] = [req.tokens[-1] for req in self._roster.requests(rows[decodes])]
            plan.new_token_ids = tokens

    def _decodes(self, req: Request) -> bool:
        """True if a token has been sampled for the request since it got its seat."""
        return not req.is_waiting and self._roster.table.has_output.at[req.row] > 0


class StageChunks(Resource):
    """Limits the tokens of a prompt in a step, so that each stage has another chunk of it.

    Larger chunks take less time for each token, but each later stage is idle until the chunk before
    it is done. With n + 1 stages, a prompt gets 1 / (8 n) of what is left of it, but at least
    ``least`` tokens: a step with fewer takes nearly as long."""

    name = "stage chunks"
    is_flexible = True

    def __init__(self, least: int, num_stages: int) -> None:
        """least: tokens of the smallest chunk; num_stages: at least 2."""
        self._least = least
        self._num_parts = PARTS * (num_stages - 1)

    def watches(self, req: Request) -> bool:
        return False  # only prompts have that many tokens

    def fit(self, req: Request, num_tokens: int, step: Step) -> Fit:
        return Fit(min(num_tokens, max(self._least, req.num_uncomputed // self._num_parts)))
