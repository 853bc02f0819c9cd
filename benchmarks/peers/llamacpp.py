"""Adapter for llama.cpp through llama-cpp-python.

Its API computes one sequence at a time, so W2 is its only workload.
"""

import importlib.metadata
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp

from peers import driver


class LlamaCpp:
    def __init__(self, task: driver.Task) -> None:
        self.path = task.model
        cores = len(os.sched_getaffinity(0))
        is_f32 = "f32" in Path(task.model).name
        kv_type = llama_cpp.GGML_TYPE_F32 if is_f32 else llama_cpp.GGML_TYPE_F16
        self.settings = {"n_ctx": task.max_model_len, "n_threads": cores, "n_batch": 512}
        self.model = llama_cpp.Llama(
            task.model,
            n_threads_batch=cores,
            type_k=kv_type,
            type_v=kv_type,
            verbose=False,
            **self.settings,
        )
        self.waiting: deque[tuple[str, list[int], int]] = deque()
        self.tokens: Iterator[int] = iter(())
        self.made = 0

    def add(self, request_id: str, prompt: list[int], num_output: int) -> None:
        self.waiting.append((request_id, prompt, num_output))

    def step(self) -> list[tuple[str, int]]:
        request_id, prompt, num_output = self.waiting[0]
        if not self.made:
            self.model.reset()
            self.tokens = self.model.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True)
        token = next(self.tokens)
        self.model.detokenize([token])
        self.made += 1
        count = self.made
        if count == num_output:
            self.waiting.popleft()
            self.made = 0
        return [(request_id, count)]

    def is_busy(self) -> bool:
        return bool(self.waiting)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "llama.cpp",
            "version": importlib.metadata.version("llama-cpp-python"),
            "dtype": Path(self.path).stem.rpartition("-")[2],  # the file decides, and is named so
            "settings": self.settings,
        }


if __name__ == "__main__":
    driver.main(LlamaCpp)
