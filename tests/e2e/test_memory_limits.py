"""A model that a limit of each process keeps from one worker runs if two ranks divide it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.patience import WAIT_SECONDS

MIB = 1 << 20
PROGRAM = """
import json, os, resource, sys
from pathlib import Path
from engine import LLM, SamplingParams
from engine.errors import ConfigError

def data(pid):  # MiB that count towards the limit
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[5]) * os.sysconf("SC_PAGE_SIZE") >> 20

if __name__ == "__main__":
    model, size, limit = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit << 20, limit << 20))
    options = dict(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, num_kv_blocks=40)
    try:
        llm = LLM(
            model,
            tensor_parallel_size=size,
            num_threads=2,
            skip_tokenizer_init=True,
            log_level="error",
            **options,
        )
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit()
    with llm:
        params = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
        output = llm.generate([[5, 6, 7]], params)[0].outputs[0]
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        used = max(map(data, [os.getpid(), *children]))
        print(json.dumps({"tokens": list(output.token_ids), "used": used}))
"""


def run(tmp_path: Path, model: Path, size: int, limit: int) -> dict[str, Any]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, str(program), str(model), str(size), str(limit)],
        capture_output=True,
        text=True,
        timeout=4 * WAIT_SECONDS,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.slow
def test_two_ranks_run_what_one_process_may_not_hold(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=8192,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    model = tmp_path / "model"
    transformers.LlamaForCausalLM(config).save_pretrained(model)  # 690 MiB in float32
    alone, together = (run(tmp_path, model, size, 0) for size in (1, 2))
    assert alone["tokens"] == together["tokens"]
    assert alone["used"] - together["used"] > 200, (alone, together)

    limit = (alone["used"] + together["used"]) // 2 - 50
    refused = run(tmp_path, model, 1, limit)
    assert "out of memory while the weights were loaded" in refused["error"]
    assert "tensor_parallel_size" in refused["error"]
    assert run(tmp_path, model, 2, limit)["tokens"] == alone["tokens"]
