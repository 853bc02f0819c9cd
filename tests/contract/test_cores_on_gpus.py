"""Several cores on one machine with GPUs: each has one of its own, or none is started."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.core_clients import drain
from support.simulate import expected, make_request
from support.spawned import TellingGpus, fake_config

from engine.config.env import INTERPRET_CUDA, VISIBLE_GPUS
from engine.errors import ConfigError
from engine.rpc import gpus as counting
from engine.rpc.gpus import environments_of
from engine.rpc.launch import start_cores

FULL_NAMES = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, GPU-11f84dee-4e54-4d4e-9a0b-1a0a17e1a2b3"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str | None], None]:
    """So many GPUs, of which the environment makes some visible."""

    def see(num: int, visible: str | None = None) -> None:
        monkeypatch.delenv(INTERPRET_CUDA, raising=False)
        monkeypatch.delenv(VISIBLE_GPUS, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num)
        monkeypatch.setattr(counting, "may_have_gpu", lambda: True)
        if visible is not None:
            monkeypatch.setenv(VISIBLE_GPUS, visible)

    return see


@pytest.mark.parametrize(
    "visible", [None, pytest.param("3,1,0", marks=pytest.mark.slow), FULL_NAMES]
)
def test_two_cores_take_the_first_two_gpus(
    visible: str | None, gpus: Callable[[int, str | None], None], tmp_path: Path, place: Path
) -> None:
    gpus(2, visible)
    config = fake_config(multiprocess=True, data_parallel_size=2)
    client = start_cores(config, TellingGpus(folder=str(tmp_path)))
    try:
        client.add_all([make_request(str(i), [i + 1], 3) for i in range(4)])
        assert drain(client)[0] == {str(i): expected([i + 1], 3) for i in range(4)}
        told = [(tmp_path / str(pid)).read_text() for pid in client.pids]
    finally:
        client.shutdown()
    names = ["0", "1"] if visible is None else visible.replace(" ", "").split(",")
    assert told == [f"{name} 0.9" for name in names[:2]]
    assert os.environ.get(VISIBLE_GPUS) == visible  # of this process nothing has changed


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_fewer_gpus_than_cores_are_refused_before_a_process_starts(
    device: str, gpus: Callable[[int, str | None], None], tmp_path: Path
) -> None:
    gpus(2, "4,7")
    config = replace(fake_config(multiprocess=True, data_parallel_size=3), device=device)
    with pytest.raises(
        ConfigError,
        match=r"data_parallel_size is 3, .* sees 2 GPUs \(4, 7\), .* at most 2, make more",
    ):
        start_cores(config, TellingGpus(folder=str(tmp_path)))
    assert not list(tmp_path.iterdir())


def test_on_a_cpu_every_core_sees_what_this_process_sees(
    gpus: Callable[[int, str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(0, None)
    assert environments_of("auto", 2) == environments_of("cuda", 2) == [{}, {}]
    gpus(1, None)
    assert environments_of("cpu", 2) == [{}, {}]
    monkeypatch.setenv(INTERPRET_CUDA, "1")
    assert environments_of("cuda", 2) == [{}, {}]


def test_each_core_sees_the_gpus_of_its_ranks(gpus: Callable[[int, str | None], None]) -> None:
    gpus(5, "7,6,5,4,3")
    seen = environments_of("auto", 2, num_ranks=2)
    assert [each[VISIBLE_GPUS] for each in seen] == ["7,6", "5,4"]
    with pytest.raises(
        ConfigError, match=r"each core needs 2 \(one for each rank\): start at most 2"
    ):
        environments_of("auto", 3, num_ranks=2)
