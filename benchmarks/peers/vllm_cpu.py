"""Adapter for vLLM's CPU build: LLMEngine with the settings that are fastest here."""

import importlib.metadata
import os
from typing import Any

from peers import driver


class VLLM:
    def __init__(self, task: driver.Task) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(task.kv_gib)))
        from vllm import LLM, SamplingParams

        self.make_params = SamplingParams
        settings = {
            **({} if task.dtype is None else {"dtype": task.dtype}),
            "max_model_len": task.max_model_len,
            "max_num_seqs": task.max_num_seqs,
            "enable_prefix_caching": True,
            "seed": 0,
        }
        self.settings = settings | task.options
        self.engine = LLM(model=task.model, **self.settings).llm_engine

    def add(self, request_id: str, prompt: list[int], num_output: int) -> None:
        params = self.make_params(
            temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=True
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[tuple[str, int]]:
        outputs = self.engine.step()
        return [(output.request_id, len(output.outputs[0].token_ids)) for output in outputs]

    def is_busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def describe(self) -> dict[str, Any]:
        config = self.engine.vllm_config
        chosen = {
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "block_size": config.cache_config.block_size,
            "async_scheduling": config.scheduler_config.async_scheduling,
            "compile_mode": str(config.compilation_config.mode),
        }
        return {
            "engine": "vllm-cpu",
            "version": importlib.metadata.version("vllm-cpu"),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "settings": self.settings | chosen,
        }


if __name__ == "__main__":
    driver.main(VLLM)
