"""The threads behind compiled kernels: right with helpers, without, in a crowd and after a fork."""

import threading
import time

import pytest
import torch

from engine.layers.linear import make_linear
from kernels.cpu.team import TEAM
from kernels.cpu.threads import num_threads, set_threads

ROUNDS = 200


@pytest.fixture(autouse=True)
def _four_threads():
    before = num_threads()
    set_threads(4)
    yield
    set_threads(before)


def problem(seed: int):
    rng = torch.Generator().manual_seed(seed)
    weight, x = torch.randn(700, 300, generator=rng), torch.randn(5, 300, generator=rng)
    return make_linear(weight), x, x @ weight.T


def test_every_item_is_done_once_whoever_helps(seed: int) -> None:
    layer, x, wanted = problem(seed)
    first = layer(x)
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-3)
    for _ in range(ROUNDS):
        assert torch.equal(layer(x), first)
    assert TEAM.size >= 4


def test_threads_that_launch_at_once_do_not_mix(seed: int) -> None:
    wrong: list[int] = []

    def work(index: int) -> None:
        layer, x, wanted = problem(seed + index)
        for _ in range(ROUNDS):
            if not torch.allclose(layer(x), wanted, rtol=1e-4, atol=1e-3):
                wrong.append(index)

    crowd = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    assert not wrong


def test_idle_helpers_sleep(seed: int) -> None:
    layer, x, _ = problem(seed)
    layer(x)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
