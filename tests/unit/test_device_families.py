"""Whose launch settings a GPU takes: by what it has, also if it is newer than they are."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from kernels.triton.launch import arch_of, is_interpreting

pytestmark = pytest.mark.skipif(
    is_interpreting(), reason="where kernels are interpreted all is one"
)
KIB = 1024
numbers = count()  # each device is asked once


def arch_on(monkeypatch: pytest.MonkeyPatch, target: GPUTarget, max_shared: int) -> str:
    """The architecture of a tensor on a made-up device."""
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        utils=SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": max_shared}),
    )
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    place = SimpleNamespace(index=next(numbers))
    return arch_of(SimpleNamespace(is_cuda=True, device=place))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name, capability, kib, family",
    [
        ("A100", 80, 163, "sm_80"),
        ("RTX 3090", 86, 99, "sm_80"),
        ("Orin", 87, 163, "sm_80"),
        ("L4", 89, 99, "sm_80"),
        ("H100", 90, 227, "sm_90"),
        ("B200", 100, 227, "sm_90"),
        ("B300", 103, 227, "sm_90"),
        ("Thor", 110, 227, "sm_90"),
        ("RTX 5090", 120, 99, "sm_80"),
        ("one that is not there yet", 140, 160, "sm_80"),
    ],
)
def test_settings_fit_the_shared_memory_that_is_there(
    name: str, capability: int, kib: int, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arch_on(monkeypatch, GPUTarget("cuda", capability, 32), kib * KIB) == family
    assert arch_on(monkeypatch, GPUTarget("hip", "gfx942", 64), 64 * KIB) == "gfx942"


def test_devices_that_no_settings_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"capability 7\.5 is not supported; 8\.0"):
        arch_on(monkeypatch, GPUTarget("cuda", 75, 32), 64 * KIB)
    with pytest.raises(ValueError, match=r"13\.0\) has 65536 bytes of shared memory .* 101376"):
        arch_on(monkeypatch, GPUTarget("cuda", 130, 32), 64 * KIB)
