"""Adapter for transformers' own code: requests that wait with prompts of one length are computed as
one batch, until each has its tokens."""

import importlib.metadata
import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peers import driver


class Transformers:
    def __init__(self, task: driver.Task) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        dtype = task.dtype or "auto"
        self.model = AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype).eval()
        self.waiting: list[tuple[str, list[int], int]] = []
        self.batch: list[tuple[str, list[int], int]] = []
        self.num_made = 0
        self.inputs = torch.empty(0)
        self.cache: Any = None

    def add(self, request_id: str, prompt: list[int], num_output: int) -> None:
        self.waiting.append((request_id, prompt, num_output))

    @torch.inference_mode()
    def step(self) -> list[tuple[str, int]]:
        if not self.batch:
            kind = self._kind(self.waiting[0])
            self.batch = [each for each in self.waiting if self._kind(each) == kind]
            self.waiting = [each for each in self.waiting if self._kind(each) != kind]
            self.inputs = torch.tensor([prompt for _, prompt, _ in self.batch])
            self.cache, self.num_made = None, 0
        made = self.model(self.inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache, self.inputs = made.past_key_values, made.logits[:, -1:].argmax(-1)
        self.num_made += 1
        tokens = [(request_id, self.num_made) for request_id, _, _ in self.batch]
        if self.num_made == self.batch[0][2]:
            self.batch = []
        return tokens

    @staticmethod
    def _kind(request: tuple[str, list[int], int]) -> tuple[int, int]:
        """Tokens of the prompt and of the output, which are the same in a batch."""
        _, prompt, num_output = request
        return len(prompt), num_output

    def is_busy(self) -> bool:
        return bool(self.waiting or self.batch)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "transformers",
            "version": importlib.metadata.version("transformers"),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "settings": {"attn_implementation": self.model.config._attn_implementation},
        }


if __name__ == "__main__":
    driver.main(Transformers)
