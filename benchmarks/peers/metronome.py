"""Our engine, as a user has it: LLMEngine with default settings."""

import importlib.metadata
from typing import Any

from engine import EngineArgs, LLMEngine, SamplingParams
from peers import driver


class Metronome:
    def __init__(self, task: driver.Task) -> None:
        self.settings = {
            "dtype": "float32",
            "max_model_len": task.max_model_len,
            "max_num_seqs": task.max_num_seqs,
            "seed": 0,
        } | task.options
        self.engine = LLMEngine.from_engine_args(EngineArgs(model=task.model, **self.settings))

    def add(self, request_id: str, prompt: list[int], num_output: int) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=num_output, ignore_eos=True, detokenize=True
        )
        self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)

    def step(self) -> list[tuple[str, int]]:
        outputs = self.engine.step()
        return [(output.request_id, len(output.outputs[0].token_ids)) for output in outputs]

    def is_busy(self) -> bool:
        return self.engine.has_unfinished_requests()

    def describe(self) -> dict[str, Any]:
        return {
            "engine": "metronome",
            "version": importlib.metadata.version("metronome-engine"),
            "settings": self.settings,
        }


if __name__ == "__main__":
    driver.main(Metronome)
