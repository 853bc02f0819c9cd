"""Kernels at the levels of instructions below this processor's; caches that came from another."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import isa

HERE = Path(__file__).parent

LEVEL = """
from kernels.cpu import isa
print(isa.LEVEL)
isa.asked()
"""
RUN = """
import torch
from engine.layers.linear import make_linear
layer = make_linear(torch.full((64, 32), 0.5, dtype=torch.bfloat16))
print(layer(torch.ones(3, 32, dtype=torch.bfloat16)).sum().item())
"""


def run(*command: str, level: str | None, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env={isa.VARIABLE: level or "", **more},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("level", [level for level in isa.LEVELS if level != "base"])
def test_each_level_computes_the_same(level: str) -> None:
    """Those cases of the kernels' tests that are marked for it."""
    if level == isa.LEVEL:
        pytest.skip(f"{level} is what this process uses: its cases have run beside this one")
    if level not in isa.available():
        pytest.skip(f"{isa.processor()} has no {level}")
    files = (str(HERE / "test_cpu_products.py"), str(HERE / "test_kernels.py"))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "isa", *files, level=level)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_a_level_can_be_asked_for() -> None:
    for level in isa.available():
        done = run("-c", LEVEL, level=level)
        assert (done.returncode, done.stdout.split()) == (0, [level])


def test_what_this_processor_has_not_is_refused() -> None:
    for level in ("avx1024", *(set(isa.LEVELS) - set(isa.available()))):
        done = run("-c", LEVEL, level=level)
        assert done.stdout.split() == [isa.available()[-1]]
        assert f"{isa.VARIABLE} is '{level}'" in done.stderr
        assert isa.available()[-1] in done.stderr


@pytest.mark.timeout(400)
def test_a_cache_of_another_processor_is_added_to(tmp_path: Path) -> None:
    """What one level compiled is never run at another, though both keep it in one place."""
    sizes = []
    levels = isa.available()[-2:]
    for level in (*levels, *levels):
        done = run("-c", RUN, level=level, NUMBA_CACHE_DIR=str(tmp_path))
        assert (done.returncode, done.stdout.split()) == (0, ["3072.0"]), done.stderr[-2000:]
        sizes.append(sum(1 for _ in tmp_path.rglob("*.nbc")))
    half = len(sizes) // 2
    assert sizes[:half] == sorted(set(sizes[:half])), "a level took what another had compiled"
    assert len(set(sizes[half - 1 :])) == 1, "a level did not find what it had compiled"
