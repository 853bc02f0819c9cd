"""What one fresh process computes for some requests, to the last bit.

    python tests/support/fingerprint.py MODEL_DIR '{"dtype": "bfloat16"}'

Prints one line of JSON: by request its tokens and, as hexadecimal floats, their log-probabilities.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 9, 30, 44, 44, 80, 17, 121)
NUM_NEW = 24
Answers = dict[str, list[tuple[int, str]]]
"""By request, each token and the log-probability it was chosen with."""


def prompts(vocab: int) -> list[list[int]]:
    """Prompts of several lengths, two with the same beginning."""
    rng = random.Random(11)
    made = [rng.choices(range(3, vocab), k=length) for length in LENGTHS]
    made[4][:32] = made[3][:32]
    return made


def answers(engine: Any, asked: Mapping[str, Sequence[int]], num_new: int = NUM_NEW) -> Answers:
    """Greedy answers of an ``LLMEngine``, with log-probabilities, to prompts added at once."""
    from engine import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False, logprobs=0
    )
    for name, prompt in asked.items():
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
    found: Answers = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done = output.outputs[0]
            found[output.request_id] = [
                (token, entry[token].logprob.hex())
                for token, entry in zip(done.token_ids, done.logprobs, strict=True)
            ]
    return found


def of_a_fresh_process(path: str | Path, options: Mapping[str, Any]) -> Answers:
    done = subprocess.run(
        [sys.executable, __file__, str(path), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    told: dict[str, list[list[Any]]] = json.loads(done.stdout.splitlines()[-1])
    return {name: [(token, bits) for token, bits in row] for name, row in told.items()}


def main() -> None:
    from engine import EngineArgs, LLMEngine
    from engine.config.model import read_model_info

    path, options = sys.argv[1], json.loads(sys.argv[2])
    info = read_model_info(path)
    longest = min(256, info.max_position_embeddings)
    sizes = {
        "max_model_len": longest,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "num_kv_blocks": 200,
    }
    args = EngineArgs(
        model=path, skip_tokenizer_init=True, log_level="error", **{**sizes, **options}
    )
    made = {str(i): ids[: longest // 2] for i, ids in enumerate(prompts(info.vocab_size))}
    with LLMEngine.from_engine_args(args) as engine:
        print(json.dumps(answers(engine, made, min(NUM_NEW, longest // 2))))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
