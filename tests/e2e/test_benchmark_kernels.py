"""The benchmark of the CPU's kernels goes through all its groups, on small sizes."""

import json
from pathlib import Path

import cpu_kernels
import pytest
import torch

from kernels.cpu.threads import num_threads, set_threads


@pytest.fixture
def threads():
    before = num_threads()
    yield
    set_threads(before)


def test_every_group_is_measured_and_kept(tmp_path: Path, threads) -> None:
    sizes = cpu_kernels.Sizes(
        out_of_cache=1 << 18,
        copied=1 << 20,
        decodes={"4 x 40": [(1, 39)] * 4, "32 x 280": [(1, 30)] * 3},
        chunks={"20 after 5": [(20, 5)]},
    )
    where = tmp_path / "kernels.json"
    arguments = ["--model", "tiny", "--threads", "1", "--seconds", "0", "--json", str(where)]
    cpu_kernels.main(arguments, sizes)
    found = json.loads(where.read_text())
    groups = {timing["group"] for timing in found["timings"]}
    assert {"linear int8", "decode bf16", "prefill fp32", "KV write bf16", "sampler"} <= groups
    assert all(timing["least_us"] > 0 < timing["floor_us"] for timing in found["timings"])
    assert found["machine"]["cpu"] and found["ceilings"]["bytes"] > 0
    assert torch.get_num_threads() == 1
