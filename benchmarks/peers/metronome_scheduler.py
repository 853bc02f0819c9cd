"""Adapter for this scheduler, with a worker that computes nothing."""

import importlib.metadata
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from scheduler_loads import BLOCK_SIZE, MAX_MODEL_LEN, Setup

from engine.config.sched import SchedulerConfig
from engine.kv.fast_hash import FastHasher
from engine.kv.manager import KVManager
from engine.kv.prefix_index import Sha256Hasher
from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest
from engine.sched.policies.fcfs import FCFS
from engine.sched.policies.lpm import LPM
from engine.sched.policies.priority import Priority
from engine.sched.policy import Admission, Limits, Policy, Ranks, SchedView, Verdict
from engine.sched.predict.cost import StepShape
from engine.sched.request import Request
from engine.sched.scheduler import Scheduler
from peers import scheduler_driver
from policylab.verify.fake import CountingWorker


class EveryHook(FCFS):
    """Decides as FCFS does, but overrides every hook."""

    def limits(self, view: SchedView) -> Limits:
        return super().limits(view)

    def evict(self, view: SchedView) -> Iterable[Request]:
        return super().evict(view)

    def order(self, view: SchedView) -> Iterator[Request]:
        return super().order(view)

    def next_waiting(self, view: SchedView) -> Request | None:
        return super().next_waiting(view)

    def admit(self, req: Request, view: SchedView) -> Admission:
        return super().admit(req, view)

    def chunk(self, req: Request, num_tokens: int, view: SchedView) -> int:
        return num_tokens

    def outranks(self, req: Request, other: Request) -> bool:
        return super().outranks(req, other)

    def victim(
        self, candidates: Sequence[Request], req: Request, view: SchedView
    ) -> Request | None:
        return super().victim(candidates, req, view)

    def on_add(self, req: Request, view: SchedView) -> Verdict:
        return None

    def on_grant(self, req: Request, num_tokens: int, view: SchedView) -> None:
        pass

    def takes_blocks(self, req: Request, other: Request) -> bool:
        return super().takes_blocks(req, other)

    def on_preempt(self, req: Request, view: SchedView) -> None:
        pass

    def on_tokens(self, reqs: Sequence[Request], view: SchedView) -> None:
        pass

    def on_step(self, shape: StepShape, view: SchedView) -> None:
        pass

    def on_finish(self, req: Request, view: SchedView) -> None:
        pass


class Aging(Policy):
    """A minute of waiting counts as one class of priority, so all ranks change in each step."""

    dynamic = True

    def rank(self, req: Request, view: SchedView) -> tuple[float, ...]:
        return (req.priority - (view.now - req.arrival_time) / 60.0,)


class AgingAtOnce(Policy):
    """Overrides the hooks that take arrays, too."""

    dynamic = True

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        return columns.priority - (view.now - columns.arrival_time) / 60.0


class Cautious(Policy):
    """Fewest remaining tokens first; a request preempts only those with twice as many."""

    dynamic = True
    waiting_may_preempt = True

    def ranks(self, reqs: Sequence[Request], view: SchedView) -> Ranks:
        columns = view.columns(reqs)
        return columns.max_total - columns.num_tokens

    def outranks(self, req: Request, other: Request) -> bool:
        return 2 * req.rank[0] < other.rank[0] if req.is_waiting else self.precedes(req, other)


POLICIES: dict[str, type[Policy]] = {
    "fcfs": FCFS,
    "priority": Priority,
    "every-hook": EveryHook,
    "aging": Aging,
    "aging-at-once": AgingAtOnce,
    "lpm": LPM,
    "cautious": Cautious,
}


class Ours:
    def __init__(self, setup: Setup) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_num_seqs=setup.max_num_seqs,
            long_prefill_token_threshold=setup.long_prefill_token_threshold,
            max_model_len=MAX_MODEL_LEN,
        )
        kv = KVManager(
            setup.num_blocks,
            BLOCK_SIZE,
            enable_prefix_caching=setup.caching,
            hasher=FastHasher(seed=0) if setup.hash_algo == "fast" else Sha256Hasher(),
        )
        policy = POLICIES[setup.policy]()
        self.scheduler = Scheduler(
            config, kv, policy, clock=time.perf_counter, timer=time.perf_counter
        )
        self.worker = CountingWorker()

    def add(self, name: str, prompt: list[int], num_output: int, priority: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        add = AddRequest(name, prompt, params, 0, 0.0, max_tokens=num_output, priority=priority)
        return self.scheduler.add_request(add)

    def lookup(self, request: Request) -> int:
        return self.scheduler.kv.lookup(request).num_tokens

    def step(self) -> scheduler_driver.Step:
        before = self.scheduler.settler.counters.num_preemptions
        start = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        planned = time.perf_counter_ns() - start
        result = self.worker.collect(self.worker.launch(plan))
        start = time.perf_counter_ns()
        self.scheduler.update_from_output(plan, result)
        settled = time.perf_counter_ns() - start
        preempted = self.scheduler.settler.counters.num_preemptions - before
        return scheduler_driver.Step(planned, settled, len(plan.rows), plan.num_tokens, preempted)

    def is_busy(self) -> bool:
        return self.scheduler.has_unfinished_requests()


def about() -> dict[str, Any]:
    return {"engine": "metronome", "version": importlib.metadata.version("metronome-engine")}


if __name__ == "__main__":
    scheduler_driver.main(Ours, about())
