"""Adapter for this engine: LLMEngine with default settings."""

import importlib.metadata
from typing import Any

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.config.model import read_model_info
from engine.hub.fetch import fetched
from engine.models.assemble import compute_dtype
from peers import driver


class Metronome:
    def __init__(self, task: driver.Task) -> None:
        self.settings = {
            **({} if task.dtype is None else {"dtype": task.dtype}),
            "max_model_len": task.max_model_len,
            "max_num_seqs": task.max_num_seqs,
            "seed": 0,
        } | task.options
        self.args = EngineArgs(model=task.model, **self.settings)
        self.engine = LLMEngine.from_engine_args(self.args)

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
        config, decided = self.args.create_config(), self.engine.session.client.decided
        model = fetched(config.model, for_core=True, for_text=False)
        computed_in = compute_dtype(model, read_model_info(model.model), "cpu")
        return {
            "engine": "metronome",
            "version": importlib.metadata.version("metronome-engine"),
            "dtype": config.model.quantization or str(computed_in).removeprefix("torch."),
            "kv_pool_tokens": decided.num_kv_blocks * decided.block_size,
            "settings": self.settings,
        }


if __name__ == "__main__":
    driver.main(Metronome)
