"""Structured outputs beside vLLM's: what a schema costs each, and how soon a first token is there.

    python benchmarks/structured_peers.py MODEL_DIR --vllm-python VENV/bin/python [--num 32]
                                          [--tokens 96] [--rounds 3] [--json FILE]

Each round starts both engines in fresh processes, who is first alternates, with their defaults. In
each: as many requests with a schema as without, all of so many tokens, twice in turn; then single
requests of one token, without a schema and with one that was never seen, once the first schema of
the process is behind it. A throughput ratio is constrained to unconstrained, of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TIMEOUT = 1800
KV_GIB = "4"


def child(engine: str, model: str, num: int, num_tokens: int) -> dict[str, Any]:
    """Measured in this process. Both packages have the same names."""
    from schemas_for_peers import long_schema, simple_schema

    prompts = [{"prompt_token_ids": list(range(20, 84))} for _ in range(num)]
    if engine == "vllm":
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
    else:
        from engine import LLM, SamplingParams, StructuredOutputsParams
    llm = LLM(model=model, max_model_len=1024, max_num_seqs=num)

    def params(tokens: int, seed: int, schema: dict[str, Any] | None) -> Any:
        fields: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": tokens}
        if schema is None:
            return SamplingParams(ignore_eos=True, **fields)
        return SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), **fields)

    def rate(schema: dict[str, Any] | None, tokens: int) -> float:
        asked = [params(tokens, index, schema) for index in range(num)]
        began = time.perf_counter()
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        total = sum(len(out.outputs[0].token_ids) for out in outputs)
        return total / (time.perf_counter() - began)

    def first(schema: dict[str, Any] | None) -> float:
        began = time.perf_counter()
        llm.generate(prompts[:1], params(1, 0, schema), use_tqdm=False)
        return time.perf_counter() - began

    first(None)
    cold = first(simple_schema(0))
    rate(long_schema(), 8)
    rates = [(rate(None, num_tokens), rate(long_schema(), num_tokens)) for _ in range(2)]
    free = statistics.median(first(None) for _ in range(3))
    new = statistics.median(first(simple_schema(1 + index)) for index in range(5))
    return {
        "free_tok_s": statistics.median(free_rate for free_rate, _ in rates),
        "ratio": statistics.median(held / free_rate for free_rate, held in rates),
        "first_token_free_ms": 1e3 * free,
        "first_token_new_schema_ms": 1e3 * new,
        "first_token_cold_ms": 1e3 * cold,
    }


def run_once(engine: str, asked: argparse.Namespace) -> dict[str, Any]:
    environment, python = dict(os.environ), sys.executable
    if engine == "vllm":
        from compare import vllm_environment

        environment.pop("PYTHONPATH", None)
        environment |= vllm_environment(asked) | {"VLLM_CPU_KVCACHE_SPACE": KV_GIB}
        python = str(Path(asked.vllm_python).absolute())
    done = subprocess.run(
        [
            python,
            str(HERE / "structured_peers.py"),
            str(Path(asked.model).absolute()),
            *("--num", str(asked.num), "--tokens", str(asked.tokens), "--child", engine),
        ],
        cwd=HERE,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"free')]
    if done.returncode or not lines:
        raise RuntimeError(f"{engine} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return dict(json.loads(lines[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="model directory with a tokenizer")
    parser.add_argument("--vllm-python", help="Python of an environment with vllm-cpu")
    parser.add_argument("--tcmalloc", help="libtcmalloc_minimal, which vLLM asks to be preloaded")
    parser.add_argument("--num", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    parser.add_argument("--child", choices=("vllm", "metronome"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("\n" + json.dumps(child(asked.child, asked.model, asked.num, asked.tokens)))
        return 0
    import machine

    engines = ["metronome", *(["vllm"] if asked.vllm_python else [])]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn in range(asked.rounds):
        for name in engines if turn % 2 == 0 else engines[::-1]:
            runs[name].append(run_once(name, asked))
            print(name, json.dumps(runs[name][-1]), flush=True)
    for name, made in runs.items():
        medians = {key: round(statistics.median(one[key] for one in made), 3) for key in made[0]}
        print(f"{name}, medians: {medians}")
    if asked.json:
        body = {"machine": machine.describe(), "model": Path(asked.model).name, "runs": runs}
        asked.json.write_text(json.dumps(body, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
