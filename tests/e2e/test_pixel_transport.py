"""Pictures for a core in another process, by way of a made-up device's memory."""

from __future__ import annotations

import os
import signal
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.seeing_models import make_seeing_model
from PIL import Image
from support.fake_device_core import llm_with_fake_device
from support.fake_ipc import FakeDevice

from engine import LLM, SamplingParams
from engine.errors import EngineDeadError
from engine.rpc.zmq_client import EngineCoreClient

GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
SMALL = {"num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 200, "log_level": "error"}
NUM_PICTURES = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_model(tmp_path_factory.mktemp("seeing") / "llava", "llava")


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, Any]]:
    dice = np.random.default_rng(5)
    files = []
    for _ in range(NUM_PICTURES):
        file = BytesIO()
        Image.fromarray(dice.integers(0, 256, (40, 40, 3), dtype=np.uint8)).save(file, "PNG")
        files.append(file.getvalue())
    return [{"prompt": "a <image>", "multi_modal_data": {"image": file}} for file in files]


def tokens(llm: LLM, prompts: list[dict[str, Any]]) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def wanted(model: Path, prompts: list[dict[str, Any]]) -> list[list[int]]:
    with LLM(model, **SMALL) as llm:
        return tokens(llm, prompts)


def counters(llm: LLM) -> dict[str, int]:
    stats = llm.llm_engine.stats()
    assert stats is not None
    return stats.counters


def test_the_core_reads_pixels_in_the_pool_and_gives_every_chunk_back(
    model, prompts, wanted, tmp_path
):
    """It does so for requests that are aborted at once, and a killed core's memory is freed."""
    device = FakeDevice(tmp_path)
    options = {"mm_tensor_transport": "cuda_ipc_pool", "mm_tensor_pool_mib": 1, **SMALL}
    with llm_with_fake_device(model, device, **options) as llm:
        engine = llm.llm_engine
        client = engine.session.client
        assert isinstance(client, EngineCoreClient)
        assert client.route is not None
        assert tokens(llm, prompts) == wanted
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
            engine.abort_request(str(number))
        assert tokens(llm, prompts[::-1]) == wanted[::-1]
        found = counters(llm)
        assert found["pixels.pooled"] >= NUM_PICTURES
        assert NUM_PICTURES <= found["encoder.read_on_device"] <= found["pixels.pooled"]
        assert "encoder.unread_on_device" not in found
        client.route.collect()
        assert (client.route.num_lent, device.num_allocated) == (0, 1)
        (pid,) = client.pids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            tokens(llm, prompts)
    assert not list(tmp_path.iterdir())
    assert not device.faults
