"""vLLM with its core in this process or in its own: a request without model time, and 64 with one.

    python -m peers.vllm_wire trips|rate in-process|multiprocess MODEL_DIR

The last line printed is JSON: the times of the round trips in seconds, or output tokens a second of
each run. A round trip is a request of one token from its engine's core client and back, as
`wire_overhead.py` measures ours, on an executor that computes nothing.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
if __name__ == "__main__":  # read while it is imported
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(sys.argv[2] == "multiprocess"))

import msgspec
import torch
from vllm import LLM, SamplingParams
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from wire_loads import NUM_OUTPUT, NUM_REQUESTS, NUM_TRIPS, NUM_WARM_UP, prompts

MAX_MODEL_LEN = 1024
NUM_RUNS = 3


class NoTimeExecutor(Executor):
    """Computes nothing: each row of each step gets token 17."""

    def _init_executor(self) -> None:
        self.answers: dict[str, Any] = {
            "get_kv_cache_spec": {
                "layer": FullAttentionSpec(
                    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32
                )
            },
            "determine_available_memory": 1 << 30,
            "get_supported_tasks": ("generate",),
            "get_supported_kv_cache_layouts": ["NHD"],
        }

    def compile_or_warm_up_model(self) -> None:
        """There is no model."""

    def collective_rpc(
        self, method: str | Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        return [self.answers.get(str(method))]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        ids = list(scheduler_output.num_scheduled_tokens)
        rows = {request_id: row for row, request_id in enumerate(ids)}
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index=rows, sampled_token_ids=[[17] for _ in ids]
        )
        self.future: Future[ModelRunnerOutput] = Future()
        self.future.set_result(output)
        return self.future if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self.future if non_block else self.future.result()

    def check_health(self) -> None:
        """It cannot fail."""


def trips(model: str) -> list[float]:
    """Seconds of each, at the client of the core."""
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        distributed_executor_backend="peers.vllm_wire.NoTimeExecutor",
    )
    client = llm.llm_engine.engine_core
    seen: list[Any] = []
    add, client.add_request = client.add_request, seen.append
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.llm_engine.add_request("one", {"prompt_token_ids": list(range(10, 18))}, params)
    (model_request,) = seen
    times = []
    for index in range(NUM_TRIPS + NUM_WARM_UP):
        began = time.perf_counter()
        add(msgspec.structs.replace(model_request, request_id=str(index)))
        while not any(output.finish_reason for output in client.get_output().outputs):
            pass
        times.append(time.perf_counter() - began)
    return times[NUM_WARM_UP:]


def rates(model: str) -> list[float]:
    """Output tokens a second."""
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQUESTS,
        enable_prefix_caching=True,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    found = []
    for _ in range(NUM_RUNS + 1):  # the first warms up
        began = time.perf_counter()
        llm.generate(prompts(), params, use_tqdm=False)
        found.append(NUM_REQUESTS * NUM_OUTPUT / (time.perf_counter() - began))
    return found[1:]


if __name__ == "__main__":
    what, _, model = sys.argv[1:]
    print(json.dumps(trips(model) if what == "trips" else rates(model)))
