"""A scheduler of one's own, written in full: one request at a time, its prompt in one go.

    LLM(scheduler_cls="examples.schedulers.one_at_a_time.OneAtATime")

It has its own idea of a request and uses nothing of the shared mechanism but `KVManager`, which it
asks for the blocks that its plans name. Whole classes of serving are a page like this one; what
the pages lack (chunks, batches, preemption, policies) is what `engine.sched.Scheduler` is for.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np

from engine.errors import RequestError
from engine.kv.manager import KVManager
from engine.messages.requests import AddRequest, CoreOutputs, Finished, Started
from engine.messages.step import NewSeq, StepPlan, StepResult
from engine.sched.interface import FinishedRequest, RequestCounts, SchedulerInterface


class Job:
    """What `KVManager` reads of a request, and what this scheduler knows of it."""

    row = 0  # there is only one at a time
    adapter = None
    media = ()
    num_computed = 0

    def __init__(self, add: AddRequest, arrival: int) -> None:
        self.add, self.arrival = add, arrival
        self.request_id = add.request_id
        self.tokens = array("i", add.prompt_token_ids)
        self.cache_salt = add.cache_salt
        self.reads_cache = add.params.prompt_logprobs is None


class OneAtATime(SchedulerInterface):
    """First come, first served alone."""

    def __init__(self, config: Any, kv: KVManager, policy: Any, *, clock: Any, **_: Any) -> None:
        self.config, self.kv, self.clock = config, kv, clock
        self.waiting: deque[Job] = deque()
        self.running: Job | None = None
        self.in_flight = False  # one step at a time, so each token is known before the next step
        self.must_free = False  # the worker has the seat of a request that has ended
        self.num_arrived = self.num_steps = 0

    def add_request(self, add: AddRequest) -> None:
        longest = min(len(add.prompt_token_ids) + add.max_tokens, self.config.max_model_len)
        if len(add.prompt_token_ids) > self.config.max_num_batched_tokens:
            raise RequestError("the prompt is longer than a step may be")
        if self.kv.blocks_for(longest) > self.kv.num_usable:
            raise RequestError("it could never fit the KV blocks")
        self.waiting.append(Job(add, self.num_arrived))
        self.num_arrived += 1

    def schedule(self) -> StepPlan:
        new: list[NewSeq] = []
        freed, self.must_free = [0] if self.must_free else [], False
        if self.running is None and self.waiting and not self.in_flight:
            self.running = self.waiting.popleft()
            new = [self.seat(self.running)]
        rows, start, count = [], 0, 0
        if self.running is not None and not self.in_flight:
            rows, start = [0], self.running.num_computed
            count = len(self.running.tokens) - start
            reserved = self.kv.reserve(self.running, len(self.running.tokens))
            assert reserved, "it is alone, and was checked when it came"
            self.running.num_computed += count
            self.in_flight = True
        self.num_steps += 1
        grown = self.kv.drain()
        one, many = np.array(rows, dtype=np.int32), np.array(grown.blocks, dtype=np.int32)
        return StepPlan(
            step=self.num_steps,
            rows=one.astype(np.intp),
            slots=one,
            generations=one,
            starts=one + start,
            counts=one + count,
            samples=one + 1,
            new=new,
            block_slots=np.zeros_like(many),
            block_indices=np.array(grown.indices, dtype=np.int32),
            block_ids=many,
            freed_slots=freed,
            num_tokens=count,
        )

    def seat(self, job: Job) -> NewSeq:
        self.kv.ensure_rows(1)
        job.num_computed = self.kv.ready(job)
        add = job.add
        return NewSeq(
            request_id=job.request_id,
            slot=0,
            token_ids=job.tokens.tolist(),
            num_prompt=len(job.tokens),
            params=add.params,
            seed=add.seed,
            stop_token_ids=[*add.eos_token_ids, *add.params.stop_token_ids],
            bad_words_ids=add.bad_words_ids,
        )

    def update_from_output(self, plan: StepPlan, result: StepResult) -> dict[int, CoreOutputs]:
        if not plan.num_tokens:
            return {}
        self.in_flight = False
        job = self.running
        if job is None:  # aborted while its step was computed
            return {}
        outputs = CoreOutputs([job.request_id], [], [0], self.clock())
        if len(job.tokens) == len(job.add.prompt_token_ids):
            outputs.started = [Started(0, int(plan.starts[0]), self.clock())]
        end = Finished(0, "error", message=result.errors[0]) if result.errors else None
        if end is None:
            self.kv.commit(job, job.num_computed)
            token = int(result.token_ids[0])
            job.tokens.append(token)
            outputs.token_ids, outputs.counts = [token], [1]
            outputs.logprobs, outputs.prompt_logprobs = result.logprobs, result.prompt_logprobs
            end = self.end_of(job, token)
        if end is not None:
            outputs.finished = [end]
            self.leave(job)
        return {job.add.client_index: outputs}

    def end_of(self, job: Job, token: int) -> Finished | None:
        add, num_output = job.add, len(job.tokens) - len(job.add.prompt_token_ids)
        if num_output >= add.params.min_tokens:
            if token in add.eos_token_ids:
                return Finished(0, "stop")
            if token in add.params.stop_token_ids:
                return Finished(0, "stop", token)
        if num_output >= add.max_tokens or len(job.tokens) >= self.config.max_model_len:
            return Finished(0, "length")
        return None

    def leave(self, job: Job) -> None:
        self.kv.finish(job)
        self.running, self.must_free = None, True

    def finish_requests(self, request_ids: Any, reason: Any = "abort") -> list[FinishedRequest]:
        jobs = ([self.running] if self.running else []) + list(self.waiting)
        if request_ids is not None:
            names = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            jobs = [job for job in jobs if job.request_id in names]
        for job in jobs:
            if job is self.running:
                self.leave(job)
            else:
                self.waiting.remove(job)
        return [
            FinishedRequest(job.request_id, job.add.client_index, Finished(0, reason))
            for job in jobs
        ]

    def get_request_counts(self) -> RequestCounts:
        return RequestCounts(int(self.running is not None), len(self.waiting))

    def has_finished_requests(self) -> bool:
        return self.must_free or self.in_flight
