"""Plans of successive steps, sent to another process."""

import os
import random

import numpy as np

from engine.ipc.plan_stream import COLUMNS, PlanReader, PlanWriter
from engine.ipc.plans import encode
from engine.messages.step import EMPTY, Column, DraftPart, StepPlan

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(1 << 30)))


def column(rng: random.Random, num: int) -> Column:
    return np.array([rng.randrange(100) for _ in range(num)], dtype=np.int32)


def test_plans_arrive_equal_and_keep_the_columns_of_the_step_before() -> None:
    rng = random.Random(SEED)
    print(f"METRONOME_SEED={SEED}")
    writer, reader = PlanWriter(), PlanReader()
    before: tuple[StepPlan, StepPlan] | None = None
    for step in range(200):
        columns = {name: column(rng, rng.randint(0, 5)) for name in COLUMNS}
        columns["rows"] = columns["rows"].astype(np.intp)
        if before is not None:
            columns |= {n: getattr(before[0], n) for n in COLUMNS if rng.random() < 0.7}
        plan = StepPlan(step, **columns, new=[], freed_slots=[], num_tokens=step)
        if rng.random() < 0.3:
            plan.freed_slots = [step]
        if rng.random() < 0.3:
            plan.drafts = DraftPart(column(rng, 2), EMPTY)
        found = reader.decode(writer.encode(plan))
        assert encode(found) == encode(plan)
        if before is not None:
            kept = [name for name in COLUMNS if getattr(plan, name) is getattr(before[0], name)]
            assert all(getattr(found, name) is getattr(before[1], name) for name in kept)
        before = plan, found
