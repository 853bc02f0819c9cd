"""Answers prompts with pictures in one engine, and prints figures as JSON.

    python benchmarks/peers/seer.py ENGINE MODEL_DIR < task.json

Runs in the environment of the engine, so it imports nothing of this project but the engine.
"""

import base64
import io
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

See = Callable[[str, list[Any]], int]
"""Answers a prompt with one token. Returns the number of tokens of the prompt."""


def metronome(model: str, max_len: int) -> See:
    from engine import LLM, SamplingParams

    llm = LLM(model, max_model_len=max_len, log_level="warning", enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def see(prompt: str, pictures: list[Any]) -> int:
        given = {"prompt": prompt, "multi_modal_data": {"image": pictures}}
        (found,) = llm.generate(given, params, use_tqdm=False)
        return len(found.prompt_token_ids)

    return see


def vllm(model: str, max_len: int) -> See:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["HF_HUB_OFFLINE"] = "1"
    from vllm import LLM, SamplingParams

    # Without it, the start encodes the largest pictures, which takes minutes on a CPU.
    start: Any = {"skip_mm_profiling": True, "limit_mm_per_prompt": {"image": 8}}
    llm = LLM(model, max_model_len=max_len, **start)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def see(prompt: str, pictures: list[Any]) -> int:
        given: Any = {"prompt": prompt, "multi_modal_data": {"image": pictures}}
        (found,) = llm.generate(given, params, use_tqdm=False)
        return len(found.prompt_token_ids)

    return see


def transformers(model: str, max_len: int) -> See:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    engine = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.bfloat16).eval()
    processor = AutoProcessor.from_pretrained(model)

    def see(prompt: str, pictures: list[Any]) -> int:
        inputs = processor(text=prompt, images=pictures, return_tensors="pt")
        with torch.inference_mode():
            engine.generate(**inputs, max_new_tokens=1, do_sample=False)
        return int(inputs["input_ids"].shape[1])

    return see


def main() -> None:
    task = json.load(sys.stdin)
    from PIL import Image

    see: See = globals()[sys.argv[1]](sys.argv[2], task["max_len"])
    files = [base64.b64decode(each) for each in task["files"]]
    found = []
    for first, count in task["prompts"]:
        wall, cpu = time.perf_counter(), time.process_time()
        pictures = [Image.open(io.BytesIO(each)) for each in files[first : first + count]]
        tokens = see(task["image"] * count + "What is shown?", pictures)
        seconds = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        found.append({"count": count, "tokens": tokens, **seconds})
    print("FIGURES " + json.dumps(found))


if __name__ == "__main__":
    main()
