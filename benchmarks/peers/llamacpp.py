"""Adapter for llama.cpp: one context with a sequence for each request, batched continuously.

A step computes the next token of every sequence that decodes, then prompt tokens up to the batch
size that node-llama-cpp sets. The option ``directory`` names where node-llama-cpp is installed.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import driver
from peers.libllama import VERSION, LlamaCpp, used_body

BATCH = 512  # tokens, as node-llama-cpp sets it
MAX_SEQS = 32


@dataclass
class Sequence:
    """A request that has a place in the context."""

    request_id: str
    place: int
    prompt: list[int]
    num_output: int
    num_computed: int = 0
    num_made: int = 0
    last: int = 0


class Batching:
    def __init__(self, task: driver.Task) -> None:
        self.path = task.model
        self.settings = {
            "threads": len(os.sched_getaffinity(0)),
            "num_seqs": MAX_SEQS,
            "max_len": min(task.max_model_len, 768),
        }
        self.model = LlamaCpp(Path(task.options["directory"]), task.model, **self.settings)
        self.waiting: list[tuple[str, list[int], int]] = []
        self.running: list[Sequence] = []
        self.free = list(range(MAX_SEQS))

    def add(self, request_id: str, prompt: list[int], num_output: int) -> None:
        self.waiting.append((request_id, prompt, num_output))

    def step(self) -> list[tuple[str, int]]:
        while self.waiting and self.free:
            request_id, prompt, num_output = self.waiting.pop(0)
            self.running.append(Sequence(request_id, self.free.pop(0), prompt, num_output))
        rows: list[tuple[int, int, int, bool]] = []
        wanted: list[tuple[int, Sequence]] = []
        for seq in sorted(self.running, key=lambda seq: not seq.num_made):  # decodes come first
            if seq.num_made:
                tokens = [seq.last]
            else:
                count = BATCH - len(rows)
                tokens = seq.prompt[seq.num_computed : seq.num_computed + count]
            if not tokens:
                break
            for token in tokens:
                seq.num_computed += 1
                is_wanted = seq.num_computed >= len(seq.prompt)
                rows.append((token, seq.num_computed - 1, seq.place, is_wanted))
            if is_wanted:
                wanted.append((len(rows) - 1, seq))
        self.model.decode(rows)
        return [self._sample(row, seq) for row, seq in wanted]

    def _sample(self, row: int, seq: Sequence) -> tuple[str, int]:
        """Take the most likely token after a row; the sequence leaves when it has all tokens."""
        seq.last = int(self.model.logits(row).argmax())
        seq.num_made += 1
        if seq.num_made == seq.num_output:
            self.running.remove(seq)
            self.model.remove(seq.place)
            self.free.append(seq.place)
        return seq.request_id, seq.num_made

    def is_busy(self) -> bool:
        return bool(self.waiting or self.running)

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "llama.cpp",
            "version": VERSION,
            "body": used_body(),
            "dtype": Path(self.path).stem.rpartition("-")[2],  # the file decides, and is named so
            "settings": self.settings,
        }


if __name__ == "__main__":
    driver.main(Batching)
