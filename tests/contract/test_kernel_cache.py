"""The kernels that a first start compiles are found by the next one, whatever process asks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from e2e.tiny_models import make_tiny_model

from kernels.cpu.disk_cache import kept_file

START = """
import sys
from engine import LLM, SamplingParams
quiet = {"skip_tokenizer_init": True, "max_model_len": 64, "log_level": "info"}
llm = LLM(sys.argv[1], dtype=sys.argv[2], **quiet)
for temperature in (0.0, 1.0):
    params = SamplingParams(max_tokens=4, temperature=temperature, seed=1)
    llm.generate([{"prompt_token_ids": list(range(1, 20))}] * 2, params)
llm.shutdown()
"""


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_second_start_compiles_nothing(tmp_path: Path, dtype: str) -> None:
    cache, model = tmp_path / "cache", make_tiny_model("llama", tmp_path, torch.float32)
    # Of what this machine has compiled already, all but the product: so much is seen to be missing.
    ours = kept_file("")
    if ours is not None:
        shutil.copytree(ours, cache, ignore=shutil.ignore_patterns("*float*_body*"))
    kept: list[dict[Path, int]] = []
    said: list[str] = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", START, str(model), dtype],
            env={**os.environ, "NUMBA_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stderr)
        kept.append({path: path.stat().st_mtime_ns for path in cache.rglob("*.nb*")})
    assert kept[0] == kept[1] and len(kept[0]) > 10
    assert "first start" in said[0] and "first start" not in said[1]
