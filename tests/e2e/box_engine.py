"""The model in the box in a small engine, and runs of it."""

from typing import Any

from engine import LLMEngine, RequestOutput, SamplingParams
from engine.assets import BOX_MODEL
from engine.messages.params import OutputKind

PROMPTS = ["A list comprehension", "The import statement", "class Reader:", "Return a new"]
SIZES: dict[str, Any] = {
    "model": str(BOX_MODEL),
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "num_kv_blocks": 400,
    "disable_log_stats": True,
    "num_threads": 1,
}
# For what must not depend on company on a GPU either: in 16 bits its logits differ with the batch.
EXACT: dict[str, Any] = {"dtype": "float32"}
KINDS: tuple[OutputKind, ...] = ("cumulative", "delta", "final")


def greedy(**options: Any) -> SamplingParams:
    """Greedy sampling of a fixed length, whatever the model writes."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 32, "ignore_eos": True, **options})


def run(llm_engine: LLMEngine, params: dict[str, SamplingParams]) -> dict[str, list[RequestOutput]]:
    """All outputs of these requests, side by side; request ``i`` gets prompt ``i``."""
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in params}
    for number, (name, own) in enumerate(params.items()):
        llm_engine.add_request(name, PROMPTS[number % len(PROMPTS)], own)
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            outputs[output.request_id].append(output)
    return outputs


def run_one(llm_engine: LLMEngine, params: SamplingParams) -> list[RequestOutput]:
    return run(llm_engine, {"one": params})["one"]


def joined(outputs: list[RequestOutput]) -> tuple[str, list[int]]:
    pieces = [output.outputs[0] for output in outputs]
    return "".join(p.text for p in pieces), [i for p in pieces for i in p.token_ids]
