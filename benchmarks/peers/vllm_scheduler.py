"""vLLM's scheduler alone, steady decode: schedule() and update_from_output() without a model.

    python -m peers.vllm_scheduler '[1, 32, 256]'          (working directory: benchmarks/)

The last line printed is a JSON object of the figures `step_overhead.py` prints for ours.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

NUM_PROMPT = 128
BLOCK_SIZE = 16
WARM_UP = 20
STEPS = 200
CONFIG = {
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


def make_scheduler(running: int) -> tuple[Scheduler, Any]:
    blocks = running * ((NUM_PROMPT + STEPS + 256) // BLOCK_SIZE + 2) + 64
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(CONFIG))
        config = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            max_num_seqs=max(running, 1),
            max_num_batched_tokens=8192,
            max_model_len=8192,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            kv_cache_memory_bytes=1 << 30,
        ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    kv_config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=kv_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
    )
    return scheduler, get_request_block_hasher(BLOCK_SIZE, hash_function)


def answer(scheduler: Scheduler, plan: Any) -> ModelRunnerOutput:
    """One token for each request that reached its last known one."""
    ids = list(plan.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    tokens = [[17] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
    index = {request_id: row for row, request_id in enumerate(ids)}
    return ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)


def decode(running: int) -> dict[str, float]:
    scheduler, hasher = make_scheduler(running)
    for index in range(running):
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + 200, ignore_eos=True)
        prompt = [(index * 7919 + 31 * j) % 8000 + 10 for j in range(NUM_PROMPT)]
        request = Request(
            request_id=f"req-{index}",
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        scheduler.add_request(request)
    planned, settled = [], []
    while len(planned) < STEPS + WARM_UP:
        start = time.perf_counter_ns()
        plan = scheduler.schedule()
        scheduled = time.perf_counter_ns()
        result = answer(scheduler, plan)
        computed = time.perf_counter_ns()
        scheduler.update_from_output(plan, result)
        done = time.perf_counter_ns()
        if plan.total_num_scheduled_tokens == running:
            planned.append(scheduled - start)
            settled.append(done - computed)
    both = [a + b for a, b in zip(planned, settled, strict=True)][WARM_UP:]
    return {
        "schedule_us": round(statistics.median(planned[WARM_UP:]) / 1e3, 1),
        "update_us": round(statistics.median(settled[WARM_UP:]) / 1e3, 1),
        "both_us": round(statistics.median(both) / 1e3, 1),
        "both_mean_us_a_row": round(statistics.mean(both) / 1e3 / running, 3),
    }


if __name__ == "__main__":
    figures = {str(size): decode(size) for size in json.loads(sys.argv[1])}
    print("\n" + json.dumps(figures))
